"""One settings object: a field, a command-line flag and an ONEKV_ variable are one thing.

`kv_memory` is `LLM(kv_memory=...)`, `--kv-memory` and `ONEKV_KV_MEMORY`. What is given in the call or on the command
line wins over the variable, the variable over the TOML file (`--config`, where there is one), that over the default.
"""

import argparse
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from .errors import SettingError
from .units import parse_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DTYPES = ("float32", "float16", "bfloat16")
DISK_POLICIES = ("write_back", "write_through")
# As a folder for the disk cache: OneKV's own.
AUTO = "auto"


def on_or_off(text: str) -> bool:
    """on or off, as people write it."""
    switches = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
    if text.lower() not in switches:
        raise ValueError(text)
    return switches[text.lower()]


def setting(default: Any, metavar: str, help: str, type: Any = str) -> Any:
    """A field that is a flag and a variable too."""
    return field(default=default, metadata={"metavar": metavar, "help": help, "type": type})


Kind = TypeVar("Kind", bound="SettingsBase")


@dataclass(frozen=True)
class SettingsBase:
    """What all groups of settings have in common."""

    @classmethod
    def resolve(cls: type[Kind], given: dict[str, Any], file: dict[str, Any] | None = None) -> Kind:
        """Settings from `given` (None means not given), then the environment, then `file`, then the defaults."""
        known = [f.name for f in fields(cls)]
        unknown = set(given) - set(known)
        if unknown:
            raise SettingError(f"unknown setting {sorted(unknown)[0]!r}; there are {', '.join(known)}")
        values = {name: value for name, value in given.items() if value is not None}
        for f in fields(cls):
            text = os.environ.get(variable(f.name))
            if f.name in values:
                continue
            if text:
                values[f.name] = _convert(f.metadata["type"], text, variable(f.name))
            elif file is not None and f.name in file:
                values[f.name] = _convert(f.metadata["type"], _spelled(file[f.name]), f"{f.name} in the TOML file")
        return cls(**values)


@dataclass(frozen=True)
class Settings(SettingsBase):
    kv_memory: str | int | None = setting(
        None,
        "SIZE",
        "bytes for the KV of all conversations, e.g. 512MB, 4GiB, or 50%% of the memory that is free; "
        "default: half of what the weights leave free, at most what max_batch conversations of full length need",
    )
    block_size: int = setting(64, "TOKENS", "tokens in one block of the KV pool; default 64", int)
    max_batch: int = setting(8, "N", "sequences that are generated at the same time; default 8", int)
    prefill_chunk: int | None = setting(
        None, "TOKENS", "tokens of a prompt in one step; default 512 on CPU, 2048 on GPU", int
    )
    decode_steps: int = setting(
        1, "N", "tokens that running sequences get between two chunks of a waiting prompt; default 1", int
    )
    max_kv_size: int | None = setting(
        None,
        "TOKENS",
        "keep at most this many tokens per conversation in full-attention layers "
        "(the first 4 and the most recent); default: keep all",
        int,
    )
    prefix_cache: bool = setting(
        True, "on|off", "keep what was computed and start later prompts from it; default on", on_or_off
    )
    dtype: str | None = setting(
        None, "TYPE", f"one of {', '.join(DTYPES)}; default float32 on CPU, else the model's own"
    )
    kv_format: str = setting(
        "auto",
        "FORMAT",
        "how keys and values are stored: auto (the model's own dtype), q8, q4, tq4, tq3, tq2, or one each for keys and "
        "values such as k8v4; default auto",
    )
    kv_plain_layers: int = setting(
        0, "N", "first and last layers whose keys and values are stored as they are all the same; default 0", int
    )
    disk_cache: str | None = setting(
        None,
        "DIR",
        "folder for conversations that the KV pool has no room for, also over restarts; auto: OneKV's own; "
        "default: auto for serve, else none",
    )
    disk_limit: str | int | None = setting(
        None,
        "SIZE",
        "the most that folder may take, e.g. 20GB, or 10%% of what is free there; "
        "default: the smaller of 10 GB and 10%% of what is free",
    )
    disk_policy: str | None = setting(
        None,
        "POLICY",
        "write_back: write blocks that are evicted, and the rest at the end; write_through: write every block as soon "
        "as it is full, so that a crash loses little; default write_back",
    )
    disk_write_budget: str | int | None = setting(
        None, "SIZE", "the most to write to that folder in a day, e.g. 50GB, to spare the disk; default: no limit"
    )
    disk_queue: str | int | None = setting(
        None,
        "SIZE",
        "memory for blocks on their way to the disk; what does not fit is forgotten; "
        "default: what a chunk of a prompt evicts, at most 256 MiB",
    )
    hot_only: bool = setting(
        False, "on|off", "never use the disk: evicted blocks are forgotten; default off", on_or_off
    )

    def __post_init__(self) -> None:
        for name in ("block_size", "max_batch", "prefill_chunk", "decode_steps", "max_kv_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise SettingError(f"{flag(name)} is {value!r}; it must be a whole number of at least 1")
        if self.kv_memory is not None:
            # What a percentage is of is known with the model; here only the spelling counts.
            parse_size(self.kv_memory, whole=2**62, name=flag("kv_memory"))
        if self.dtype is not None and self.dtype not in DTYPES:
            raise SettingError(f"--dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if not isinstance(self.kv_plain_layers, int) or self.kv_plain_layers < 0:
            raise SettingError(f"--kv-plain-layers is {self.kv_plain_layers!r}; it must be a whole number, 0 or more")
        self._check_disk()

    def _check_disk(self) -> None:
        for name in ("disk_limit", "disk_write_budget", "disk_queue"):
            size = getattr(self, name)
            if size is not None:
                parse_size(size, whole=2**62 if name == "disk_limit" else None, name=flag(name))
        if self.disk_policy is not None and self.disk_policy not in DISK_POLICIES:
            raise SettingError(f"--disk-policy is {self.disk_policy!r}; it must be one of {', '.join(DISK_POLICIES)}")
        if self.disk_cache is None:
            return
        if not self.disk_cache.strip():
            raise SettingError("--disk-cache is empty; give a folder, or auto")
        if self.hot_only:
            raise SettingError(f"--hot-only is on and --disk-cache is {self.disk_cache!r}; give one of the two")
        if not self.prefix_cache:
            raise SettingError(f"--prefix-cache is off and --disk-cache is {self.disk_cache!r}; give one of the two")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return "ONEKV_" + name.upper()


def _convert(kind: Any, text: str, name: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        wanted = "on or off" if kind is on_or_off else "a whole number"
        raise SettingError(f"{name}={text!r} is not {wanted}") from None


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_file(path: str, known: list[str]) -> dict[str, Any]:
    """The settings in a TOML file: one table, with the names of `known`."""
    try:
        values: dict[str, Any] = tomllib.loads(Path(path).expanduser().read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingError(f"--config is {path!r}, which cannot be read: {error}") from None
    unknown = [name for name in values if name not in known]
    if unknown:
        raise SettingError(f"{path} sets {unknown[0]!r}; there are {', '.join(known)}")
    return values


def names(kind: type[SettingsBase]) -> list[str]:
    return [f.name for f in fields(kind)]


def add_arguments(parser: argparse.ArgumentParser, kind: type[SettingsBase] = Settings, title: str = "memory") -> None:
    """One flag per setting; `given_settings` reads them back."""
    group = parser.add_argument_group(title)
    for f in fields(kind):
        text = f"{f.metadata['help']} ({variable(f.name)})"
        group.add_argument(flag(f.name), type=f.metadata["type"], metavar=f.metadata["metavar"], help=text)


def given_settings(arguments: argparse.Namespace, kind: type[SettingsBase] = Settings) -> dict[str, Any]:
    return {f.name: getattr(arguments, f.name) for f in fields(kind)}
