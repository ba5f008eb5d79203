"""Settings: each is defined once, as a field; keyword, flag, variable, TOML name, `--help` and the tables come from it.

`kv_memory` is `LLM(kv_memory=...)`, `--kv-memory` and `ONEKV_KV_MEMORY`. A value in the call or on the command line
overrides the variable, the variable overrides the TOML file (`--config`), and that overrides the default.

Wherever a value comes from, text or typed, the setting's own `Convert` converts or rejects it: `hot_only="off"` means
the same as `--hot-only off`. None means "not given" everywhere.

pydantic-settings is not used: importing it takes longer than all of `onekv --help`, and its errors do not tell whether
a value came from a flag, a variable or a file. Most of the code below would still be needed.
"""

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
REMOTE_WRITES = ("twice", "all", "off")
SPECULATE = ("auto", "off", "lookup", "draft")
KERNELS = ("auto", "off")
# As a folder for the disk cache: OneKV's own.
AUTO = "auto"

# From a value, and where it was given, to what the field holds. Raises SettingError.
Value = TypeVar("Value")
Default = TypeVar("Default")
Convert = Callable[[Any, str], Value]


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


def whole(least: int | None = None, most: int | None = None) -> Convert[int]:
    """A whole number: an integer of any type, or its digits. `most` needs `least`."""
    wanted = "a whole number"
    if least is not None:
        wanted += f" of at least {least}" if most is None else f" from {least} to {most}"

    def convert(value: Any, where: str) -> int:
        try:
            if isinstance(value, bool):
                raise TypeError
            number = int(value) if isinstance(value, str) else operator.index(value)
        except (TypeError, ValueError):
            refuse(value, where, wanted)
        if (least is not None and number < least) or (most is not None and number > most):
            refuse(number, where, wanted)
        return number

    return convert


def text(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise SettingError(f"{where} must be text")  # Not repeated: it may be a secret.
    return str(value)


def one_of(*names: str) -> Convert[str]:
    def convert(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in names:
            refuse(value, where, f"one of {', '.join(names)}")
        return value

    return convert


def size(shares: bool, zero: bool = False) -> Convert[str | int]:
    """Bytes, as a number or a text; where `shares` is true also a percentage. A text stays as it is written."""

    def convert(value: Any, where: str) -> str | int:
        # What a percentage is of is known later; here only the spelling counts.
        parsed = parse_size(value, whole=2**62 if shares else None, name=where, zero=zero)
        return value if isinstance(value, str) else parsed

    return convert


def folder(value: Any, where: str) -> str:
    if not isinstance(value, str | os.PathLike) or not isinstance(path := os.fspath(value), str):
        refuse(value, where, "a folder")
    if not path.strip():
        raise SettingError(f"{where} is empty; use a folder, or auto")
    return path


@dataclass(frozen=True)
class Setting:
    """What there is to say about one setting."""

    name: str
    default: Any
    convert: Convert[Any]
    # What it is for, in words that need no formatting.
    help: str
    metavar: str
    # The unit of a number; empty if there is none.
    unit: str
    # What applies where nothing is given and no value says it: None, or known only with a model or a device.
    otherwise: str
    # Whether the flag may be given several times; all of its values together are one list.
    repeats: bool

    @property
    def default_text(self) -> str:
        if self.otherwise:
            return self.otherwise
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if self.default is None:
            return "none"
        return counted(self.default, self.unit)


def counted(number: Any, unit: str) -> str:
    """`1 token`, `64 tokens`, `8000`."""
    one = unit.removesuffix("es") if unit.endswith("sses") else unit.removesuffix("s")
    return f"{number} {one if number == 1 else unit}".rstrip()


def setting(
    default: Default,
    convert: Convert[Value],
    help: str,
    *,
    metavar: str = "",
    unit: str = "",
    otherwise: str = "",
    repeats: bool = False,
    secret: bool = False,
) -> Default | Value:
    """A field of a `SettingsBase`. The metavar of a number is its unit. A secret is not in what `repr` gives."""
    said = {"convert": convert, "help": help, "metavar": metavar or unit.upper(), "unit": unit, "otherwise": otherwise}
    return field(default=default, repr=not secret, metadata={**said, "repeats": repeats})


def switch(default: bool, help: str, otherwise: str = "") -> bool:
    return setting(default, on_or_off, help, metavar="on|off", otherwise=otherwise)


Kind = TypeVar("Kind", bound="SettingsBase")


@dataclass(frozen=True)
class SettingsBase:
    """What all groups of settings have in common."""

    def __post_init__(self) -> None:
        for each in self.defined():
            value = getattr(self, each.name)
            held = each.default if value is None else each.convert(value, flag(each.name))
            object.__setattr__(self, each.name, held)

    @classmethod
    def defined(cls) -> list[Setting]:
        return [Setting(f.name, f.default, **f.metadata) for f in fields(cls)]

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]

    @classmethod
    def resolve(cls: type[Kind], given: dict[str, Any], file: dict[str, Any] | None = None) -> Kind:
        """Settings from `given` (None means not given), then the environment, then `file`, then the defaults."""
        known = cls.names()
        unknown = [name for name in given if name not in known]
        if unknown:
            raise SettingError(f"unknown setting {unknown[0]!r}; {there_are(unknown[0], known)}")
        values = {}
        for each in cls.defined():
            for where, value in (
                (flag(each.name), given.get(each.name)),
                (variable(each.name), os.environ.get(variable(each.name)) or None),
                (f"{each.name} in the TOML file", (file or {}).get(each.name)),
            ):
                if value is not None:
                    values[each.name] = each.convert(value, where)
                    break
        return cls(**values)


@dataclass(frozen=True)
class Settings(SettingsBase):
    """How a model is held in memory and on disk, and run."""

    kv_memory: str | int | None = setting(
        None,
        size(shares=True),
        "memory for the KV cache of all conversations, such as 512MB, 4GiB, or 50% of free memory",
        metavar="SIZE",
        otherwise="half of what is free after the weights, at most what max_batch full-length conversations need",
    )
    block_size: int = setting(64, whole(1), "tokens per block of the KV pool", unit="tokens")
    max_batch: int = setting(8, whole(1), "maximum number of sequences decoded concurrently", unit="sequences")
    prefill_chunk: int | None = setting(
        None,
        whole(1),
        "maximum prompt tokens prefilled in one step",
        unit="tokens",
        otherwise="512 tokens on CPU, 2048 on GPU",
    )
    decode_steps: int = setting(
        1, whole(1), "tokens decoded per running sequence between two prefill chunks of another prompt", unit="tokens"
    )
    max_kv_size: int | None = setting(
        None,
        whole(1),
        "maximum tokens per conversation kept by full-attention layers: the first 4 and the most recent",
        unit="tokens",
        otherwise="all tokens",
    )
    speculate: str = setting(
        "auto",
        one_of(*SPECULATE),
        "speculative decoding, which verifies several guessed tokens in one step: lookup guesses from repeated text, "
        "draft uses --draft-model, auto uses whichever is available if the model supports it, off disables it",
        metavar="HOW",
    )
    draft_model: str | None = setting(
        None,
        folder,
        "smaller model with the same tokenizer for speculation: a name, hub id, folder or .gguf file; its KV counts "
        "towards --kv-memory",
        metavar="MODEL",
    )
    draft_tokens: int = setting(15, whole(1), "maximum tokens guessed at a time", unit="tokens")
    adapter: str | None = setting(
        None,
        folder,
        "LoRA adapter for the model: a folder with adapters.safetensors and adapter_config.json, as written by "
        "mlx-lm's lora command",
        metavar="DIR",
    )
    prefix_cache: bool = switch(True, "keep computed KV and reuse it for later prompts with the same prefix")
    dtype: str | None = setting(
        None,
        one_of(*DTYPES),
        f"type to compute in: {', '.join(DTYPES)}",
        metavar="TYPE",
        otherwise="float32 on CPU, otherwise the model's own",
    )
    kernels: str = setting(
        "auto",
        one_of(*KERNELS),
        "auto uses OneKV's CUDA kernels and compiled loops where they apply, off uses MLX's own operations: slower",
        metavar="auto|off",
    )
    kv_format: str = setting(
        "auto",
        text,
        "storage format of keys and values: auto (the model's own dtype), q8, q6, q5, q4, tq4, tq3, tq2, or one each "
        "for keys and values, such as k8v4 or k5v4",
        metavar="FORMAT",
    )
    kv_plain_layers: int = setting(
        0,
        whole(0),
        "number of first and of last layers stored unquantized regardless of --kv-format",
        unit="layers",
    )
    disk_cache: str | None = setting(
        None,
        folder,
        "folder for conversations evicted from the KV pool, kept across restarts; auto is OneKV's own",
        metavar="DIR",
        otherwise="auto for serve, otherwise none",
    )
    disk_limit: str | int | None = setting(
        None,
        size(shares=True),
        "maximum size of that folder, including its index, for all models together, such as 20GB, or 10% of the free "
        "space there",
        metavar="SIZE",
        otherwise="the smaller of 10 GB and 10% of the free space",
    )
    disk_policy: str | None = setting(
        None,
        one_of(*DISK_POLICIES),
        "write_back writes blocks on eviction, and the rest at exit; write_through writes each block as soon as it is "
        "full, so that a crash loses little",
        metavar="POLICY",
        otherwise="write_back",
    )
    disk_write_budget: str | int | None = setting(
        None,
        size(shares=False),
        "maximum written to that folder per day (UTC), such as 50GB, to limit disk wear",
        metavar="SIZE",
        otherwise="no limit",
    )
    disk_queue: str | int | None = setting(
        None,
        size(shares=False),
        "memory for blocks waiting to be written to disk; blocks that do not fit are dropped",
        metavar="SIZE",
        otherwise="what one prefill chunk evicts, at most 256 MiB",
    )
    remote_tier: str | None = setting(
        None,
        text,
        "store shared by several servers, used after the disk: valkey://HOST:PORT/0?ttl=7d (redis://, and with TLS "
        "valkeys:// or rediss://), s3://BUCKET/PREFIX, or file:///shared/folder",
        metavar="URL",
        secret=True,
    )
    remote_password: str | None = setting(
        None,
        text,
        "its password, if not in the URL; an environment variable is safer than the command line",
        metavar="PASSWORD",
        secret=True,
    )
    tier_secret: str | None = setting(
        None,
        text,
        "secret shared by all servers on that store, used to sign blocks; @FILE reads it from a file, "
        "none trusts everyone who can write to the store; required unless the store is local or a folder",
        metavar="SECRET",
        otherwise="no secret",
        secret=True,
    )
    remote_write: str = setting(
        "twice",
        one_of(*REMOTE_WRITES),
        "blocks to write there: those used at least twice, all, or none (off, read-only)",
        metavar="WHICH",
    )
    remote_write_rate: str | int = setting(
        "100MB", size(shares=False), "maximum written there per second, such as 20MB", metavar="SIZE"
    )
    hot_only: bool = switch(False, "never use the disk: evicted blocks are dropped; excludes --disk-cache")
    check_integrity: bool = switch(
        sys.flags.dev_mode,
        "count all blocks whenever the engine becomes idle, and stop it if one is lost or held twice",
        otherwise="off, on with python -X dev",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.speculate == "draft" and self.draft_model is None:
            raise SettingError("--speculate is 'draft', but there is no draft model; set --draft-model")
        if self.speculate in ("off", "lookup") and self.draft_model is not None:
            raise SettingError(
                f"--speculate is {self.speculate!r}, but --draft-model is {self.draft_model!r}; set only one of them"
            )
        if self.remote_tier is not None and not self.prefix_cache:
            raise SettingError("--prefix-cache is off, but --remote-tier is set; set only one of them")
        if self.disk_cache is None:
            return
        if self.hot_only:
            raise SettingError(f"--hot-only is on, but --disk-cache is {self.disk_cache!r}; set only one of them")
        if not self.prefix_cache:
            raise SettingError(f"--prefix-cache is off, but --disk-cache is {self.disk_cache!r}; set only one of them")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return "ONEKV_" + name.upper()


def read_file(path: str, known: list[str]) -> dict[str, Any]:
    """The settings in a TOML file: one table of names in `known`. A value may be a table if its setting takes one."""
    try:
        values: dict[str, Any] = tomllib.loads(Path(path).expanduser().read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingError(f"cannot read the file {path!r} given as --config: {error}") from None
    unknown = [name for name in values if name not in known]
    if unknown:
        raise SettingError(f"{path} sets {unknown[0]!r}; {there_are(unknown[0], known)}")
    return values


def there_are(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1)
    return f"available: {', '.join(known)}" + (f"; did you mean {near[0]}?" if near else "")
