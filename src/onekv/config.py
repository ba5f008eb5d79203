"""Settings: each is defined once, as a field; keyword, flag, variable, TOML name, `--help` and the tables come from it.

`kv_memory` is `LLM(kv_memory=...)`, `--kv-memory` and `ONEKV_KV_MEMORY`. What is given in the call or on the command
line wins over the variable, the variable over the TOML file (`--config`, where there is one), that over the default.

Wherever a value comes from, text or typed, the setting's own `Convert` makes it what the field holds or refuses it:
`hot_only="off"` means what `--hot-only off` means. None is "not given" everywhere.

Not pydantic-settings: importing it takes longer than all of `onekv --help`, and its errors do not know whether a value
came from a flag, a variable or a file. What is below would mostly stay.
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
        refuse(value, where, "text")
    return str(value)


def one_of(*names: str) -> Convert[str]:
    def convert(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in names:
            refuse(value, where, f"one of {', '.join(names)}")
        return value

    return convert


def size(shares: bool) -> Convert[str | int]:
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


@dataclass(frozen=True)
class Setting:
    """What there is to say about one setting."""

    name: str
    default: Any
    convert: Convert[Any]
    # What it is for, in words that need no formatting.
    help: str
    metavar: str
    # What a number counts; empty where there is none.
    unit: str
    # What applies where nothing is given and no value says it: None, or known only with a model or a device.
    otherwise: str

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
    return f"{number} {unit.removesuffix('s') if number == 1 else unit}".rstrip()


def setting(
    default: Default, convert: Convert[Value], help: str, *, metavar: str = "", unit: str = "", otherwise: str = ""
) -> Default | Value:
    """A field of a `SettingsBase`. The metavar of a number is its unit."""
    said = {"convert": convert, "help": help, "metavar": metavar or unit.upper(), "unit": unit, "otherwise": otherwise}
    return field(default=default, metadata=said)


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
            raise SettingError(f"unknown setting {unknown[0]!r}; {_known(unknown[0], known)}")
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
        "bytes for the KV of all conversations, such as 512MB, 4GiB, or 50% of the memory that is free",
        metavar="SIZE",
        otherwise="half of what the weights leave free, at most what max_batch conversations of full length need",
    )
    block_size: int = setting(64, whole(1), "tokens in one block of the KV pool", unit="tokens")
    max_batch: int = setting(8, whole(1), "sequences that are generated at the same time", unit="sequences")
    prefill_chunk: int | None = setting(
        None,
        whole(1),
        "tokens of a prompt in one step",
        unit="tokens",
        otherwise="512 tokens on CPU, 2048 on GPU",
    )
    decode_steps: int = setting(
        1, whole(1), "tokens that running sequences get between two chunks of a waiting prompt", unit="tokens"
    )
    max_kv_size: int | None = setting(
        None,
        whole(1),
        "tokens of a conversation that full-attention layers keep at most: the first 4 and the most recent",
        unit="tokens",
        otherwise="all tokens",
    )
    prefix_cache: bool = switch(True, "keep what was computed and start later prompts from it")
    dtype: str | None = setting(
        None,
        one_of(*DTYPES),
        f"what the model computes in: {', '.join(DTYPES)}",
        metavar="TYPE",
        otherwise="float32 on CPU, else the model's own",
    )
    kv_format: str = setting(
        "auto",
        text,
        "how keys and values are stored: auto (the model's own dtype), q8, q4, tq4, tq3, tq2, or one each for keys and "
        "values such as k8v4",
        metavar="FORMAT",
    )
    kv_plain_layers: int = setting(
        0,
        whole(0),
        "first and last layers, so many of each, that are stored as they are whatever --kv-format says",
        unit="layers",
    )
    disk_cache: str | None = setting(
        None,
        folder,
        "folder for conversations that the KV pool has no room for, also over restarts; auto is OneKV's own",
        metavar="DIR",
        otherwise="auto for serve, else none",
    )
    disk_limit: str | int | None = setting(
        None,
        size(shares=True),
        "the most that folder may take, with its index and for all models together, such as 20GB, or 10% of what is "
        "free there",
        metavar="SIZE",
        otherwise="the smaller of 10 GB and 10% of what is free",
    )
    disk_policy: str | None = setting(
        None,
        one_of(*DISK_POLICIES),
        "write_back writes blocks that are evicted, and the rest at the end; write_through writes every block as soon "
        "as it is full, so that a crash loses little",
        metavar="POLICY",
        otherwise="write_back",
    )
    disk_write_budget: str | int | None = setting(
        None,
        size(shares=False),
        "the most to write to that folder in a day (UTC), such as 50GB, to spare the disk",
        metavar="SIZE",
        otherwise="no limit",
    )
    disk_queue: str | int | None = setting(
        None,
        size(shares=False),
        "memory for blocks on their way to the disk; what does not fit is forgotten",
        metavar="SIZE",
        otherwise="what a chunk of a prompt evicts, at most 256 MiB",
    )
    hot_only: bool = switch(False, "never use the disk: evicted blocks are forgotten; not together with --disk-cache")
    check_integrity: bool = switch(
        sys.flags.dev_mode,
        "count all blocks whenever nothing runs, and end if one is lost or held twice",
        otherwise="off, on with python -X dev",
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
