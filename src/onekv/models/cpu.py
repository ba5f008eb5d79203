"""Weights as Linux CPUs multiply them fast: float32, and not packed."""

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.utils import dequantize_model

from .reading import read


def unpack(model: Module, dtype: mx.Dtype) -> None:
    """Replaces quantized layers by plain ones and casts all floating-point weights to `dtype`,
    lazily.
    """
    # Scales first, so that the products are formed in float32 and rounded once.
    model.set_dtype(mx.float32)
    dequantize_model(model)
    model.set_dtype(dtype)


def evaluate(model: Module, reads: bool = True) -> None:
    """Computes the weights module by module, so that only one is there in two forms, and `reads` them for that."""
    for module in model.modules():
        weights = [value for value in module.values() if isinstance(value, mx.array)]
        mx.eval(weights)
        if reads:
            read.bytes += sum(value.nbytes for value in weights)
