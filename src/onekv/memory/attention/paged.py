"""Decode attention straight over the pool: no sequence's keys or values are gathered or copied.

One query token per row. A single sequence whose slots are adjacent is read as one matrix (`run_decode`). Else every
(row, block) pair is one small matrix product with the block where it lies (`mx.gather_mm`), so blocks may be anywhere
and shared (`paged_decode`). G query heads share one KV head. The pairs of a row are joined either as a grid,

    scores  [rows, heads, n, G, block_size] -> softmax over all n * block_size slots of a row -> [rows, heads, G, dim]

or, when rows are of very different lengths and a grid would be mostly padding, from a list of pairs:

    scores  [pairs, heads, G, block_size]
    top     [rows, heads, G]        the largest score of the row (and its sink)
    out     [rows, heads, G, dim]   sum over the row's pairs of exp(scores - top) @ V, over the sum of weights

On CPU the exponential is most of the work: MLX takes 21 ns for one there, and 7 for a power of 2. So queries are scaled
by log2(e) too, weights are powers of 2, and the prompt's attention is done here as well (`chunk_attention`).
"""

import math
from collections.abc import Callable

import mlx.core as mx

from ..pool import LayerArrays
from .pairs import Grid, PairList, Pairs

# Scores of so many bytes at a time.
TILE_BYTES = 4 * 2**20


def run_decode(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Attention of `queries` [1, query heads, 1, dim] over all of `keys` and `values` [heads, tokens, dim]."""
    heads, _, k_dim = keys.shape
    q = scaled(queries, scale).astype(keys.dtype).reshape(heads, -1, k_dim)
    out = weighted(q @ keys.swapaxes(1, 2), lambda weights: weights @ values)
    return out.astype(queries.dtype).reshape(*queries.shape[:3], -1)


def chunk_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array:
    """Attention of a chunk of a prompt, [1, query heads, tokens, dim], on CPU.

    `mask` is None, "causal" (the last query reads all keys, the one before it one less, and so on), or an array of
    what each query reads, [tokens, keys]. Done for a few queries at a time: their scores stay in the processor's cache.
    """
    # Squeezed, because `keys[0]` would copy a view of the pool.
    keys, values = keys.squeeze(0), values.squeeze(0)
    query_heads, tokens = queries.shape[1:3]
    length = keys.shape[1]
    rows = max(1, TILE_BYTES // (4 * query_heads * length))
    parts = []
    for start in range(0, tokens, rows):
        end = min(start + rows, tokens)
        q = scaled(queries[:, :, start:end], scale)
        if isinstance(mask, str):
            seen = length - tokens + end
            parts.append(_tile(q, keys[:, :seen], values[:, :seen], causal(end - start, seen)))
        else:
            shown = mask[..., start:end, :] if mask is not None else None
            parts.append(_tile(q, keys, values, shown))
    return mx.concatenate(parts, axis=2)


def _tile(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None) -> mx.array:
    """Attention of scaled `queries` over `keys` and `values` [heads, tokens, dim]."""
    heads, length, k_dim = keys.shape
    scores = queries.reshape(heads, -1, k_dim) @ keys.swapaxes(1, 2)
    if mask is not None:
        scores = mx.where(mask, scores.reshape(heads, -1, queries.shape[2], length), -mx.inf)
    out = weighted(scores.reshape(heads, -1, length), lambda weights: weights @ values)
    return out.reshape(*queries.shape[:3], -1)


def causal(tokens: int, length: int) -> mx.array:
    return mx.arange(length - tokens, length)[:, None] >= mx.arange(length)


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
    q_of, block_of, pair_of = pairs.matrices(heads)

    q = scaled(queries, scale).astype(arrays.k.dtype).reshape(rows * heads, -1, k_dim)
    keys = arrays.k.reshape(-1, size, k_dim).swapaxes(1, 2)
    values = arrays.v.reshape(-1, size, v_dim)
    scores = mx.gather_mm(q, keys, q_of, block_of)
    if sinks is not None:
        sinks = scaled(sinks, 1.0).reshape(heads, -1)

    def times_values(weights: mx.array) -> mx.array:
        return mx.gather_mm(weights.astype(values.dtype), values, pair_of, block_of)

    if isinstance(pairs, Grid):
        out = _join_grid(scores + bias, sinks, times_values)
    else:
        out = _join_list(scores.astype(mx.float32) + bias, pairs, sinks, times_values)
    return out.astype(queries.dtype).reshape(rows, query_heads, 1, v_dim)


Product = Callable[[mx.array], mx.array]


def scaled(queries: mx.array, scale: float) -> mx.array:
    """So that the weight of a score is its `_power`."""
    return queries * (scale * math.log2(math.e) if mx.default_device() == mx.cpu else scale)


def _power(scores: mx.array) -> mx.array:
    return mx.power(2.0, scores) if mx.default_device() == mx.cpu else mx.exp(scores)


def weighted(scores: mx.array, times_values: Product, sinks: mx.array | None = None) -> mx.array:
    """Softmax over the last axis of `scores`, times values; `sinks` are scores of nothing, broadcastable to them."""
    if mx.default_device() != mx.cpu:
        if sinks is None:
            return times_values(mx.softmax(scores, axis=-1, precise=True))
        column = mx.broadcast_to(sinks.astype(scores.dtype), (*scores.shape[:-1], 1))
        return times_values(mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1, precise=True)[..., :-1])
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        top = mx.maximum(top, sinks)
    weights = _power(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + _power(sinks - top)
    return times_values(weights) / total


def _join_grid(scores: mx.array, sinks: mx.array | None, times_values: Product) -> mx.array:
    """[rows, heads, n, G, block_size] -> [rows, heads, G, dim]."""
    rows, heads, count, shared, size = scores.shape
    flat = scores.swapaxes(2, 3).reshape(rows, heads, shared, count * size)

    def by_block(weights: mx.array) -> mx.array:
        weights = weights.reshape(rows, heads, shared, count, size).swapaxes(2, 3)
        return times_values(weights.reshape(-1, shared, size)).sum(axis=2)

    return weighted(flat, by_block, sinks[None, ..., None] if sinks is not None else None)


def _join_list(scores: mx.array, pairs: PairList, sinks: mx.array | None, times_values: Product) -> mx.array:
    """[pairs, heads, G, block_size] -> [rows, heads, G, dim]."""
    top = _by_row(scores.max(axis=-1), pairs, -mx.inf).max(axis=1)
    if sinks is not None:
        top = mx.maximum(top, sinks.astype(mx.float32))
    weights = _power(scores - pairs.spread(top)[..., None])
    total = _by_row(weights.sum(axis=-1), pairs, 0).sum(axis=1)
    if sinks is not None:
        total = total + _power(sinks.astype(mx.float32) - top)
    parts = times_values(weights.reshape(-1, *scores.shape[-2:])).astype(mx.float32)
    return _by_row(parts, pairs, 0).sum(axis=1) / total[..., None]


def _by_row(parts: mx.array, pairs: PairList, fill: float) -> mx.array:
    """[pairs, ...] -> [rows, pairs of the row, ...]; rows with fewer pairs are padded with `fill`."""
    padding = pairs.padding.reshape(*pairs.padding.shape, *[1] * (parts.ndim - 1))
    return mx.where(padding, mx.array(fill, parts.dtype), parts[pairs.index])
