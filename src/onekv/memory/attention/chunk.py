"""Attention of a piece of a prompt on CPU: for a few queries at a time, whose scores stay in the processor's cache."""

import mlx.core as mx

from ..hook import Mask
from .softmax import POWERS_OF_2

# Scores of so many bytes at a time.
TILE_BYTES = 4 * 2**20


def chunk_attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask) -> mx.array:
    """Attention of one sequence's `queries`, [1, query heads, tokens, dim], in float32.

    `mask` is None, "causal" (the last query reads all keys, the one before it one less, and so on), or an array of
    what each query reads, [tokens, keys].
    """
    # Squeezed, because `keys[0]` would copy a view of the pool.
    keys, values = keys.squeeze(0), values.squeeze(0)
    query_heads, tokens = queries.shape[1:3]
    length = keys.shape[1]
    rows = max(1, TILE_BYTES // (4 * query_heads * length))
    tiles = []
    for start in range(0, tokens, rows):
        end = min(start + rows, tokens)
        q = POWERS_OF_2.scaled(queries[:, :, start:end], scale)
        if isinstance(mask, str):
            seen = length - tokens + end
            tiles.append(_tile(q, keys[:, :seen], values[:, :seen], causal(end - start, seen)))
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


def causal(tokens: int, length: int) -> mx.array:
    """What each of the last `tokens` queries reads of `length` keys."""
    return mx.arange(length - tokens, length)[:, None] >= mx.arange(length)
