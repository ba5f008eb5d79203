"""q8, q6, q5, q4: rotated rows in `mx.quantize`'s affine form, code * scale + bias with one scale and bias per group.

A group is the whole row for dims 32, 64 and 128, so that the factors can be left to attention; else the largest of 128,
64, 32 that divides dim. Bits per number: 8, 6, 5 or 4, and 32 / group (dim 64: 8.5 and 4.5; dim 128: 8.25 and 4.25).

Codes of 8 and 4 bits are packed by `mx.quantize`, those of 6 and 5 as two planes (`packing`): MLX packs eight 5-bit
codes into five bytes, most of them straddling two, which is slow to read with vector instructions or on a GPU.

Scales and biases are float16, not bfloat16: `mx.quantize` chooses codes for the exact scale, and rounding it to 8 bits
afterwards moves q8's largest code by half a step. Rotated numbers are kept below float16's largest; keys that are
larger than that exist in no model that works in float16.
"""

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from ...errors import UnsupportedLayerError
from .base import Codec, Codes, Factors, Plane
from .packing import lookup, pack_planes, packed_bytes, pair_table, unpack_planes
from .rotation import VERSION, rotation

GROUPS = (128, 64, 32)
# The difference of two such numbers still has a scale that float16 can hold.
LARGEST = 65504.0


class Affine(Codec):
    def __init__(self, bits: int, dim: int) -> None:
        self.bits, self.dim = bits, dim
        self.group = group_size(bits, dim)
        self.name = f"q{bits}-g{self.group}-{VERSION}"
        groups = dim // self.group
        self._in_planes = bits in (5, 6)
        codes = Plane("q", packed_bytes(bits, dim), mx.uint8)
        self.planes = (
            codes if self._in_planes else Plane("q", codes.nbytes // 4, mx.uint32),
            Plane("scale", groups, mx.float16),
            Plane("bias", groups, mx.float16),
        )
        self.codes = Codes(bits)
        self._rotation = rotation(dim)

    def encode(self, rows: mx.array) -> tuple[mx.array, ...]:
        rotated = mx.clip(self._rotation.apply(rows), -LARGEST, LARGEST).reshape(-1, self.dim)
        codes, scale, bias = mx.quantize(rotated, group_size=self.group, bits=self.bits)
        if self._in_planes:
            codes = pack_planes(self._nearest(rotated, scale, bias), self.bits)
        return tuple(
            array.astype(plane.dtype).reshape(*rows.shape[:-1], plane.width)
            for plane, array in zip(self.planes, (codes, scale, bias), strict=True)
        )

    def _nearest(self, rotated: mx.array, scale: mx.array, bias: mx.array) -> mx.array:
        """The codes that `mx.quantize` has chosen, a byte each."""
        grouped = rotated.reshape(*scale.shape, self.group)
        codes = mx.clip(mx.round((grouped - bias[..., None]) / scale[..., None]), 0, 2**self.bits - 1)
        return codes.astype(mx.uint8).reshape(rotated.shape)

    def read(self, planes: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        codes, scale, bias = planes
        numbers = self._codes(codes, dtype)
        if scale.shape[-1] == 1:
            return numbers
        grouped = numbers.reshape(*scale.shape, self.group)
        rows = grouped * scale[..., None].astype(dtype) + bias[..., None].astype(dtype)
        return rows.reshape(numbers.shape)

    def factors(self, planes: Sequence[mx.array]) -> Factors:
        _, scale, bias = planes
        if scale.shape[-1] > 1:
            return Factors()
        return Factors(scale[..., 0].astype(mx.float32), bias[..., 0].astype(mx.float32))

    def _codes(self, packed: mx.array, dtype: mx.Dtype) -> mx.array:
        """`mx.dequantize` takes 4 to 5 ns per number on CPU; a cast of bytes 0.4, a table of pairs 0.7."""
        if self._in_planes:
            return unpack_planes(packed, self.bits).astype(dtype)
        octets = packed.view(mx.uint8)
        return octets.astype(dtype) if self.bits == 8 else lookup(_nibbles(), octets, dtype)

    def weigh(self, weights: mx.array, planes: Sequence[mx.array]) -> mx.array | None:
        """MLX's own product: nearly as fast as with plain rows. (With queries and keys it is five times slower.)"""
        if self._in_planes:
            return None
        codes, scale, bias = planes
        factors = (scale.astype(weights.dtype), bias.astype(weights.dtype))
        return mx.quantized_matmul(weights, codes, *factors, transpose=False, group_size=self.group, bits=self.bits)

    def rotate(self, rows: mx.array) -> mx.array:
        return self._rotation.apply(rows).astype(rows.dtype)

    def unrotate(self, rows: mx.array) -> mx.array:
        return self._rotation.undo(rows).astype(rows.dtype)


def group_size(bits: int, dim: int) -> int:
    for size in GROUPS:
        if dim % size == 0:
            return size
    raise UnsupportedLayerError(
        f"q{bits} needs a head dim that is a multiple of {GROUPS[-1]}; a layer of this model has {dim}: "
        "use --kv-format tq4 or auto"
    )


@cache
def _nibbles() -> mx.array:
    return pair_table([float(code) for code in range(16)])
