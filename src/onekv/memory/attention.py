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

from .pairs import Grid, PairList, Pairs
from .pool import LayerArrays


def run_decode(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Attention of `queries` [1, query heads, 1, dim] over all of `keys` and `values` [heads, tokens, dim]."""
    heads, _, k_dim = keys.shape
    q = _scaled(queries, scale).astype(keys.dtype).reshape(heads, -1, k_dim)
    out = _weighted(q @ keys.swapaxes(1, 2), lambda weights: weights @ values)
    return out.astype(queries.dtype).reshape(*queries.shape[:3], -1)


def chunk_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array:
    """Attention of a chunk of a prompt, [1, query heads, tokens, dim], on CPU.

    `mask` is None, "causal" (the last query reads all keys, the one before it one less, and so on), or an array of
    what each query reads, [tokens, keys].
    """
    heads, length, k_dim = keys.shape[1:]
    tokens = queries.shape[2]
    q = _scaled(queries, scale).reshape(heads, -1, tokens, k_dim)
    scores = q @ keys[0][:, None].swapaxes(2, 3)
    if isinstance(mask, mx.array):
        scores = mx.where(mask, scores, -mx.inf)
    elif mask is not None:
        own = mx.arange(tokens)
        hidden = mx.where(own[:, None] >= own, mx.array(0.0), -mx.inf)
        scores[..., length - tokens :] = scores[..., length - tokens :] + hidden
    out = _weighted(scores, lambda weights: weights @ values[0][:, None])
    return out.reshape(*queries.shape[:3], -1)


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

    q = _scaled(queries, scale).astype(arrays.k.dtype).reshape(rows * heads, -1, k_dim)
    keys = arrays.k.reshape(-1, size, k_dim).swapaxes(1, 2)
    values = arrays.v.reshape(-1, size, v_dim)
    scores = mx.gather_mm(q, keys, q_of, block_of)
    if sinks is not None:
        sinks = _scaled(sinks, 1.0).reshape(heads, -1)

    def times_values(weights: mx.array) -> mx.array:
        return mx.gather_mm(weights.astype(values.dtype), values, pair_of, block_of)

    if isinstance(pairs, Grid):
        out = _join_grid(scores + bias, sinks, times_values)
    else:
        out = _join_list(scores.astype(mx.float32) + bias, pairs, sinks, times_values)
    return out.astype(queries.dtype).reshape(rows, query_heads, 1, v_dim)


Product = Callable[[mx.array], mx.array]


def _scaled(queries: mx.array, scale: float) -> mx.array:
    """So that the weight of a score is its `_power`."""
    return queries * (scale * math.log2(math.e) if mx.default_device() == mx.cpu else scale)


def _power(scores: mx.array) -> mx.array:
    return mx.power(2.0, scores) if mx.default_device() == mx.cpu else mx.exp(scores)


def _weighted(scores: mx.array, times_values: Product, sinks: mx.array | None = None) -> mx.array:
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

    return _weighted(flat, by_block, sinks[None, ..., None] if sinks is not None else None)


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
