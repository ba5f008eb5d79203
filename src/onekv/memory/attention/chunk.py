"""Attention for a chunk of a prompt on CPU: a few queries at a time, so that their scores stay in the processor's
cache.
"""

import mlx.core as mx

from ... import loops
from ...loops import prompts
from ..hook import Mask
from .softmax import POWERS_OF_2

# Scores of this many bytes at a time.
TILE_BYTES = 4 * 2**20


def chunk_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask, kernels: bool = True
) -> mx.array:
    """Attention of one sequence's `queries`, [1, query heads, tokens, dim], in float32.

    `mask` is None, "causal" (the last query reads all keys, the one before it one less, and so on), or an array of
    what each query reads, [tokens, keys]. Without `kernels`, all of it is by operations of MLX.
    """
    # Squeezed, because `keys[0]` would copy a view of the pool.
    keys, values = keys.squeeze(0), values.squeeze(0)
    query_heads, tokens = queries.shape[1:3]
    length = keys.shape[1]
    rows = max(1, TILE_BYTES // (4 * query_heads * length))
    by_loops = kernels and loops.why_not() is None
    tiles = []
    for start in range(0, tokens, rows):
        end = min(start + rows, tokens)
        q = POWERS_OF_2.scaled(queries[:, :, start:end], scale)
        if isinstance(mask, str):
            seen = length - tokens + end
            read = keys[:, :seen], values[:, :seen]
            tiles.append(_causal_tile(q, *read) if by_loops else _tile(q, *read, causal(end - start, seen)))
        else:
            shown = mask[..., start:end, :] if mask is not None else None
            tiles.append(_tile(q, keys, values, shown))
    return mx.concatenate(tiles, axis=2)


def _tile(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None) -> mx.array:
    """Attention of scaled `queries` over `keys` and `values` [heads, tokens, dim]."""
    heads, length, k_dim = keys.shape
    scores = queries.reshape(heads, -1, k_dim) @ keys.swapaxes(1, 2)
    if mask is not None:
        scores = mx.where(mask, scores.reshape(heads, -1, queries.shape[2], length), -mx.inf)
    out = POWERS_OF_2.weighted(scores.reshape(heads, -1, length), lambda weights: weights @ values)
    return out.reshape(*queries.shape[:3], -1)


def _causal_tile(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """The same where the last query reads all keys, the one before it one less, and so on; by loops, at once."""
    heads, _, k_dim = keys.shape
    weights = queries.reshape(heads, -1, k_dim) @ keys.swapaxes(1, 2)
    sums = prompts.weigh(weights, queries.shape[2], causal=True)
    out = (weights @ values) / sums
    # Before the scores of the next tile need room.
    mx.eval(out)
    return out.reshape(*queries.shape[:3], -1)


def causal(tokens: int, length: int) -> mx.array:
    """What each of the last `tokens` queries reads of `length` keys."""
    return mx.arange(length - tokens, length)[:, None] >= mx.arange(length)
