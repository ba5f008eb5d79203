"""Tensors of a GGUF file as MLX arrays, exactly: the same values as the file's own definition
gives.

A block of 32 values in the file, and what becomes of it (affine quantization with groups of 32):

    Q4_0  d, 16 bytes   (q - 8) d        bits 4, scale d, bias  -8 d
    Q4_1  d, m, 16 bytes     q d + m     bits 4, scale d, bias  m
    Q8_0  d, 32 int8         q d         bits 8, scale d, bias  -128 d, q + 128 stored

The low halves of the 16 bytes are values 0 to 15, the high halves 16 to 31; MLX wants neighbours
together.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .gguf_header import TensorInfo

GROUP_SIZE = 32
BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
# What `read_tensor` allocates at most, in bytes of the tensor: what is in the file, its parts in other orders, arrays.
COPIES = 6
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


@dataclass(frozen=True)
class Packed:
    """A quantized matrix as `mx.quantized_matmul` takes it; scales and biases in float32."""

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int

    def dequantize(self, dtype: mx.Dtype) -> mx.array:
        """The values in `dtype`. In float32 they are exact: each product has at most 19 bits."""
        full = mx.dequantize(self.weight, self.scales, self.biases, group_size=GROUP_SIZE, bits=self.bits)
        return full.astype(dtype)


def read_tensor(path: Path, info: TensorInfo) -> mx.array | Packed:
    """Reads one tensor and nothing else of the file. Plain types keep their dtype."""
    raw = np.fromfile(path, np.uint8, info.nbytes, offset=info.start)
    if info.type in BITS:
        return _pack(raw, info)
    plain = raw.view("<f4" if info.type == "F32" else "<f2").reshape(info.shape)
    return mx.array(plain)


def placeholder(info: TensorInfo) -> mx.array | Packed:
    """Arrays of the shapes and dtypes `read_tensor` gives, that hold nothing: NaN if anyone
    looks.
    """
    if info.type not in BITS:
        return _nan(info.shape, mx.float32 if info.type == "F32" else mx.float16)
    *rows, width = info.shape
    bits = BITS[info.type]
    groups = _nan((*rows, width // GROUP_SIZE), mx.float32)
    weight = mx.broadcast_to(mx.array(0, mx.uint32), (*rows, width * bits // 32))
    return Packed(weight, groups, groups, bits)


def _nan(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.broadcast_to(mx.array(float("nan"), dtype), shape)


def _pack(raw: npt.NDArray[np.uint8], info: TensorInfo) -> Packed:
    blocks = raw.reshape(-1, _BLOCK_BYTES[info.type])
    scales = _halves(blocks, 0)
    if info.type == "Q8_0":
        # int8 + 128 as uint8 is the same byte with its top bit flipped.
        packed = blocks[:, 2:] ^ np.uint8(0x80)
        biases = scales * np.float32(-128)
    elif info.type == "Q4_0":
        packed = _neighbours(blocks[:, 2:])
        biases = scales * np.float32(-8)
    else:
        packed = _neighbours(blocks[:, 4:])
        biases = _halves(blocks, 2)
    *rows, width = info.shape
    bits = BITS[info.type]
    words = np.ascontiguousarray(packed).view("<u4").reshape(*rows, width * bits // 32)
    groups = (*rows, width // GROUP_SIZE)
    return Packed(mx.array(words), mx.array(scales.reshape(groups)), mx.array(biases.reshape(groups)), bits)


def _halves(blocks: npt.NDArray[np.uint8], at: int) -> npt.NDArray[np.float32]:
    """The float16 number at byte `at` of every block."""
    halves: npt.NDArray[Any] = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")
    return halves.astype(np.float32)


def _neighbours(halves: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """16 bytes of (value i, value i + 16) as 16 bytes of (value 2 i, value 2 i + 1)."""
    low, high = halves & 0x0F, halves >> 4
    return np.concatenate([low[:, 0::2] | low[:, 1::2] << 4, high[:, 0::2] | high[:, 1::2] << 4], axis=1)
