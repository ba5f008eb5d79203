"""Decode attention straight over the pool: no sequence's keys or values are gathered or copied.

One query token per row. Every (row, block) pair is one small matrix product with the block where it lies
(`mx.gather_mm`), so blocks may be anywhere and shared. The pairs of a row are then joined:

    scores  [pairs, heads, G, block_size]     G query heads share one KV head
    top     [rows, heads, G]                  the largest score of the row (and its sink)
    out     [rows, heads, G, dim]             sum over the row's pairs of exp(scores - top) @ V, over the sum of weights
"""

import mlx.core as mx

from .pool import LayerArrays
from .step import Pairs


def paged_decode(
    queries: mx.array,
    arrays: LayerArrays,
    pairs: Pairs,
    bias: mx.array,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of `queries` [rows, query heads, 1, dim] over the blocks in `pairs`; same shape with V's dim."""
    heads, _, k_dim = arrays.k.shape
    v_dim, size = arrays.v.shape[-1], bias.shape[-1]
    rows, query_heads = queries.shape[:2]
    shared = query_heads // heads
    q_of, block_of, pair_of = pairs.matrices(heads)

    q = (queries * scale).astype(arrays.k.dtype).reshape(rows * heads, shared, k_dim)
    keys = arrays.k.reshape(-1, size, k_dim).swapaxes(1, 2)
    scores = mx.gather_mm(q, keys, q_of, block_of).astype(mx.float32) + bias

    top = _by_row(scores.max(axis=-1), pairs, -mx.inf).max(axis=1)
    if sinks is not None:
        sink = sinks.astype(mx.float32).reshape(1, heads, shared)
        top = mx.maximum(top, sink)
    spread = top if pairs.rows == 1 else top[pairs.row_array]
    weights = mx.exp(scores - spread[..., None])
    total = _by_row(weights.sum(axis=-1), pairs, 0).sum(axis=1)
    if sinks is not None:
        total = total + mx.exp(sink - top)

    values = arrays.v.reshape(-1, size, v_dim)
    weights = weights.astype(values.dtype).reshape(-1, shared, size)
    parts = mx.gather_mm(weights, values, pair_of, block_of).astype(mx.float32)
    out = _by_row(parts, pairs, 0).sum(axis=1) / total[..., None]
    return out.astype(queries.dtype).reshape(rows, query_heads, 1, v_dim)


def _by_row(parts: mx.array, pairs: Pairs, fill: float) -> mx.array:
    """[pairs, ...] -> [rows, pairs of the row, ...]; rows with fewer pairs are padded with `fill`."""
    if pairs.index is None:
        return parts.reshape(pairs.rows, -1, *parts.shape[1:])
    padding = pairs.padding.reshape(*pairs.padding.shape, *[1] * (parts.ndim - 1))
    return mx.where(padding, mx.array(fill, parts.dtype), parts[pairs.index])
