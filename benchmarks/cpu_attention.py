"""Attention of one decode step, alone, over plain KV on CPU: by compiled loops and by MLX's operations.

    python benchmarks/cpu_attention.py 1x2048 4x1024 8x2100/2048

Rows x tokens, and after a slash how many of them all rows share. One layer of SmolLM2-135M's shape (3 KV heads of 64, 3
queries each, float32), the new token's KV stored. Microseconds, the best of 200 calls, interleaved; shared blocks read
once, and by every row for itself.
"""

import sys
import time
from collections.abc import Callable

import onekv  # noqa: F401  # Before mlx: it finds it a faster library.

# isort: split
import mlx.core as mx

from onekv.memory.attention import shared
from onekv.memory.attention.base import Call
from onekv.memory.attention.layer import LayerKV
from onekv.memory.attention.numba import plain
from onekv.memory.attention.numba.plain import NumbaPlain
from onekv.memory.attention.paged import Paged
from onekv.memory.attention.shared import Shared
from onekv.memory.attention.turns import Turns
from onekv.memory.layout import Group, KVLayer, Rule
from onekv.memory.pool import Pool
from onekv.memory.pool.table import Table
from onekv.memory.step import GroupStep

HEADS, QUERIES, DIM, BLOCK, CALLS = 3, 3, 64, 64, 200
Run = Callable[[], mx.array]


class Case:
    def __init__(self, rows: int, length: int, prefix: int) -> None:
        layer = KVLayer("x", HEADS, DIM, DIM, mx.float32)
        pool = Pool(Group(Rule(), (layer,)), prefix // BLOCK + rows * ((length - prefix) // BLOCK + 2), BLOCK)
        tables: list[Table] = []
        for _ in range(rows):
            tables.append(Table(pool, length, length, tables[0].blocks[: prefix // BLOCK] if tables else None))
            tables[-1].advance(0, length)
        self.kv = LayerKV(layer, pool.layers[0], Turns(), "cpu")
        self.kv.arrays.k, self.kv.arrays.v = (mx.random.normal(array.shape) for array in self.kv.arrays.all)
        self.step = GroupStep(tables, [length - 1] * rows, [1] * rows, None)
        queries = mx.random.normal((rows, HEADS * QUERIES, 1, DIM))
        self.call = Call(self.step, queries, DIM**-0.5, None, None)
        self.new = (mx.random.normal((rows, HEADS, 1, DIM)), mx.random.normal((rows, HEADS, 1, DIM)))
        mx.eval(self.kv.arrays.all, queries, self.new)

    def mlx(self, least: int) -> Run:
        backends = Shared(self.kv), Paged(self.kv)

        def run() -> mx.array:
            shared.LEAST = least
            self.kv.write(self.step, *self.new)
            out = next(out for backend in backends if (out := backend.decode(self.call, None)) is not None)
            mx.eval(out, self.kv.arrays.all)
            return out

        return run

    def loops(self, least: int, threads: int) -> Run:
        backend = NumbaPlain(self.kv)

        def run() -> mx.array:
            plain.LEAST = least
            plain.threads = lambda: threads
            out = backend.decode(self.call, self.new)
            assert out is not None
            mx.eval(out)
            return out

        return run


def measure(rows: int, length: int, prefix: int) -> dict[str, float]:
    case, most = Case(rows, length, prefix), plain.threads()
    runs = {"MLX": case.mlx(256)}
    runs |= {f"loops, {threads} threads": case.loops(64, threads) for threads in range(1, most + 1)}
    if prefix:
        runs["MLX, apart"] = case.mlx(0)
        runs |= {f"loops, {threads} threads, apart": case.loops(0, threads) for threads in range(1, most + 1)}
    best, expected = dict.fromkeys(runs, float("inf")), runs["MLX"]()
    for _ in range(CALLS):
        for name, run in runs.items():
            begin = time.perf_counter()
            out = run()
            best[name] = min(best[name], time.perf_counter() - begin)
            assert mx.abs(out - expected).max() < 1e-5, name
    plain.threads = lambda: most
    return {name: 1e6 * seconds for name, seconds in best.items()}


if __name__ == "__main__":
    for case in sys.argv[1:] or ["1x2048", "4x1024", "8x2100/2048"]:
        size, _, prefix = case.partition("/")
        rows, length = map(int, size.split("x"))
        found = measure(rows, length, int(prefix or 0))
        print(f"{case}: " + "; ".join(f"{name} {us:.0f}" for name, us in found.items()))
