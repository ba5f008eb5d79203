"""Decode attention over plain blocks, by MLX's operations, for rows of a batch that begin with the same blocks.

Blocks shared by several rows (a system prompt, the branches of a conversation) are read once per step: the queries of
all these rows form one matrix, which is multiplied by the shared keys. Then each row attends over its own blocks as in
`paged`. Each pass gives a row's largest score, the sum of its weights and its weighted sum of values, and these are
joined: weights relative to a different largest score differ by one factor.

Shared blocks are searched for when the tables have changed, not in every step: they change when rows join, leave or
branch.
"""

from functools import cached_property
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..device import Kind
from ..layout import KVLayer
from ..pairs import NOWHERE, Grid, PairList
from ..pool import LayerArrays
from ..work import Segment
from .base import Backend, Call
from .layer import LayerKV, Pair
from .paged import Paged, list_sums
from .softmax import Softmax, softmax_on

# Tokens that rows must begin with to read them together; 0: never.
LEAST = 256


class Sums(NamedTuple):
    """What rows get of some blocks: the largest score and the sum of weights [rows, heads, G], and [..., dim]."""

    top: mx.array
    total: mx.array
    values: mx.array


class Prefix:
    """Blocks that several rows share, for products with them."""

    def __init__(self, segment: Segment, grid: Grid) -> None:
        self.rows = mx.array(segment.rows)
        self._grid, self._blocks = grid, grid.blocks_of(segment)
        self._indices: dict[int, tuple[mx.array, mx.array, mx.array]] = {}

    @cached_property
    def run(self) -> tuple[int, int] | None:
        """Its slots, if they are adjacent: (first, end)."""
        first, size = self._blocks[0], self._grid.block_size
        adjacent = self._blocks == list(range(first, first + len(self._blocks)))
        return (first * size, (first + len(self._blocks)) * size) if adjacent else None

    def indices(self, heads: int, blocks: int) -> tuple[mx.array, mx.array, mx.array]:
        """For gather_mm, [heads, n]: which head's queries, which block of the pool, which matrix of weights."""
        if heads not in self._indices:
            head = np.arange(heads, dtype=np.uint32)[:, None]
            block = head * np.uint32(blocks) + np.array(self._blocks, np.uint32)
            order = np.arange(block.size, dtype=np.uint32).reshape(block.shape)
            queries = np.broadcast_to(head, block.shape)
            self._indices[heads] = (mx.array(queries), mx.array(block), mx.array(order))
        return self._indices[heads]


class Together:
    """What rows of a grid share, what is left of each, and where a row's sums are: first those of its own blocks."""

    def __init__(self, grid: Grid, least: int) -> None:
        segments = grid.segments(least)
        several = [segment for segment in segments if len(segment.rows) > 1]
        self.prefixes = [Prefix(segment, grid) for segment in several]
        if not self.prefixes:
            return
        own = sorted((segment.rows[0], segment.first) for segment in segments if len(segment.rows) == 1)
        self.rest = grid.part([first for _, first in own])
        places = [[row] for row, _ in own]
        end = len(places)
        for segment in several:
            for row in segment.rows:
                places[row].append(end)
                end += 1
        most = max(map(len, places))
        # Rows that share less have sums of nothing: those after all others.
        self.places = mx.array(np.array([some + [end] * (most - len(some)) for some in places], np.uint32))


class Shared(Backend):
    def __init__(self, kv: LayerKV) -> None:
        super().__init__(kv)
        self._softmax = softmax_on(kv.device)

    @classmethod
    def supports(cls, layer: KVLayer, block_size: int, device: Kind) -> bool:
        return device != "cuda" and Paged.supports(layer, block_size, device)

    def decode(self, call: Call, new: Pair | None) -> mx.array | None:
        step, arrays, by = call.step, self.kv.arrays, self._softmax
        if not LEAST or len(step.tables) == 1 or step.reach(call.mask) != (NOWHERE, 0):
            return None
        together = step.grid.derived("together", lambda grid: Together(grid, LEAST))
        if not together.prefixes:
            return None
        heads, _, dim = arrays.k.shape
        rows, query_heads = call.queries.shape[:2]
        q = by.scaled(call.queries, call.scale).astype(arrays.k.dtype).reshape(rows, heads, -1, dim)
        pairs = together.rest.pair_list if together.rest.ragged else together.rest
        found = [_own(q, arrays, pairs, step.bias(call.mask, mx.float32, pairs), by)]
        found += [_of_prefix(q[prefix.rows], arrays, prefix, step.block_size, by) for prefix in together.prefixes]
        sinks = call.sinks.astype(mx.float32).reshape(heads, -1) if call.sinks is not None else None
        out = _join(found, together.places, sinks, by)
        return out.astype(call.queries.dtype).reshape(rows, query_heads, 1, -1)


def _own(q: mx.array, arrays: LayerArrays, pairs: Grid | PairList, bias: mx.array, by: Softmax) -> Sums:
    """Of what each row has for itself; `q` is [rows, heads, G, dim]."""
    rows, heads, shared, dim = q.shape
    size, v_dim = bias.shape[-1], arrays.v.shape[-1]
    q_of, block_of, pair_of = pairs.matrices(heads)
    keys, values = arrays.k.reshape(-1, size, dim).swapaxes(1, 2), arrays.v.reshape(-1, size, v_dim)
    scores = mx.gather_mm(q.reshape(rows * heads, shared, dim), keys, q_of, block_of).astype(mx.float32) + bias

    def times_values(weights: mx.array) -> mx.array:
        return mx.gather_mm(weights.astype(values.dtype), values, pair_of, block_of).astype(mx.float32)

    if isinstance(pairs, PairList):
        return Sums(*list_sums(scores, pairs, None, times_values, by))
    # [rows, heads, n, G, block_size]
    top = scores.max(axis=(2, 4))
    weights = by.power(scores - top[:, :, None, :, None])
    return Sums(top, weights.sum(axis=(2, 4)), times_values(weights.reshape(-1, shared, size)).sum(axis=2))


def _of_prefix(q: mx.array, arrays: LayerArrays, prefix: Prefix, size: int, by: Softmax) -> Sums:
    """Of shared blocks; `q` is [rows that share them, heads, G, dim]."""
    rows, heads, shared, dim = q.shape
    v_dim = arrays.v.shape[-1]
    q = q.swapaxes(0, 1).reshape(heads, rows * shared, dim)
    # [heads, n, rows * G, block_size]; blocks that are adjacent are one.
    if prefix.run is not None:
        keys, values = (array[:, prefix.run[0] : prefix.run[1]] for array in (arrays.k, arrays.v))
        scores = (q @ keys.swapaxes(1, 2))[:, None]
    else:
        keys, values = arrays.k.reshape(-1, size, dim), arrays.v.reshape(-1, size, v_dim)
        head_of, block_of, order = prefix.indices(heads, keys.shape[0] // heads)
        scores = mx.gather_mm(q, keys.swapaxes(1, 2), head_of, block_of)
    scores = scores.astype(mx.float32)
    top = scores.max(axis=(1, 3))
    weights = by.power(scores - top[:, None, :, None])
    total = weights.sum(axis=(1, 3))
    weights = weights.astype(values.dtype)
    if prefix.run is not None:
        out = weights[:, 0] @ values
    else:
        out = mx.gather_mm(weights.reshape(-1, rows * shared, size), values, order, block_of).sum(axis=1)

    def by_row(array: mx.array) -> mx.array:
        return array.reshape(heads, rows, shared, *array.shape[2:]).swapaxes(0, 1)

    return Sums(by_row(top), by_row(total), by_row(out.astype(mx.float32)))


def _join(found: list[Sums], places: mx.array, sinks: mx.array | None, by: Softmax) -> mx.array:
    """[rows, heads, G, dim] from all sums, one after the other, of which `places` [rows, n] says whose they are."""

    def collected(name: str, fill: float) -> mx.array:
        arrays = [getattr(sums, name) for sums in found]
        nothing = mx.full((1, *arrays[0].shape[1:]), fill)
        return mx.concatenate([*arrays, nothing])[places]

    tops = collected("top", -mx.inf)
    top = tops.max(axis=1)
    if sinks is not None:
        sinks = by.scaled(sinks, 1.0)
        top = mx.maximum(top, sinks)
    factors = by.power(tops - top[:, None])
    total = (factors * collected("total", 0)).sum(axis=1)
    if sinks is not None:
        total = total + by.power(sinks - top)
    return (factors[..., None] * collected("values", 0)).sum(axis=1) / total[..., None]
