"""Attention over keys and values in several slabs, without concatenating them.

The scores of all extents are concatenated for one softmax, and the weighted values of each extent are added up:

    scores   [rows, heads, queries per head, tokens, columns of all extents] -> softmax -> cut -> sum of weights @ V

The softmax is that of `memory.attention.softmax`. A single extent is handled by MLX's own attention, and so are long
prompts on a GPU, over a copy of this layer's columns: the scores of a whole prompt would be larger than that copy. On
CPU, prompts are processed a few tokens at a time instead.
"""

from functools import reduce
from itertools import accumulate
from operator import add

import mlx.core as mx

from ..memory.attention.chunk import TILE_BYTES, causal
from ..memory.attention.softmax import POWERS_OF_2, Softmax, softmax_on
from ..memory.device import kind
from ..memory.hook import Mask
from .slabs import Views, dense

# On a GPU, up to this many tokens are done here.
FEW_TOKENS = 16


def attend(queries: mx.array, views: Views, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
    """Attention of `queries` [rows, query heads, tokens, dim]; `mask` is what mlx-lm's attention takes."""
    tokens, length = queries.shape[2], sum(k.shape[2] for k, _ in views)
    if not length:
        return mx.zeros((*queries.shape[:3], views[0][1].shape[3]), queries.dtype)
    device = kind()
    if len(views) == 1 or (device != "cpu" and tokens > FEW_TOKENS):
        keys, values = dense(views)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    if tokens == 1 and isinstance(mask, str):
        mask = None
    softmax = softmax_on(device)
    rows = max(1, TILE_BYTES // (4 * queries.shape[0] * queries.shape[1] * length))
    parts = []
    for start in range(0, tokens, rows):
        end = min(tokens, start + rows)
        q = softmax.scaled(queries[:, :, start:end], scale)
        if isinstance(mask, str):
            seen = length - tokens + end
            parts.append(_tile(q, _first(views, seen), causal(end - start, seen), sinks, softmax))
        else:
            shown = mask if mask is None or mask.shape[-2] == 1 else mask[..., start:end, :]
            parts.append(_tile(q, views, shown, sinks, softmax))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _first(views: Views, columns: int) -> Views:
    """The first so many columns of all views together."""
    ends = accumulate(k.shape[2] for k, _ in views)
    left = [columns - end + k.shape[2] for end, (k, _) in zip(ends, views, strict=True)]
    return [(k[:, :, :count], v[:, :, :count]) for count, (k, v) in zip(left, views, strict=True) if count > 0]


def _tile(queries: mx.array, views: Views, mask: mx.array | None, sinks: mx.array | None, softmax: Softmax) -> mx.array:
    """The same for scaled queries, in one go."""
    batch, query_heads, tokens, dim = queries.shape
    heads = views[0][0].shape[1]
    shared = query_heads // heads
    q = queries.reshape(batch, heads, shared * tokens, dim)
    scores = mx.concatenate([q @ k.swapaxes(-1, -2) for k, _ in views], axis=-1)
    dtype = scores.dtype
    if softmax is POWERS_OF_2:
        # MLX's own sums in float32 whatever it is given; these are added up as they are.
        scores = scores.astype(mx.float32)
    scores = scores.reshape(batch, heads, shared, tokens, -1)
    if mask is not None:
        scores = _masked(scores, mask, softmax)
    if sinks is not None:
        sinks = softmax.scaled(sinks, 1.0).reshape(1, heads, shared, 1, 1)

    def times_values(weights: mx.array) -> mx.array:
        flat = weights.astype(dtype).reshape(batch, heads, shared * tokens, -1)
        ends = list(accumulate(v.shape[2] for _, v in views))
        cut = [flat[..., end - v.shape[2] : end] @ v for end, (_, v) in zip(ends, views, strict=True)]
        return reduce(add, cut).reshape(batch, heads, shared, tokens, -1)

    return softmax.weighted(scores, times_values, sinks).astype(dtype).reshape(batch, query_heads, tokens, -1)


def _masked(scores: mx.array, mask: mx.array, softmax: Softmax) -> mx.array:
    if mask.ndim == 4:
        batch, heads = mask.shape[:2]
        mask = mask[:, :, None] if heads == 1 else mask.reshape(batch, *scores.shape[1:3], *mask.shape[2:])
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return scores + softmax.scaled(mask.astype(scores.dtype), 1.0)


def row_mask(mask: mx.array | None, row: int, start: int, end: int) -> mx.array | None:
    """What one row's queries see of its own columns."""
    if mask is None:
        return None
    if mask.ndim == 4 and mask.shape[0] > 1:
        mask = mask[row : row + 1]
    return mask[..., start:end]
