"""Products of a few rows with the weights of MLX layers, by compiled loops, on the layers' own memory.

Weights stay as they are: float32, float16, bfloat16, or packed by affine quantization with 4 or 8 bits. Inputs and
results are float32. The loops are for a few rows; for many, as in prefill, BLAS with unpacked weights is faster.
"""

import functools
from abc import ABC, abstractmethod
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from .. import loops
from .threads import threads

Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

COMPILING = "onekv: compiling matrix products for this processor; this is done once and takes about 10 s"
GROUPS = {32: 0, 64: 1, 128: 2}
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
# Up to this many bytes of weights, times rows, a second thread takes longer to wake than it saves.
ALONE = 100_000


def supports(layer: Module) -> bool:
    """Whether there are loops for this layer; not for a subclass, which may do something else."""
    if loops.why_not() is not None:
        return False
    if type(layer) in (Linear, Embedding):
        return layer.weight.dtype in FLOATS
    if type(layer) not in (QuantizedLinear, QuantizedEmbedding):
        return False
    return (
        layer.mode == "affine"
        and layer.bits in (4, 8)
        and layer.group_size in GROUPS
        and layer.scales.dtype in FLOATS
        and layer.biases.dtype in FLOATS
    )


def product(layer: Module) -> "Product":
    """Of a layer that is supported; embeddings are taken as the matrix that gives logits."""
    weight, bias = layer.weight, layer.get("bias")
    more = None if bias is None else _floats(_numbers(bias))
    if type(layer) in (Linear, Embedding):
        return Plain(_numbers(weight), more)
    bytes_of = _numbers(weight).view(np.uint8)
    return Packed(bytes_of, _numbers(layer.scales), _numbers(layer.biases), layer.bits, layer.group_size, more)


class Product(ABC):
    """Multiplies rows of `k` numbers with an [n, k] matrix."""

    def __init__(self, n: int, k: int, nbytes: int, bias: Floats | None) -> None:
        self.n, self.k, self._nbytes, self._bias = n, k, nbytes, bias

    def __call__(self, x: Floats) -> Floats:
        """`x` [rows, k], to [rows, n]. The result for a row does not depend on the other rows."""
        out = np.empty((len(x), self.n), np.float32)
        self.multiply(np.ascontiguousarray(x), out)
        return out

    def multiply(self, x: Floats, out: Floats) -> None:
        """The same into `out`; both in their order in memory."""
        self._multiply(x, out, threads() if len(x) * self._nbytes > ALONE else 1)
        if self._bias is not None:
            out += self._bias

    @abstractmethod
    def unpack(self, out: Floats) -> None:
        """The whole matrix in float32, into `out` [n, k].

        By one thread: BLAS, which is next, has threads of its own that stay on their cores for a while.
        """

    @abstractmethod
    def _multiply(self, x: Floats, out: Floats, count: int) -> None:
        """With this many threads."""


class Plain(Product):
    """Weights [n, k] in one of the three types."""

    def __init__(self, weight: Array, bias: Floats | None = None) -> None:
        super().__init__(weight.shape[0], weight.shape[1], weight.nbytes, bias)
        self._weight = weight

    def _multiply(self, x: Floats, out: Floats, count: int) -> None:
        loops.call(_kernel().multiply, COMPILING, x, self._weight, out, count)

    def unpack(self, out: Floats) -> None:
        out[:] = _floats(self._weight)


class Packed(Product):
    """Weights [n, k * bits / 8] in bytes, with scales and biases [n, groups]."""

    def __init__(
        self, weight: Array, scales: Array, biases: Array, bits: int, group_size: int, bias: Floats | None = None
    ) -> None:
        nbytes = weight.nbytes + scales.nbytes + biases.nbytes
        super().__init__(weight.shape[0], weight.shape[1] * 8 // bits, nbytes, bias)
        self._parts, self._bits, self._shift = (weight, scales, biases), bits, GROUPS[group_size]

    def _multiply(self, x: Floats, out: Floats, count: int) -> None:
        loop = _kernel().multiply_packed4 if self._bits == 4 else _kernel().multiply_packed8
        loops.call(loop, COMPILING, x, *self._parts, self._shift, out, count)

    def unpack(self, out: Floats) -> None:
        loop = _kernel().unpack4 if self._bits == 4 else _kernel().unpack8
        loops.call(loop, COMPILING, *self._parts, self._shift, out)


@functools.cache
def _kernel() -> Any:
    from . import product_kernel

    return product_kernel


def _numbers(array: mx.array) -> Array:
    """The memory of an array, as the loops take it: float16 as int16, bfloat16 as uint16. A copy if it has gaps."""
    if array.dtype == mx.float16:
        array = array.view(mx.int16)
    elif array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.ascontiguousarray(np.asarray(array))


def _floats(numbers: Array) -> Floats:
    """What `_numbers` gave, in float32; itself if it is."""
    if numbers.dtype == np.int16:
        return numbers.view(np.float16).astype(np.float32)
    if numbers.dtype == np.uint16:
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers
