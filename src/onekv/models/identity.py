"""Identifies a model's weights by a short text: whatever was computed with them is only valid for the same weights."""

from importlib.metadata import version

import mlx.core as mx
import numpy as np
import xxhash
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from .adapted import adapted_layers


def identity(model: Module) -> str:
    """Names the architecture, its settings, every bit of its weights, and what computes with them.

    Takes a fraction of a second per gigabyte. Another version of MLX or another device may round differently, so that
    cached blocks and a cold run would not agree to the last bit: they count, too.
    """
    digest = xxhash.xxh3_128()
    flat: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    for name, array in sorted(flat):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        _update(digest, array)
    for name, layer in sorted(adapted_layers(model), key=lambda item: item[0]):
        # An adapter's weights do not say how much they count.
        digest.update(f"{name} {type(layer).__name__} {layer.scale}".encode())
    computes = f"mlx {version('mlx')} mlx-lm {version('mlx-lm')} {mx.default_device().type}"
    return f"{type(model).__module__} {getattr(model, 'args', None)} {digest.hexdigest()} {computes}"


def _update(digest: "xxhash.xxh3_128", array: mx.array) -> None:
    """Add the values of `array`. Where its rows lie transposed in memory it is read in that order, without a copy."""
    words = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[array.dtype.size]
    seen = np.array(array.view(words), copy=False)
    transposed = seen.ndim > 1 and seen.T.flags.c_contiguous
    digest.update(seen.T if transposed else np.ascontiguousarray(seen))  # type: ignore[arg-type]
