"""Weights in the form that is fastest on Linux CPUs: float32, not packed."""

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from .freed import freed
from .reading import read


def unpack(model: Module, dtype: mx.Dtype) -> None:
    """Replaces quantized layers by plain ones and casts all floating-point weights to `dtype`,
    lazily.
    """
    # Scales first, so that the products are formed in float32 and rounded once.
    model.set_dtype(mx.float32)
    dequantize_model(model)
    model.set_dtype(dtype)


def weight_dtypes(model: Module) -> list[tuple[str, mx.Dtype]]:
    flat: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    return [(name, array.dtype) for name, array in flat]


def evaluate(model: Module, reads: bool = True, forms: int = 2) -> None:
    """Computes the weights module by module, so that only one is there in two `forms`, and `reads` them for that."""
    for module in model.modules():
        weights = [value for value in module.values() if isinstance(value, mx.array)]
        freed.take(forms * sum(value.nbytes for value in weights))
        mx.eval(weights)
        if reads:
            read.bytes += sum(value.nbytes for value in weights)
