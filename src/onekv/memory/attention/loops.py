"""Decode attention by compiled loops, on NumPy arrays."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from ..step import GroupStep
from .layer import LayerKV
from .numba.encoded import Numba, attend_encoded
from .numba.plain import plain_decode, supports_plain

Array = np.ndarray[Any, Any]
New = tuple[Array, Array] | None
# Attention of queries [rows, query heads, dim], one token per row, at the step's positions. The keys and values [rows,
# heads, dim] of these positions are stored first, if there are any. Then (window, kept tokens), scale, and sinks.
Attend = Callable[[LayerKV, GroupStep, Array, New, tuple[int, int], float, Array | None], Array]


def choose(kv: LayerKV, block_size: int) -> Attend | None:
    """What attends over one layer's KV; None if loops cannot."""
    if Numba.supports(kv.layer, block_size, kv.device):
        return attend_encoded
    return _plain if kv.layer.dtype == mx.float32 and supports_plain(kv.layer, kv.device) else None


def _plain(
    kv: LayerKV, step: GroupStep, queries: Array, new: New, reach: tuple[int, int], scale: float, sinks: Array | None
) -> Array:
    keys, values = (np.asarray(array) for array in kv.arrays.all)
    new_keys, new_values = new if new is not None else (None, None)
    return plain_decode(queries, keys, values, new_keys, new_values, step.grid, step.lengths, reach, scale, sinks)
