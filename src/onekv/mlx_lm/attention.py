"""Attention over keys and values that lie in several slabs, without joining them.

Scores of every piece are put side by side, weighed together, and each piece's values are added up:

    scores   [rows, heads, queries per head * tokens, columns of all pieces] -> softmax -> cut -> sum of weights @ V

A single piece goes to MLX's own attention. Long prompts on a GPU do too, over a copy of this layer's columns: scores of
a whole prompt would be larger than that. On CPU they are done for a few tokens at a time instead.
"""

from typing import cast

import mlx.core as mx

from ..memory.attention.hook import Mask
from .slabs import Views, dense

# Scores of so many bytes at a time.
TILE_BYTES = 4 * 2**20
# On a GPU, up to so many tokens are done here.
FEW_TOKENS = 16


def attend(queries: mx.array, views: Views, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
    """Attention of `queries` [rows, query heads, tokens, dim]; `mask` is what mlx-lm's attention takes."""
    tokens, length = queries.shape[2], sum(k.shape[2] for k, _ in views)
    if not length:
        return mx.zeros((*queries.shape[:3], views[0][1].shape[3]), queries.dtype)
    on_gpu = mx.default_device() == mx.gpu
    if len(views) == 1 or (on_gpu and tokens > FEW_TOKENS):
        keys, values = dense(views)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    rows = max(1, TILE_BYTES // (4 * queries.shape[0] * queries.shape[1] * length))
    parts = []
    for start in range(0, tokens, rows):
        end = min(tokens, start + rows)
        seen = _tile_mask(mask, start, end, tokens, length)
        parts.append(_tile(queries[:, :, start:end] * scale, views, seen, sinks))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _tile_mask(mask: Mask, start: int, end: int, tokens: int, length: int) -> mx.array | None:
    if isinstance(mask, str):
        first = length - tokens
        return mx.arange(first + start, first + end)[:, None] >= mx.arange(length) if tokens > 1 else None
    if mask is None or mask.shape[-2] == 1:
        return mask
    return mask[..., start:end, :]


def _tile(queries: mx.array, views: Views, mask: mx.array | None, sinks: mx.array | None) -> mx.array:
    """The same for scaled queries, in one go."""
    batch, query_heads, tokens, dim = queries.shape
    heads = views[0][0].shape[1]
    shared = query_heads // heads
    q = queries.reshape(batch, heads, shared * tokens, dim)
    scores = mx.concatenate([q @ k.swapaxes(-1, -2) for k, _ in views], axis=-1)
    scores = scores.reshape(batch, heads, shared, tokens, -1)
    scores = scores if mask is None else _masked(scores, mask)
    weights = _softmax(scores, sinks).reshape(batch, heads, shared * tokens, -1)
    out, start = None, 0
    for _, v in views:
        part = weights[..., start : start + v.shape[2]] @ v
        out = part if out is None else out + part
        start += v.shape[2]
    return cast(mx.array, out).reshape(batch, query_heads, tokens, -1)


def _masked(scores: mx.array, mask: mx.array) -> mx.array:
    if mask.ndim == 4:
        batch, heads = mask.shape[:2]
        mask = mask[:, :, None] if heads == 1 else mask.reshape(batch, *scores.shape[1:3], *mask.shape[2:])
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return scores + mask


def _softmax(scores: mx.array, sinks: mx.array | None) -> mx.array:
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    column = sinks.astype(scores.dtype).reshape(1, *scores.shape[1:3], 1, 1)
    column = mx.broadcast_to(column, (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1, precise=True)[..., :-1]


def row_mask(mask: mx.array | None, row: int, start: int, end: int) -> mx.array | None:
    """What one row's queries see of its own columns."""
    if mask is None:
        return None
    if mask.ndim == 4 and mask.shape[0] > 1:
        mask = mask[row : row + 1]
    return mask[..., start:end]
