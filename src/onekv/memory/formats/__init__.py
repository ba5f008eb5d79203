"""KV formats: how keys and values are stored in the pool, and so on disk.

    auto                     the layer's own dtype
    q8, q6, q5, q4           rotated, then `mx.quantize`: 8, 6, 5 or 4 bits
    tq4, tq3, tq2            TurboQuant: 4, 3 or 2 bits

A single name applies to keys and values. For different formats, each is prefixed with k or v: `kq8vq4`, `ktq4vtq2`,
`kautovq8`; a number alone means q, so `k8v4` is `kq8vq4`. `compared` has those that tables show.

A format is a name and a function that creates its codec (`register`); base.py has the contract of a codec.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from ...errors import SettingError
from .affine import Affine
from .base import Codec, Codes, Factors, Plain, Plane
from .turbo import Turbo

__all__ = [
    "PLAIN",
    "Codec",
    "Codes",
    "Factors",
    "KVFormat",
    "Plain",
    "Plane",
    "compared",
    "larger",
    "names",
    "parse",
    "register",
]

AUTO = "auto"
# From the dim of a row, the layer's dtype, and whether it is for keys. Raises UnsupportedLayerError for other dims.
Make = Callable[[int, mx.Dtype, bool], Codec]


class Format(NamedTuple):
    make: Make
    # Per number: centres of keys are taken off where they are at most 6, with less than 4 there is a warning.
    bits: int


registered: dict[str, Format] = {}


def register(name: str, make: Make, bits: int = 16) -> None:
    """`name`, in lower case, is a format from now on: for `parse`, and so for --kv-format and `LLM(kv_format=...)`."""
    if name in registered or not re.fullmatch(r"[a-z][a-z0-9]*", name):
        raise ValueError(f"{name!r} cannot be a format: it is one already, or not lower-case letters and digits")
    registered[name] = Format(make, bits)


def names() -> tuple[str, ...]:
    return tuple(registered)


def compared() -> tuple[str, ...]:
    """What tables and benchmarks show: all formats, and the pairs of them that are worth their bytes."""
    return (*registered, "k8v4", "k6v4", "k5v4")


register(AUTO, lambda dim, dtype, for_keys: Plain(dim, dtype))
register("q8", lambda dim, dtype, for_keys: Affine(8, dim), 8)
register("q6", lambda dim, dtype, for_keys: Affine(6, dim), 6)
register("q5", lambda dim, dtype, for_keys: Affine(5, dim), 5)
register("q4", lambda dim, dtype, for_keys: Affine(4, dim), 4)
register("tq4", lambda dim, dtype, for_keys: Turbo(4, dim, unbiased=for_keys), 4)
register("tq3", lambda dim, dtype, for_keys: Turbo(3, dim, unbiased=for_keys), 3)
register("tq2", lambda dim, dtype, for_keys: Turbo(2, dim, unbiased=for_keys), 2)


@dataclass(frozen=True)
class KVFormat:
    """The formats of keys and of values, by name."""

    key: str = AUTO
    value: str = AUTO

    def keys(self, dim: int, dtype: mx.Dtype) -> Codec:
        """The codec of a layer's keys; refuses dims that the format cannot store."""
        return _codec(self.key, dim, dtype, for_keys=True)

    def values(self, dim: int, dtype: mx.Dtype) -> Codec:
        return _codec(self.value, dim, dtype, for_keys=False)

    @property
    def plain(self) -> bool:
        return self.key == self.value == AUTO

    @property
    def centred(self) -> bool:
        """Whether the centre of keys is to be taken off: with 8 bits there is nothing to gain."""
        return registered[self.key].bits <= 6

    @property
    def warning(self) -> str | None:
        bits = registered[self.key].bits
        if bits >= 4:
            return None
        return (
            f"--kv-format {self} keeps keys in {bits} bits, which makes answers noticeably worse; "
            "k8v4, k5v4 and q4 are safer"
        )

    def __str__(self) -> str:
        return self.key if self.key == self.value else f"k{self.key}v{self.value}"


PLAIN = KVFormat()
# Those worth going to if another one is not good enough, smallest first.
LADDER = ("tq2", "tq3", "q4", "k5v4", "k6v4", "k8v4", "q8", AUTO)


def larger(kv_format: KVFormat) -> list[str]:
    """Names of formats with more bits for keys or values, and fewer for neither; smallest first. Of plain, none."""

    def bits(each: KVFormat) -> tuple[int, int]:
        return registered[each.key].bits, registered[each.value].bits

    keys, values = bits(kv_format)
    ladder = [(name, *bits(parse(name))) for name in LADDER]
    return [name for name, k, v in ladder if k >= keys and v >= values and k + v > keys + values]


def parse(text: str) -> KVFormat:
    """The format that `text` names."""
    spelled = text.strip().lower()
    if spelled in registered:
        return KVFormat(spelled, spelled)
    side = "|".join((*registered, r"\d"))
    pair = re.fullmatch(f"k({side})v({side})", spelled)
    if pair is not None:
        key, value = (f"q{name}" if name.isdigit() else name for name in pair.groups())
        if key in registered and value in registered:
            return KVFormat(key, value)
    raise SettingError(
        f"--kv-format is {text!r}; it must be one of {', '.join(registered)}, "
        "or one each for keys and values such as k8v4 or ktq4vtq2"
    )


@cache
def _codec(name: str, dim: int, dtype: mx.Dtype, for_keys: bool) -> Codec:
    # Some layers store keys alone: there is nothing to encode in rows of no numbers.
    return registered[name].make(dim, dtype, for_keys) if dim else Plain(dim, dtype)
