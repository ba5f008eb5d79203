"""Decode attention over plain blocks on CPU by compiled loops (`plain_kernel`), where numba is installed.

As in `encoded`, the loops are outside of MLX's graph: their inputs are evaluated first, they run immediately on the
pool's memory, which they write without MLX knowing, and views of it end with the call. Blocks that several rows begin
with are read once for all of them.
"""

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .... import loops
from ....loops.threads import threads
from ...device import Kind
from ...layout import KVLayer
from ...pairs import NOWHERE, Grid
from ...work import Segment
from ..base import Backend, Call
from ..layer import Pair

Array = np.ndarray[Any, Any]
NOTHING = np.zeros(0, np.float32)
NO_SHORTS = np.zeros(0, np.uint16)
NO_BYTES = np.zeros((0, 0, 0), np.uint8)
COMPILING = "onekv: compiling attention over plain KV for this processor; this is done once and takes about 20 s"
# Tokens that rows must begin with to read them together; 0: never.
LEAST = 64
# Tokens of a piece of work: few enough for all threads to get about as many.
PIECE = 512
# Tokens of a head that are worth another thread.
WORTH = 1024
# bfloat16, which NumPy has not, comes as uint16. The numbers are those of `plain_kernel`.
KINDS = {np.dtype(np.float32): 0, np.dtype(np.uint16): 1, np.dtype(np.float16): 2}


class Work(NamedTuple):
    """Who reads what, as `plain_kernel` takes it; and the position before which each row reads together with others."""

    pieces: Array
    runs: Array
    rows: Array
    parts: Array
    starts: Array
    shares: Array
    together: Array


class NumbaPlain(Backend):
    """For what is not a step of a program (`looped`): models in bfloat16 and float16, where MLX is much slower."""

    kernel = True
    eager = True
    stores = stores_several = True

    @classmethod
    def supports(cls, layer: KVLayer, block_size: int, device: Kind) -> bool:
        return layer.dtype in (mx.bfloat16, mx.float16) and supports_plain(layer, device)

    def decode(self, call: Call, new: Pair | None) -> mx.array | None:
        step, (k, v) = call.step, self.kv.arrays.all
        reach = step.reach(call.mask)
        if reach is None:
            return None
        queries = call.queries.astype(mx.float32)
        fresh = [array.astype(k.dtype) for array in new] if new is not None else []
        sinks = [call.sinks.astype(mx.float32)] if call.sinks is not None else []
        mx.eval(queries, fresh, sinks, k, v)
        new_keys, new_values = [_numbers(array)[:, :, 0] for array in fresh] or (None, None)
        out = plain_decode(
            _numbers(queries)[:, :, 0],
            _numbers(k),
            _numbers(v),
            new_keys,
            new_values,
            step.grid,
            step.lengths,
            reach,
            call.scale,
            _numbers(sinks[0]) if sinks else None,
        )
        return mx.array(out[:, :, None]).astype(call.queries.dtype)


def supports_plain(layer: KVLayer, device: Kind) -> bool:
    """Whether loops can attend over a layer that is stored like this."""
    known = layer.plain and layer.k_dim > 0 and layer.v_dim > 0
    return known and device == "cpu" and loops.why_not() is None


def _numbers(array: mx.array) -> Array:
    """A view of an evaluated array; a copy of what is not in its order in memory, as where a model swaps axes."""
    view = np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
    return np.ascontiguousarray(view)


def plain_decode(
    queries: Array,
    k: Array,
    v: Array,
    new_keys: Array | None,
    new_values: Array | None,
    grid: Grid,
    positions: list[int],
    reach: tuple[int, int],
    scale: float,
    sinks: Array | None,
) -> Array:
    """Attention of `queries` [rows, query heads, dim], one token per row, over `k` and `v` [heads, slots, dim], the
    memory of a pool: float32, float16, or bfloat16 as uint16.

    Keys and values [rows, heads, dim] of the new token, of the same dtype, are stored first, if there are any. `reach`
    is (window, kept tokens).
    """
    from numba import get_num_threads, set_num_threads

    from .plain_kernel import decode

    (heads, slots, _), kind, at = k.shape, KINDS[k.dtype], np.array(positions)
    work = _work(grid, heads, queries.shape[1] // heads, at, reach)
    keys, values = _pool(kind, slots, k), _pool(kind, slots, v)
    new = (NO_BYTES, NO_BYTES)
    if new_keys is not None and new_values is not None:
        new = (_bytes(new_keys), _bytes(new_values))
    stores = (*new, *grid.numbers, grid.block_size, _bytes(k).reshape(-1), _bytes(v).reshape(-1))
    inputs = (heads, np.ascontiguousarray(queries), float(scale), sinks if sinks is not None else NOTHING)
    out = np.empty((*queries.shape[:2], v.shape[2]), np.float32)
    # Of numba's threads no more than have something to do: it waits for all of them, even where they must wait for a
    # core. What is compiled cannot set this itself, or it would not be kept.
    before = get_num_threads()
    set_num_threads(len(work.shares) - 1)
    try:
        loops.call(decode, COMPILING, inputs, stores, keys, values, work[:6], (at, *reach), out)
    finally:
        set_num_threads(before)
    return out


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.uint8)


def _pool(kind: int, slots: int, array: Array) -> tuple[int, int, Array, Array]:
    flat = array.reshape(-1)
    return (kind, slots, flat, NO_SHORTS) if kind == 0 else (kind, slots, NOTHING, flat.view(np.uint16))


# Work


def _work(grid: Grid, heads: int, group: int, positions: Array, reach: tuple[int, int]) -> Work:
    """For this many KV heads, each with `group` queries."""
    count = threads()
    if LEAST and reach == (NOWHERE, 0):
        name = f"plain {heads} {group} {count} {LEAST}"
        work = grid.derived(name, lambda grid: _make(grid, grid.segments(LEAST), heads, group, count))
        # A row that ends inside of what it shares would see more.
        if (positions >= work.together).all():
            return work
    return grid.derived(f"plain {heads} {group} {count}", lambda grid: _make(grid, [], heads, group, count))


def _make(grid: Grid, segments: list[Segment], heads: int, group: int, threads: int) -> Work:
    from .plain_kernel import HALF

    ids, base = grid.numbers
    counts = (base < NOWHERE).sum(axis=1)
    segments = segments or [Segment([row], 0, int(count)) for row, count in enumerate(counts)]
    pieces: list[tuple[int, int, int, int, int]] = []
    runs: list[list[int]] = []
    rows: list[int] = []
    costs: list[int] = []
    parts: list[list[int]] = [[] for _ in ids]
    together = np.zeros(len(ids), np.int64)
    number, step = 0, max(1, PIECE // grid.block_size)
    for segment in segments:
        row, several = segment.rows[0], len(segment.rows)
        if several > 1:
            together[segment.rows] = base[row, segment.end - 1] + grid.block_size
        for first in range(segment.first, segment.end, step):
            some = slice(first, min(first + step, segment.end))
            own = _runs(ids[row, some].tolist(), base[row, some].tolist(), grid.block_size)
            pieces.append((len(runs), len(own), len(rows), several, number))
            runs += own
            for i, reader in enumerate(segment.rows):
                parts[reader].append(number + i)
            number += several
            # In vectors, of which the last may be a half. Keys and values of fewer queries are waited for.
            vectors = max(1, -(-several * group // HALF) / 2)
            costs.append(int((some.stop - first) * grid.block_size * vectors))
        rows += segment.rows
    # `rows` was not yet complete when the pieces of a segment were made, but where its rows begin it said.
    starts = np.cumsum([0, *map(len, parts)])
    flat = [part for some in parts for part in some]
    shares = _shares(np.repeat(costs, heads), threads)
    return Work(np.array(pieces), np.array(runs), np.array(rows), np.array(flat), starts, shares, together)


def _runs(ids: list[int], base: list[int], size: int) -> list[list[int]]:
    """Blocks, those that are adjacent as one: first slot, its position, slots."""
    runs: list[list[int]] = []
    for block, position in zip(ids, base, strict=True):
        if runs and runs[-1][0] + runs[-1][2] == block * size and runs[-1][1] + runs[-1][2] == position:
            runs[-1][2] += size
        else:
            runs.append([block * size, position, size])
    return runs


def _shares(costs: Array, threads: int) -> Array:
    """Where the items of each thread begin, and end: about as much work for each, and for none too little."""
    done = np.cumsum(costs)
    threads = max(1, min(threads, int(done[-1]) // WORTH))
    wanted = done[-1] * np.arange(1, threads) / threads
    return np.array([0, *np.searchsorted(done - costs / 2, wanted), len(costs)])
