"""Decode attention over the pool as a Metal kernel. Each block is read once for all query heads of a KV head, and once
for all rows that share it.

The structure is that of `cuda.plain` (read that first): one threadgroup per (piece of work, KV head), a piece yields a
part for each of its rows, and a piece of a shared prefix holds the queries of all rows that share it. The differences:

    products    plain multiply-adds, no tensor cores. A warp (simdgroup) holds up to 8 queries, kept in shared memory,
                and takes 8, 16 or 32 tokens at a time: fewer with more queries, to stay within the registers.
    scores      8 lanes share a token. Each reads every eighth 16-byte vector of the key and multiplies it with all
                queries, which gives it an eighth of every score. Three rounds of shuffles sum these up, each with half
                as many numbers as the one before, until every lane has complete scores of a single query:

                    lane = 8 * group + part;  its tokens are i * 4 + group;  part determines the query and i

    values      a lane has four dimensions of a token, or two times four, and multiplies them with the weights of all
                queries, which come through shared memory.
    new token   is read from where the model put it, and stored besides, so the kernel never reads what it writes.
    joining     is always a separate kernel: Metal does not order memory accesses between threadgroups.

Warps with the same queries split the tokens among them; at the end their sums are joined in the shared memory that held
the queries.

A row at position -1 is padding: it reads and stores nothing, and its output is 0.

To write to an input, the bodies cast its `const` away, which is legal in Metal's language; only casts between address
spaces are not. MLX passes inputs of fewer than 8 elements in the `constant` address space, so the bodies never take
pointers to `lengths`, `slots` or `sinks`.
"""

import mlx.core as mx

from ....cuda.source import Constants
from ...pairs import Grid
from ...pool import LayerArrays
from ...work import Kernel, Work
from ..base import Call
from ..layer import LayerKV, Pair
from .language import LANGUAGES, Language, kernel

WARPS = 4
THREADS = 32 * WARPS
# The most queries a warp holds.
MOST_QUERIES = 8
# Threadgroups to start, where each row reads for itself and where rows read together: what suited an H200. Devices with
# Metal have other numbers of cores, and nothing was measured there.
ALONE, TOGETHER = 396, 264
# The most bytes of queries a threadgroup holds: half of the shared memory that Metal allows it.
MOST_BYTES = 16 << 10


def attend(kv: LayerKV, call: Call, new: Pair | None) -> mx.array | None:
    """`Backend.decode` by the kernels, in the language of the layer's device."""
    step = call.step
    reach = step.reach(call.mask)
    if reach is None or call.queries.shape[1] > most_queries(kv.layer.k_dim) * kv.layer.heads:
        return None
    language, positions = LANGUAGES[kv.device], step.positions
    if step.repeated and new is not None:
        positions, new = store(language, kv.arrays, new, step.row_slots, positions), None
    return decode(language, call.queries, kv.arrays, new, step.grid, positions, reach, call.scale, call.sinks)


def most_queries(k_dim: int) -> int:
    """How many queries a threadgroup has room for."""
    return next(count for count in (32, 16, 8) if count * k_dim * 4 <= MOST_BYTES)


def rows_together(k_dim: int, shared: int) -> int:
    """The most rows in one piece of work; `shared` query heads share a KV head."""
    return most_queries(k_dim) // shared


def store(language: Language, arrays: LayerArrays, new: Pair, slots: mx.array, lengths: mx.array) -> mx.array:
    """Store `new` keys and values [rows, heads, 1, dim] in `slots` [rows].

    Returns `lengths`; an operation that uses the returned array runs after everything is stored.
    """
    heads, count, k_dim = arrays.k.shape
    dtype = arrays.k.dtype
    constants: Constants = (("H", heads), ("D", k_dim), ("DV", arrays.v.shape[2]), ("SLOTS", count))
    names = ("k", "v", "new_k", "new_v", "slots", "lengths")
    stored: mx.array = kernel("store", language, dtype, constants, names, ("stored",))(
        inputs=[arrays.k, arrays.v, *(array.astype(dtype) for array in new), slots, lengths],
        grid=(len(lengths) * 32, heads, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[lengths.shape],
        output_dtypes=[lengths.dtype],
    )[0]
    return stored


def decode(
    language: Language,
    queries: mx.array,
    arrays: LayerArrays,
    new: Pair | None,
    grid: Grid,
    lengths: mx.array,
    reach: tuple[int, int],
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of `queries` [rows, query heads, 1, dim] at positions `lengths`; `reach` is (window, kept tokens).

    `new` are the keys and values [rows, heads, 1, dim] of those positions, which are stored; None if they already are.
    """
    heads, slots, k_dim = arrays.k.shape
    v_dim, dtype = arrays.v.shape[2], arrays.k.dtype
    shared = queries.shape[1] // heads
    work = grid.work(Kernel(heads, rows_together(k_dim, shared), ALONE, TOGETHER, 4))
    together = work.shape.together
    # Queries per warp and per threadgroup: no more than one row has, unless rows are read together.
    count = MOST_QUERIES if together else min(MOST_QUERIES, 1 << (shared - 1).bit_length())
    held = most_queries(k_dim) if together else count << (-(-shared // count) - 1).bit_length()
    sizes: Constants = (("H", heads), ("G", shared), ("DV", v_dim), ("WARPS", WARPS))
    constants: Constants = (
        *sizes,
        ("D", k_dim),
        ("BS", grid.block_size),
        ("SLOTS", slots),
        ("SCALE", float(scale)),
        ("WINDOW", reach[0]),
        ("KEEP", reach[1]),
        ("NEW", new is not None),
        ("TOGETHER", together),
        ("QUERIES", count),
        ("SPACE", max(held * k_dim, WARPS * v_dim)),
    )
    names = ("q", "k", "v", "new_k", "new_v", "work", "lengths")
    new_k, new_v = new if new is not None else (queries, queries)
    scratch = kernel("attend", language, dtype, constants, names, ("scratch",))(
        inputs=[queries.astype(dtype), *arrays.all, new_k.astype(dtype), new_v.astype(dtype), work.table, lengths],
        grid=(work.shape.pieces * THREADS, heads, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(work.shape.parts * heads * shared * (v_dim + 2),)],
        output_dtypes=[mx.float32],
    )[0]
    return _joined(language, scratch, work, sizes, queries, (dtype, v_dim), sinks)


def _joined(
    language: Language,
    scratch: mx.array,
    work: Work,
    sizes: Constants,
    queries: mx.array,
    value: tuple[mx.Dtype, int],
    sinks: mx.array | None,
) -> mx.array:
    """Each row's output, from its parts; `value` is the dtype and the dim of values."""
    rows, query_heads = queries.shape[:2]
    dtype, v_dim = value
    constants = (*sizes, ("SINKS", sinks is not None))
    out: mx.array = kernel("join", language, dtype, constants, ("scratch", "work", "sinks"), ("out",))(
        inputs=[scratch, work.table, work.table if sinks is None else sinks],
        grid=(rows * THREADS, query_heads, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows, query_heads, 1, v_dim)],
        output_dtypes=[dtype],
    )[0]
    return out.astype(queries.dtype)
