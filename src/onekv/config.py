"""One settings object: a field, a command-line flag and an ONEKV_ variable are one thing.

`kv_memory` is `LLM(kv_memory=...)`, `--kv-memory` and `ONEKV_KV_MEMORY`. What is given in the call or on the command
line wins over the variable, the variable over the TOML file (`--config`, where there is one), that over the default.

Wherever a value comes from, text or typed, the setting's own `Convert` makes it what the field holds or refuses it:
`hot_only="off"` means what `--hot-only off` means. None is "not given" everywhere.
"""

import argparse
import difflib
import operator
import os
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from .errors import SettingError
from .units import parse_size

DTYPES = ("float32", "float16", "bfloat16")
DISK_POLICIES = ("write_back", "write_through")
# As a folder for the disk cache: OneKV's own.
AUTO = "auto"

# From a value, and where it was given, to what the field holds. Raises SettingError.
Convert = Callable[[Any, str], Any]


def refuse(value: Any, where: str, wanted: str) -> NoReturn:
    if where.startswith("--"):
        raise SettingError(f"{where} is {value!r}; it must be {wanted}")
    raise SettingError(f"{where}={value!r} is not {wanted}")


def on_or_off(value: Any, where: str) -> bool:
    """on or off, as people write it."""
    switches = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
    spelled = str(value).strip().lower()
    if spelled not in switches:
        refuse(value, where, "on or off")
    return switches[spelled]


def whole(least: int | None = None) -> Convert:
    """A whole number: an integer of any type, or its digits."""
    wanted = "a whole number" + (f" of at least {least}" if least is not None else "")

    def convert(value: Any, where: str) -> int:
        try:
            if isinstance(value, bool):
                raise TypeError
            number = int(value) if isinstance(value, str) else operator.index(value)
        except (TypeError, ValueError):
            refuse(value, where, wanted)
        if least is not None and number < least:
            refuse(number, where, wanted)
        return number

    return convert


def text(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        refuse(value, where, "text")
    return str(value)


def one_of(*names: str) -> Convert:
    def convert(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in names:
            refuse(value, where, f"one of {', '.join(names)}")
        return value

    return convert


def size(shares: bool) -> Convert:
    """Bytes, as a number or a text; where `shares` is true also a percentage. A text stays as it is written."""

    def convert(value: Any, where: str) -> str | int:
        # What a percentage is of is known later; here only the spelling counts.
        parsed = parse_size(value, whole=2**62 if shares else None, name=where)
        return value if isinstance(value, str) else parsed

    return convert


def folder(value: Any, where: str) -> str:
    if not isinstance(value, str | os.PathLike) or not isinstance(path := os.fspath(value), str):
        refuse(value, where, "a folder")
    if not path.strip():
        raise SettingError(f"{where} is empty; give a folder, or auto")
    return path


# Types may be named instead of what converts to them.
_OF_TYPE: dict[Any, Convert] = {int: whole(), str: text}


def setting(default: Any, metavar: str, help: str, type: Any = str) -> Any:
    """A field that is a flag and a variable too; `type` is its `Convert`, or int or str."""
    return field(default=default, metadata={"metavar": metavar, "help": help, "convert": _OF_TYPE.get(type, type)})


Kind = TypeVar("Kind", bound="SettingsBase")


@dataclass(frozen=True)
class SettingsBase:
    """What all groups of settings have in common."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            held = f.default if value is None else f.metadata["convert"](value, flag(f.name))
            object.__setattr__(self, f.name, held)

    @classmethod
    def resolve(cls: type[Kind], given: dict[str, Any], file: dict[str, Any] | None = None) -> Kind:
        """Settings from `given` (None means not given), then the environment, then `file`, then the defaults."""
        known = names(cls)
        unknown = [name for name in given if name not in known]
        if unknown:
            raise SettingError(f"unknown setting {unknown[0]!r}; {_known(unknown[0], known)}")
        values = {}
        for f in fields(cls):
            for where, value in (
                (flag(f.name), given.get(f.name)),
                (variable(f.name), os.environ.get(variable(f.name)) or None),
                (f"{f.name} in the TOML file", (file or {}).get(f.name)),
            ):
                if value is not None:
                    values[f.name] = f.metadata["convert"](value, where)
                    break
        return cls(**values)


@dataclass(frozen=True)
class Settings(SettingsBase):
    kv_memory: str | int | None = setting(
        None,
        "SIZE",
        "bytes for the KV of all conversations, e.g. 512MB, 4GiB, or 50%% of the memory that is free; "
        "default: half of what the weights leave free, at most what max_batch conversations of full length need",
        size(shares=True),
    )
    block_size: int = setting(64, "TOKENS", "tokens in one block of the KV pool; default 64", whole(1))
    max_batch: int = setting(8, "N", "sequences that are generated at the same time; default 8", whole(1))
    prefill_chunk: int | None = setting(
        None, "TOKENS", "tokens of a prompt in one step; default 512 on CPU, 2048 on GPU", whole(1)
    )
    decode_steps: int = setting(
        1, "N", "tokens that running sequences get between two chunks of a waiting prompt; default 1", whole(1)
    )
    max_kv_size: int | None = setting(
        None,
        "TOKENS",
        "keep at most this many tokens per conversation in full-attention layers "
        "(the first 4 and the most recent); default: keep all",
        whole(1),
    )
    prefix_cache: bool = setting(
        True, "on|off", "keep what was computed and start later prompts from it; default on", on_or_off
    )
    dtype: str | None = setting(
        None, "TYPE", f"one of {', '.join(DTYPES)}; default float32 on CPU, else the model's own", one_of(*DTYPES)
    )
    kv_format: str = setting(
        "auto",
        "FORMAT",
        "how keys and values are stored: auto (the model's own dtype), q8, q4, tq4, tq3, tq2, or one each for keys and "
        "values such as k8v4; default auto",
    )
    kv_plain_layers: int = setting(
        0, "N", "first and last layers whose keys and values are stored as they are all the same; default 0", whole(0)
    )
    disk_cache: str | None = setting(
        None,
        "DIR",
        "folder for conversations that the KV pool has no room for, also over restarts; auto: OneKV's own; "
        "default: auto for serve, else none",
        folder,
    )
    disk_limit: str | int | None = setting(
        None,
        "SIZE",
        "the most that folder may take, e.g. 20GB, or 10%% of what is free there; "
        "default: the smaller of 10 GB and 10%% of what is free",
        size(shares=True),
    )
    disk_policy: str | None = setting(
        None,
        "POLICY",
        "write_back: write blocks that are evicted, and the rest at the end; write_through: write every block as soon "
        "as it is full, so that a crash loses little; default write_back",
        one_of(*DISK_POLICIES),
    )
    disk_write_budget: str | int | None = setting(
        None,
        "SIZE",
        "the most to write to that folder in a day, e.g. 50GB, to spare the disk; default: no limit",
        size(shares=False),
    )
    disk_queue: str | int | None = setting(
        None,
        "SIZE",
        "memory for blocks on their way to the disk; what does not fit is forgotten; "
        "default: what a chunk of a prompt evicts, at most 256 MiB",
        size(shares=False),
    )
    hot_only: bool = setting(
        False, "on|off", "never use the disk: evicted blocks are forgotten; default off", on_or_off
    )
    check_integrity: bool = setting(
        sys.flags.dev_mode,
        "on|off",
        "count all blocks whenever nothing runs, and end if one is lost or held twice; "
        "default off, on with python -X dev",
        on_or_off,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.disk_cache is None:
            return
        if self.hot_only:
            raise SettingError(f"--hot-only is on and --disk-cache is {self.disk_cache!r}; give one of the two")
        if not self.prefix_cache:
            raise SettingError(f"--prefix-cache is off and --disk-cache is {self.disk_cache!r}; give one of the two")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return "ONEKV_" + name.upper()


def read_file(path: str, known: list[str]) -> dict[str, Any]:
    """The settings in a TOML file: one table, with the names of `known`."""
    try:
        values: dict[str, Any] = tomllib.loads(Path(path).expanduser().read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingError(f"--config is {path!r}, which cannot be read: {error}") from None
    unknown = [name for name in values if name not in known]
    if unknown:
        raise SettingError(f"{path} sets {unknown[0]!r}; {_known(unknown[0], known)}")
    return values


def _known(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1)
    return f"there are {', '.join(known)}" + (f"; did you mean {near[0]}?" if near else "")


def names(kind: type[SettingsBase]) -> list[str]:
    return [f.name for f in fields(kind)]


def add_arguments(parser: argparse.ArgumentParser, kind: type[SettingsBase] = Settings, title: str = "memory") -> None:
    """One flag per setting, as text; `given_settings` reads them back and `resolve` converts them."""
    group = parser.add_argument_group(title)
    for f in fields(kind):
        described = f"{f.metadata['help']} ({variable(f.name)})"
        group.add_argument(flag(f.name), metavar=f.metadata["metavar"], help=described)


def given_settings(arguments: argparse.Namespace, kind: type[SettingsBase] = Settings) -> dict[str, Any]:
    return {f.name: getattr(arguments, f.name) for f in fields(kind)}
