"""Decode attention directly over plain blocks, by MLX's operations: nothing is gathered or copied.

There is one query token per row. A single sequence whose slots are adjacent is read as one matrix (`run_decode`).
Otherwise every (row, block) pair is a small matrix product with the block in place (`mx.gather_mm`), so blocks may be
anywhere and may be shared (`paged_decode`). G query heads share one KV head. The pairs of a row are joined as a grid,

    scores  [rows, heads, n, G, block_size] -> softmax over all n * block_size slots of a row -> [rows, heads, G, dim]

or, when rows are of very different lengths and a grid would be mostly padding, from a list of pairs:

    scores  [pairs, heads, G, block_size]
    top     [rows, heads, G]        the largest score of the row (and its sink)
    out     [rows, heads, G, dim]   sum over the row's pairs of exp(scores - top) @ V, over the sum of weights
"""

import mlx.core as mx

from ..device import Kind
from ..hook import stock_attention
from ..layout import KVLayer
from ..pairs import Grid, PairList, Pairs
from ..pool import LayerArrays
from .base import Backend, Call
from .layer import LayerKV, Pair
from .softmax import Product, Softmax, softmax_on


class Paged(Backend):
    def __init__(self, kv: LayerKV) -> None:
        super().__init__(kv)
        self._softmax = softmax_on(kv.device)

    @classmethod
    def supports(cls, layer: KVLayer, block_size: int, device: Kind) -> bool:
        # On CPU, gather_mm takes float32 alone.
        return layer.plain and (device != "cpu" or layer.dtype == mx.float32)

    def decode(self, call: Call, new: Pair | None) -> mx.array:
        step, arrays, device = call.step, self.kv.arrays, self.kv.device
        if step.run is not None and call.mask is None and call.sinks is None:
            start, end = step.run
            k, v = arrays.k[:, start:end], arrays.v[:, start:end]
            # On CUDA, MLX's attention goes wrong for one query over a view that starts inside its buffer.
            if device == "metal" or (device == "cuda" and start == 0):
                return stock_attention(call.queries, k[None], v[None], None, scale=call.scale, mask=None)
            return run_decode(call.queries, k, v, call.scale, self._softmax)
        bias = step.bias(call.mask, arrays.k.dtype if isinstance(step.pairs, Grid) else mx.float32, step.pairs)
        return paged_decode(call.queries, arrays, step.pairs, bias, call.scale, call.sinks, self._softmax)


def run_decode(queries: mx.array, keys: mx.array, values: mx.array, scale: float, by: Softmax) -> mx.array:
    """Attention of `queries` [1, query heads, 1, dim] over all of `keys` and `values` [heads, tokens, dim]."""
    heads, _, k_dim = keys.shape
    q = by.scaled(queries, scale).astype(keys.dtype).reshape(heads, -1, k_dim)
    out = by.weighted(q @ keys.swapaxes(1, 2), lambda weights: weights @ values)
    return out.astype(queries.dtype).reshape(*queries.shape[:3], -1)


def paged_decode(
    queries: mx.array,
    arrays: LayerArrays,
    pairs: Pairs,
    bias: mx.array,
    scale: float,
    sinks: mx.array | None,
    by: Softmax,
) -> mx.array:
    """Attention of `queries` [rows, query heads, 1, dim] over the blocks in `pairs`; same shape with V's dim."""
    heads, _, k_dim = arrays.k.shape
    v_dim, size = arrays.v.shape[-1], bias.shape[-1]
    rows, query_heads = queries.shape[:2]
    q_of, block_of, pair_of = pairs.matrices(heads)

    q = by.scaled(queries, scale).astype(arrays.k.dtype).reshape(rows * heads, -1, k_dim)
    keys = arrays.k.reshape(-1, size, k_dim).swapaxes(1, 2)
    values = arrays.v.reshape(-1, size, v_dim)
    scores = mx.gather_mm(q, keys, q_of, block_of)
    if sinks is not None:
        sinks = by.scaled(sinks, 1.0).reshape(heads, -1)

    def times_values(weights: mx.array) -> mx.array:
        return mx.gather_mm(weights.astype(values.dtype), values, pair_of, block_of)

    if isinstance(pairs, Grid):
        out = _join_grid(scores + bias, sinks, times_values, by)
    else:
        out = _join_list(scores.astype(mx.float32) + bias, pairs, sinks, times_values, by)
    return out.astype(queries.dtype).reshape(rows, query_heads, 1, v_dim)


def _join_grid(scores: mx.array, sinks: mx.array | None, times_values: Product, by: Softmax) -> mx.array:
    """[rows, heads, n, G, block_size] -> [rows, heads, G, dim]."""
    rows, heads, count, shared, size = scores.shape
    flat = scores.swapaxes(2, 3).reshape(rows, heads, shared, count * size)

    def by_block(weights: mx.array) -> mx.array:
        weights = weights.reshape(rows, heads, shared, count, size).swapaxes(2, 3)
        return times_values(weights.reshape(-1, shared, size)).sum(axis=2)

    return by.weighted(flat, by_block, sinks[None, ..., None] if sinks is not None else None)


def _join_list(
    scores: mx.array, pairs: PairList, sinks: mx.array | None, times_values: Product, by: Softmax
) -> mx.array:
    """[pairs, heads, G, block_size] -> [rows, heads, G, dim]."""
    _, total, sums = list_sums(scores, pairs, sinks, times_values, by)
    return sums / total[..., None]


def list_sums(
    scores: mx.array, pairs: PairList, sinks: mx.array | None, times_values: Product, by: Softmax
) -> tuple[mx.array, mx.array, mx.array]:
    """The largest score of each row and the sum of its weights [rows, heads, G], and weighted values [..., dim]."""
    top = _by_row(scores.max(axis=-1), pairs, -mx.inf).max(axis=1)
    if sinks is not None:
        top = mx.maximum(top, sinks.astype(mx.float32))
    weights = by.power(scores - pairs.spread(top)[..., None])
    total = _by_row(weights.sum(axis=-1), pairs, 0).sum(axis=1)
    if sinks is not None:
        total = total + by.power(sinks.astype(mx.float32) - top)
    parts = times_values(weights.reshape(-1, *scores.shape[-2:])).astype(mx.float32)
    return top, total, _by_row(parts, pairs, 0).sum(axis=1)


def _by_row(parts: mx.array, pairs: PairList, fill: float) -> mx.array:
    """[pairs, ...] -> [rows, pairs of the row, ...]; rows with fewer pairs are padded with `fill`."""
    padding = pairs.padding.reshape(*pairs.padding.shape, *[1] * (parts.ndim - 1))
    return mx.where(padding, mx.array(fill, parts.dtype), parts[pairs.index])
