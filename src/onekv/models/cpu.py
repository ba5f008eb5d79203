"""Weights as Linux CPUs multiply them fast: float32, and not packed."""

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.utils import dequantize_model


def unpack(model: Module, dtype: mx.Dtype) -> None:
    """Replaces quantized layers by plain ones and casts all floating-point weights to `dtype`,
    lazily.
    """
    # Scales first, so that the products are formed in float32 and rounded once.
    model.set_dtype(mx.float32)
    dequantize_model(model)
    model.set_dtype(dtype)


def evaluate(model: Module) -> None:
    """Reads and computes the weights module by module, so that only one is there in two forms."""
    for module in model.modules():
        mx.eval([value for value in module.values() if isinstance(value, mx.array)])
