"""Attention over encoded keys and values, a tile at a time: they are never all in plain form.

    tiles    | head 0, some tokens | head 0, the next | ... | head 1 ...     several heads in one if few are stored
    scores   [heads, G, tokens]       each tile's keys are read, multiplied with the queries and dropped
    weights  softmax over tokens      in float32
    out      [heads, G, dim]          each tile's values are read, multiplied with the weights and dropped

G query heads share one KV head. A tile of one head is contiguous in the pool, so it is read without being copied. The
factors of rows are applied to all scores and weights at once. MLX would read many tiles ahead of their products;
`mx.depends` makes each wait for the one before it. This is for CPUs: the weights are powers of 2.
"""

from collections.abc import Iterator, Sequence

import mlx.core as mx

from ..device import Kind
from ..formats import Codec
from ..layout import KVLayer
from .base import Backend, Call
from .layer import Pair, gather
from .softmax import POWERS_OF_2

# Keys or values of this many bytes, in float32, are one tile.
TILE_BYTES = 2**20
# Queries per KV head.
FEW = 8
Planes = Sequence[mx.array]


class Tiles(Backend):
    """For whatever a codec stores."""

    @classmethod
    def supports(cls, layer: KVLayer, block_size: int, device: Kind) -> bool:
        return not layer.plain and device == "cpu"

    def decode(self, call: Call, new: Pair | None) -> mx.array:
        """All rows' heads at once, [rows * heads, G, dim]."""
        step, kv, queries, sinks = call.step, self.kv, call.queries, call.sinks
        rows, query_heads = queries.shape[:2]
        heads = kv.layer.heads
        grouped = queries.reshape(rows * heads, query_heads // heads, -1)
        bias = kv.centre_scores(step, queries, call.scale)
        if bias is not None:
            bias = bias.reshape(rows * heads, -1, bias.shape[2])
        if step.run is not None and call.mask is None:
            start, end = step.run
            keys, values = ([array[:, start:end] for array in side] for side in (kv.arrays.keys, kv.arrays.values))
            if bias is not None:
                skipped = step.first - step.grid.start
                bias = bias[..., skipped : skipped + end - start]
        else:
            # All slots of the step's blocks, still encoded: [rows * heads, slots, width].
            keys, values = (
                [gather(step, array, cut=False).reshape(-1, step.grid.slots, array.shape[2]) for array in side]
                for side in (kv.arrays.keys, kv.arrays.values)
            )
            unseen = mx.repeat(step.row_bias(call.mask), heads, axis=0)[:, None]
            bias = unseen if bias is None else bias + unseen
        if sinks is not None:
            sinks = mx.tile(sinks.reshape(heads, -1, 1), (rows, 1, 1))
        out = attend(grouped, kv.keys, keys, kv.values, values, call.scale, bias, sinks)
        return out.astype(queries.dtype).reshape(rows, query_heads, 1, -1)


def attend(
    queries: mx.array,
    keys: Codec,
    key_planes: Planes,
    values: Codec,
    value_planes: Planes,
    scale: float,
    bias: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of `queries` [heads, G, dim] over encoded tokens, planes [heads, tokens, width]; in float32.

    `bias` is added to the scores, `sinks` are scores of nothing; both must broadcast to [heads, G, tokens]. Queries
    come in, and outputs go out, in the model's basis. For a batch, heads are those of all its rows.
    """
    base, power = POWERS_OF_2.factor, POWERS_OF_2.power
    scores = _scores(keys.rotate(queries.astype(mx.float32)) * (scale * base), keys, key_planes)
    if bias is not None:
        scores = scores + bias * base
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(mx.float32) * base
        top = mx.maximum(top, sinks)
    weights = power(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + power(sinks - top)
    return values.unrotate(_weighted_sum(weights, values, value_planes) / total)


def _scores(queries: mx.array, codec: Codec, planes: Planes) -> mx.array:
    """Products of rotated `queries` with all keys, [heads, G, tokens]."""
    by_head: list[mx.array] = []
    done: list[mx.array] = []
    for heads, tokens in _tiles(codec, planes):
        tiles = []
        for piece in tokens:
            rows = codec.read(_cut(planes, heads, piece, done), mx.float32)
            done = [queries[heads] @ rows.swapaxes(1, 2)]
            tiles += done
        by_head.append(_joined(tiles, axis=2))
    scores, factors = _joined(by_head, axis=0), codec.factors(planes)
    if factors.scale is not None:
        scores = scores * factors.scale[:, None]
    if factors.bias is not None:
        scores = scores + queries.sum(axis=-1, keepdims=True) * factors.bias[:, None]
    return scores


def _weighted_sum(weights: mx.array, codec: Codec, planes: Planes) -> mx.array:
    """[heads, G, dim], in the rotated basis."""
    # Without plain forms, but once for each query: for decode alone.
    if weights.shape[1] <= FEW and (out := codec.weigh(weights, planes)) is not None:
        return out
    factors = codec.factors(planes)
    scaled = weights if factors.scale is None else weights * factors.scale[:, None]
    by_head: list[mx.array] = []
    done = [scaled]
    for heads, tokens in _tiles(codec, planes):
        for count, piece in enumerate(tokens):
            out = scaled[heads, :, piece] @ codec.read(_cut(planes, heads, piece, done), mx.float32)
            done = [out + done[0] if count else out]
        by_head += done
    out = _joined(by_head, axis=0)
    if factors.bias is not None:
        out = out + (weights * factors.bias[:, None]).sum(axis=-1, keepdims=True)
    return out


def _tiles(codec: Codec, planes: Planes) -> Iterator[tuple[slice, list[slice]]]:
    """Some heads, and which of their tokens to take at a time."""
    heads, tokens, _ = planes[0].shape
    rows = max(1, TILE_BYTES // (4 * codec.dim))
    pieces = [slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]
    step = max(1, rows // tokens)
    for start in range(0, heads, step):
        yield slice(start, start + step), pieces


def _cut(planes: Planes, heads: slice, tokens: slice, after: list[mx.array]) -> list[mx.array]:
    """That piece of the planes, not to be read before `after` is there."""
    cut = [plane[heads, tokens] for plane in planes]
    return mx.depends(cut, after) if after else cut


def _joined(arrays: list[mx.array], axis: int) -> mx.array:
    return mx.concatenate(arrays, axis=axis) if len(arrays) > 1 else arrays[0]
