"""Layers of quantized files on CPU: their weights stay packed in memory, as small as in the file.

Few rows are multiplied by compiled loops that unpack in registers (`loops.products`). For more rows, as in prefill, the
weights of one layer at a time are unpacked into a buffer that all layers share, and BLAS multiplies. Both run
immediately, while the model is called: their inputs are evaluated first, and a model with such layers is `eager`.
Unused logits of a prompt stay lazy and are never computed.

While a function is traced (`loops.program`), nothing can be evaluated: MLX's own product is recorded instead, which the
program then computes with the same loops.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models import activations

from ..loops import products, prompts
from ..loops.graph import tracing
from .layers import modules_with, replace_layers

# Bound here: the module that defines it may have it replaced, too, since some models have parts from there.
stock_swiglu: Callable[[mx.array, mx.array], mx.array] = activations.swiglu
# More rows than that are faster by BLAS.
MOST = 8


class _Given(threading.local):
    """What packed layers have given for prompts last, in this thread, if it is still there: it is computed, and can be
    computed with. Other threads have engines of their own.
    """

    def __init__(self) -> None:
        self.arrays: deque[weakref.ref[mx.array]] = deque(maxlen=2)


_given = _Given()


class Buffer:
    """Where weights are unpacked, one layer's at a time."""

    def __init__(self) -> None:
        self._numbers = mx.zeros(0)

    def take(self, n: int, k: int) -> mx.array:
        """`n` rows of `k` numbers, which the next call overwrites."""
        if self._numbers.size < n * k:
            self._numbers = mx.zeros(n * k)
        mx.eval(self._numbers)
        return self._numbers[: n * k].reshape(n, k)


class PackedLinear(QuantizedLinear):
    """A quantized layer in place of another, with its weights."""

    def __init__(self, stock: QuantizedLinear, buffer: Buffer) -> None:
        Module.__init__(self)
        dict.update(self, stock)
        self.group_size, self.bits, self.mode = stock.group_size, stock.bits, stock.mode
        self._buffer = buffer

    @cached_property
    def _product(self) -> products.Product:
        return products.product(self)

    def __call__(self, x: mx.array) -> mx.array:
        if tracing():
            stock: mx.array = super().__call__(x)  # type: ignore[no-untyped-call]
            return stock
        if x.size <= MOST * x.shape[-1]:
            return _few(self._product, x)
        weight = self._buffer.take(self._product.n, self._product.k)
        self._product.unpack(np.asarray(weight))
        out = x.astype(mx.float32) @ weight.T
        if "bias" in self:
            out = out + self.bias
        # Before the next layer uses the buffer.
        mx.eval(out)
        _given.arrays.append(weakref.ref(out))
        return out


class PackedEmbedding(QuantizedEmbedding):
    """An embedding in place of another, with its weights."""

    def __init__(self, stock: QuantizedEmbedding) -> None:
        Module.__init__(self)
        dict.update(self, stock)
        self.group_size, self.bits, self.mode = stock.group_size, stock.bits, stock.mode
        self.num_embeddings, self.dims = stock.num_embeddings, stock.dims

    @cached_property
    def _product(self) -> products.Product:
        return products.product(self)

    def as_linear(self, x: mx.array) -> mx.array:
        if not tracing() and x.size <= MOST * x.shape[-1]:
            return _few(self._product, x)
        stock: mx.array = super().as_linear(x)  # type: ignore[no-untyped-call]
        return stock


def _few(product: products.Product, x: mx.array) -> mx.array:
    x = x.astype(mx.float32)
    mx.eval(x)
    out = product(np.asarray(x).reshape(-1, product.k))
    return mx.array(out).reshape(*x.shape[:-1], product.n)


def gated(gates: mx.array, values: mx.array) -> mx.array:
    """mlx-lm's activation; what packed layers have given for a prompt, by a compiled loop."""
    if all(any(given() is array for given in _given.arrays) for array in (gates, values)):
        return prompts.gate(gates, values)
    return stock_swiglu(gates, values)


def keep_packed(model: Module) -> list[Module]:
    """Replaces the quantized layers of a model: by packed ones where there are loops for them, else by plain ones,
    which are returned: their weights are not computed yet.

    Where its modules have mlx-lm's activation, that is replaced, too, as attention is (`memory.hook`).
    """
    for module in modules_with(model, "swiglu", [stock_swiglu]):
        setattr(module, "swiglu", gated)  # noqa: B010
    buffer, unpacked = Buffer(), list[Module]()
    replace_layers(model, lambda layer: _replaced(layer, buffer, unpacked))
    return unpacked


def _replaced(layer: Any, buffer: Buffer, unpacked: list[Module]) -> Any:
    if type(layer) not in (QuantizedLinear, QuantizedEmbedding):
        return layer
    if products.supports(layer):
        return PackedLinear(layer, buffer) if type(layer) is QuantizedLinear else PackedEmbedding(layer)
    plain: Any = Linear(1, 1, bias=False) if type(layer) is QuantizedLinear else Embedding(1, 1)
    how = (layer.group_size, layer.bits, layer.mode)
    plain.weight = mx.dequantize(layer.weight, layer.scales, layer.get("biases"), *how)
    if "bias" in layer:
        plain.bias = layer.bias
    unpacked.append(plain)
    return plain


def is_eager(model: Module) -> bool:
    """Whether parts of the model are computed while it is called."""
    return any(isinstance(module, PackedLinear | PackedEmbedding) for module in model.modules())
