"""Attention of one decode step, alone, over a prefix that all rows share: read once, and read by every row for itself.

    python benchmarks/shared_attention.py 16x16384 32x32768
    python benchmarks/shared_attention.py --tune 16x16384       # with other amounts in shared memory, other pieces

One layer of the 8B shape (8 KV heads of 128, 4 queries each, bfloat16), 200 tokens of their own in each row. Needs a
CUDA device. Milliseconds, medians of 50 calls, interleaved.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import mlx.core as mx

from onekv.memory import pairs
from onekv.memory.attention.cuda import plain
from onekv.memory.attention.cuda.plain import Counters, cuda_decode
from onekv.memory.layout import Group, KVLayer, Rule
from onekv.memory.pairs import Grid
from onekv.memory.pool import LayerArrays, Pool
from onekv.memory.pool.table import Table

HEADS, QUERIES, DIM, BLOCK, OWN = 8, 4, 128, 64, 200
# Calls in one measurement, so that what the host does is hidden.
CALLS = 50


def measure(rows: int, prefix: int) -> tuple[float, float]:
    length = prefix + OWN
    blocks = prefix // BLOCK + rows * (OWN // BLOCK + 2)
    pool = Pool(Group(Rule(), (KVLayer("x", HEADS, DIM, DIM, mx.bfloat16),)), blocks, BLOCK)
    arrays = pool.layers[0]
    arrays.k, arrays.v = (mx.random.normal(arrays.k.shape).astype(mx.bfloat16) for _ in range(2))
    first = Table(pool, length, length)
    first.advance(0, length)
    tables = [first]
    for _ in range(rows - 1):
        tables.append(Table(pool, length, length, first.blocks[: prefix // BLOCK]))
        tables[-1].advance(0, length)
    queries = mx.random.normal((rows, HEADS * QUERIES, 1, DIM)).astype(mx.bfloat16)
    positions = mx.full((rows,), length - 1, mx.int32)
    mx.eval(arrays.all, queries, positions)
    compiled = []
    for pairs.SHARED in (256, 0):
        compiled.append(_calls(arrays, Grid.of(tables, [length - 1] * rows)))
        # The work is cut when it is first asked for.
        mx.eval(compiled[-1](queries, positions))
    times: list[list[float]] = [[], []]
    outs: list[mx.array] = [queries, queries]
    for _ in range(53):
        for side, calls in enumerate(compiled):
            begin = time.perf_counter()
            outs[side] = calls(queries, positions)
            mx.eval(outs[side])
            times[side].append((time.perf_counter() - begin) / CALLS)
    error = mx.abs(outs[0].astype(mx.float32) - outs[1].astype(mx.float32)).max()
    assert error < 0.02, error
    return tuple(1000 * statistics.median(some[3:]) for some in times)


def _calls(arrays: LayerArrays, grid: Grid) -> Callable[[mx.array, mx.array], mx.array]:
    """One after the other, each with the output of the one before as its queries; compiled, for the host's sake."""

    counters = Counters()

    def calls(queries: mx.array, positions: mx.array) -> mx.array:
        for _ in range(CALLS):
            queries = cuda_decode(queries, arrays, None, grid, positions, (pairs.NOWHERE, 0), DIM**-0.5, None, counters)
        return queries

    return mx.compile(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["16x16384"])
    parser.add_argument("--tune", action="store_true")
    arguments = parser.parse_args()
    default = (plain.AHEAD, plain.STAGES, plain.TOGETHER // plain.MULTIPROCESSORS)
    ways = [(2, 2, 3), (1, 3, 3), (1, 4, 3), (2, 2, 2), (2, 2, 4)] if arguments.tune else [default]
    for case in arguments.cases:
        for plain.AHEAD, plain.STAGES, per in ways:
            plain.TOGETHER = per * plain.MULTIPROCESSORS
            together, apart = measure(*map(int, case.split("x")))
            how = f"{plain.AHEAD} tiles, {plain.STAGES} stages, {per} blocks a multiprocessor"
            print(
                f"{case}, {how}: together {together:.3f} ms, apart {apart:.3f} ms: {apart / together:.2f}x", flush=True
            )


if __name__ == "__main__":
    main()
