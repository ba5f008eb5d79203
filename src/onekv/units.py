"""Parses byte sizes such as `512MB`, `4GiB` and `50%`; formats sizes and times for people."""

import re
from fractions import Fraction
from numbers import Integral

from .errors import SettingError

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*|%)\s*", re.IGNORECASE)


def parse_size(text: str | int | float, *, whole: int | None = None, name: str = "size", zero: bool = False) -> int:
    """Bytes in `text`; a percentage is taken of `whole`. `name` is the setting, for the error message.

    0 is a size where `zero` says so.
    """
    if isinstance(text, Integral) and not isinstance(text, bool):
        size = int(text)
    elif isinstance(text, float) and text.is_integer():
        # As `8e9` is.
        size = int(text)
    else:
        match = _SIZE.fullmatch(text) if isinstance(text, str) else None
        unit = match.group(2).lower() if match else None
        if match is None or (unit != "%" and unit not in _UNITS):
            raise SettingError(f"{name}={text!r} is not a size; write it like 512MB, 4GiB or 50%")
        number = Fraction(match.group(1))
        if unit == "%":
            if whole is None:
                raise SettingError(f"{name}={text!r}: a percentage has no meaning here; write bytes like 4GiB")
            size = int(whole * number / 100)
        else:
            size = int(number * _UNITS[unit or ""])
    if size < 0 or (size == 0 and not zero):
        raise SettingError(f"{name}={text!r} must be more than 0 bytes")
    return size


def format_size(size: float) -> str:
    """`size` in the largest binary unit that leaves a number of at least one: `1.50 GiB`."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{int(size)} B"


def format_seconds(seconds: float) -> str:
    """In the largest unit that leaves at least one of it: `5 min`, `12 s`."""
    for unit, scale in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= scale:
            return f"{int(seconds // scale)} {unit}"
    return f"{int(seconds)} s"
