"""KV formats: how keys and values are stored in the pool, and so on disk.

    auto                     the layer's own dtype
    q8, q4                   rotated, then `mx.quantize`: 8 or 4 bits
    tq4, tq3, tq2            TurboQuant: 4, 3 or 2 bits

One name stands for keys and values both. For different ones, k and v come before each: `kq8vq4`, `ktq4vtq2`,
`kautovq8`; a bare number means q, so `k8v4` is `kq8vq4`.
"""

import re
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from ...errors import SettingError
from .affine import Affine
from .base import Codec, Factors, Part, Plain
from .turbo import Turbo

__all__ = ["NAMES", "PLAIN", "Codec", "Factors", "KVFormat", "Part", "Plain", "parse"]

AUTO = "auto"
# Name -> bits per number.
_AFFINE = {"q8": 8, "q4": 4}
_TURBO = {"tq4": 4, "tq3": 3, "tq2": 2}
_BITS = {**_AFFINE, **_TURBO}
NAMES = (AUTO, *_BITS)
_PAIR = re.compile(r"k([a-z]*\d?)v([a-z]*\d?)")


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
        return _BITS.get(self.key, 16) <= 4

    @property
    def warning(self) -> str | None:
        bits = _BITS.get(self.key, 16)
        if bits >= 4:
            return None
        return (
            f"--kv-format {self} keeps keys in {bits} bits, which makes answers noticeably worse; "
            "k8v4, q4 and tq4 are safer"
        )

    def __str__(self) -> str:
        return self.key if self.key == self.value else f"k{self.key}v{self.value}"


PLAIN = KVFormat()


def parse(text: str) -> KVFormat:
    """The format that `text` names."""
    spelled = text.strip().lower()
    pair = _PAIR.fullmatch(spelled)
    key, value = pair.groups() if pair else (spelled, spelled)
    key, value = (f"q{name}" if name.isdigit() else name for name in (key, value))
    if key not in NAMES or value not in NAMES:
        raise SettingError(
            f"--kv-format is {text!r}; it must be one of {', '.join(NAMES)}, "
            "or one each for keys and values such as k8v4 or ktq4vtq2"
        )
    return KVFormat(key, value)


@cache
def _codec(name: str, dim: int, dtype: mx.Dtype, for_keys: bool) -> Codec:
    # Some layers store keys alone: there is nothing to encode in rows of no numbers.
    if name == AUTO or dim == 0:
        return Plain(dim, dtype)
    if name in _AFFINE:
        return Affine(_AFFINE[name], dim)
    return Turbo(_TURBO[name], dim, unbiased=for_keys)
