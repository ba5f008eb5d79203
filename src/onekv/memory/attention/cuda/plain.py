"""Decode attention over the pool as a CUDA kernel: each block of a sequence is read once, where it lies.

One thread block per (piece of work, KV head); a piece is some blocks of a row, or of several rows that share them
(`work`). The one that ends last of a row and head joins the row's parts, and the sink. `counters` tells which that is:
zeros, which the last one leaves as it found them; all calls share it, because on the one stream there is they run one
after the other.

It does what `paged.paged_decode` does, for the shapes that `CudaPlain` supports, in fewer operations for the host to
start and close to the speed of memory (figures in benchmarks/). A warp takes 16 tokens at a time through the tensor
cores: scores = Q K^T with the query heads that share the KV head as the 16 rows of a tile, then weights * V, with a
running maximum and sum per query. The four warps of one row take different tokens. The queries of several rows fill up
the tile and, where that is not enough, make two or four of them: warps with different tiles then take the same tokens,
which come from memory once. How a dimension maps to a lane is free as long as both sides of a product agree, so every
lane loads 16 adjacent bytes. The warp that comes to the query's own token stores it first: the kernel writes into the
pool, an input, which MLX does not know (docs/memory.md says why that is sound). Only that warp reads or writes that
slot, and blocks that are written are never shared.
"""

from functools import cache
from typing import Any

import mlx.core as mx

from ...device import Kind
from ...layout import KVLayer
from ...pairs import Grid
from ...pool import LayerArrays
from ..base import Backend, Call
from ..layer import Pair
from .source import Constants, define, kernel_name, read

THREADS = 128
# Queries that share a KV head are the rows of a tile.
MOST_QUERIES = 16


class CudaPlain(Backend):
    stores = True

    @classmethod
    def supports(cls, layer: KVLayer, block_size: int, device: Kind) -> bool:
        k_dim, v_dim = layer.k_dim, layer.v_dim
        fits = 0 < k_dim <= 256 and k_dim % 32 == 0 and 0 < v_dim <= 256 and v_dim % 64 == 0 and block_size % 16 == 0
        return device == "cuda" and layer.plain and fits and layer.dtype in (mx.bfloat16, mx.float16)

    def decode(self, call: Call, new: Pair | None) -> mx.array | None:
        step, arrays = call.step, self.kv.arrays
        reach = step.reach(call.mask)
        if reach is None or call.queries.shape[1] > MOST_QUERIES * self.kv.layer.heads:
            return None
        return cuda_decode(call.queries, arrays, new, step.grid, step.positions, reach, call.scale, call.sinks)


@cache
def _kernel(dtype: mx.Dtype, constants: Constants) -> Any:
    """One for every shape: with MLX's template arguments the whole source would be made anew for every call."""
    return mx.fast.cuda_kernel(
        name=f"onekv_decode_{kernel_name(dtype, constants)}",
        input_names=["q", "k", "v", "new_k", "new_v", "work", "lengths", "counters", "sinks"],
        output_names=["out", "scratch"],
        header=read("mma") + define(dtype, constants),
        source=read("plain"),
    )


@cache
def zero_counters(count: int) -> mx.array:
    counters = mx.zeros(count, mx.int32)
    mx.eval(counters)
    return counters


def cuda_decode(
    queries: mx.array,
    arrays: LayerArrays,
    new: tuple[mx.array, mx.array] | None,
    grid: Grid,
    lengths: mx.array,
    reach: tuple[int, int],
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of `queries` [rows, query heads, 1, dim] at positions `lengths`; `reach` is (window, kept tokens).

    `new` are the keys and values [rows, heads, 1, dim] of those positions, to be stored; None if they are.
    """
    heads, slots, k_dim = arrays.k.shape
    v_dim, dtype = arrays.v.shape[2], arrays.k.dtype
    rows, query_heads = queries.shape[:2]
    shared = query_heads // heads
    work = grid.work(heads, 4 * (MOST_QUERIES // shared))
    kernel = _kernel(
        dtype,
        (
            ("H", heads),
            ("G", shared),
            ("D", k_dim),
            ("DV", v_dim),
            ("BS", grid.block_size),
            ("SLOTS", slots),
            ("SCALE", float(scale)),
            ("WINDOW", reach[0]),
            ("KEEP", reach[1]),
            ("NEW", new is not None),
            ("SINKS", sinks is not None),
        ),
    )
    new_k, new_v = new if new is not None else (queries, queries)
    counters = zero_counters(rows * heads)
    out: mx.array = kernel(
        inputs=[
            queries.astype(dtype),
            arrays.k,
            arrays.v,
            new_k.astype(dtype),
            new_v.astype(dtype),
            work.table,
            lengths,
            counters,
            counters if sinks is None else sinks,
        ],
        grid=(work.shape.pieces * THREADS, heads, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows, query_heads, 1, v_dim), (work.shape.parts * query_heads * (v_dim + 2),)],
        output_dtypes=[dtype, mx.float32],
    )[0]
    return out.astype(queries.dtype)
