"""Decode attention over the pool as a CUDA kernel: each block of a sequence is read once, in place.

One thread block per (piece of work, KV head); a piece is some blocks of a row, or of several rows that share them
(`work`). The thread block of a row and head that finishes last joins the row's parts, and the sink (`Counters`). If
rows read blocks together, the last piece of a shared prefix would have to join all its rows: in that case a second
kernel does it, with one thread block for each row and query head.

It computes the same as `paged.paged_decode`, for the shapes that `CudaPlain` supports, with fewer launches and close to
the memory bandwidth (figures in benchmarks/). A warp processes 16 or 32 tokens at a time on the tensor cores: scores =
Q K^T with the query heads that share the KV head as the 16 rows of a tile, then weights * V, with a running maximum and
sum per query.

If rows read separately (plain.cu, tile.cu), the four warps take different tokens. The mapping of dimensions to lanes is
free as long as both sides of a product agree, so every lane loads 16 adjacent bytes of memory. If they read together
(together.cu), the queries of several rows fill the tile and, if necessary, two or four tiles, one for each warp: tokens
are loaded once from memory into shared memory, from which all warps load their matrices.

The warp that reaches the query's own token stores it first: the kernel writes into the pool, an input, without MLX
knowing (docs/memory.md explains why that is sound). Only that warp reads or writes that slot, and blocks that are
written are never shared. Rows that are tokens of one sequence read what the others store: in that case a separate
kernel stores all of them first. As many of them as fit into one tile are read at a time, in the pieces and by the warps
that would read each of them alone, so that the results are bit for bit the same (`work`).

If queries and new keys come from RoPE, and its inputs are known from the trace (`traces`), the kernel rotates them
while loading, with a table of cosines and sines that all layers share: this saves two launches in every layer. A row at
position -1 is padding: it reads and stores nothing, and its output is 0.
"""

from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from ....cuda.source import Constants, define, kernel_name, read
from ....traces import notes
from ...device import Kind
from ...layout import KVLayer
from ...pairs import Grid
from ...pool import LayerArrays
from ...step import GroupStep
from ...work import Kernel, Work
from ..base import Backend, Call
from ..layer import LayerKV, Pair

THREADS = 128
# Of the chip on which kernels were measured. By the registers that they take, it runs two thread blocks on each where
# rows read for themselves, and three where they read together.
MULTIPROCESSORS = 132
ALONE, TOGETHER = 2 * MULTIPROCESSORS, 3 * MULTIPROCESSORS
# Where rows read together: tiles of 16 tokens that are copied to shared memory at a time, of heads of up to 128 and of
# larger ones, and for how many of these there is room.
AHEAD, AHEAD_LARGE, STAGES = 2, 1, 2
# Queries that share a KV head are the rows of a tile.
MOST_QUERIES = 16
INPUTS = ["q", "k", "v", "new_k", "new_v", "work", "lengths", "turns"]


class CudaPlain(Backend):
    kernel = True
    stores = stores_several = True

    def __init__(self, kv: LayerKV) -> None:
        super().__init__(kv)
        self._counters = Counters()

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
        positions, queries, turn = step.positions, call.queries, _unturned(step, call.queries, new)
        if turn is not None:
            queries, new = turn.queries, turn.new
        if step.repeated and new is not None:
            positions, new = cuda_store(arrays, new, step.row_slots, positions, turn), None
        return cuda_decode(
            queries, arrays, new, step.grid, positions, reach, call.scale, call.sinks, self._counters, turn
        )


class Turn(NamedTuple):
    """RoPE that a kernel does: what it was given, and the angles of each row."""

    queries: mx.array
    new: Pair | None
    # [rows, dims] in float32: what RoPE makes of 1 and 0 in each pair.
    angles: mx.array
    dims: int
    traditional: bool


def _unturned(step: GroupStep, queries: mx.array, new: Pair | None) -> Turn | None:
    """What queries and new keys were before RoPE, if both were turned alike and the kernel can do that."""
    noted = notes()
    if noted is None:
        return None
    turned = noted.turned(queries)
    keys = noted.turned(new[0]) if new is not None else turned
    if turned is None or keys is None or keys.dims != turned.dims or not _alike(keys.how, turned.how):
        return None
    traditional = bool(turned.how["traditional"])
    if turned.how["offset"] is not step.positions or turned.dims % (16 if traditional else 64):
        return None
    unturned = (keys.x, new[1]) if new is not None else None
    return Turn(turned.x, unturned, step.angles(turned.dims, turned.how), turned.dims, traditional)


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        value is other[key] or (not isinstance(value, mx.array) and value == other[key]) for key, value in one.items()
    )


# One of each for every shape: with MLX's template arguments the whole source would be made anew for every call.


@cache
def _kernel(dtype: mx.Dtype, constants: Constants) -> Any:
    return mx.fast.cuda_kernel(
        name=f"onekv_decode_{kernel_name(dtype, constants)}",
        input_names=[*INPUTS, "counters", "sinks"],
        output_names=["out", "scratch"],
        header=read("mma") + define(dtype, constants) + read("rope", __package__),
        source=read("plain", __package__) + read("alone", __package__),
    )


@cache
def _parts_kernel(dtype: mx.Dtype, constants: Constants) -> Any:
    return mx.fast.cuda_kernel(
        name=f"onekv_parts_{kernel_name(dtype, constants)}",
        input_names=INPUTS,
        output_names=["scratch"],
        header=read("mma") + define(dtype, constants) + read("rope", __package__),
        source=read("together", __package__),
    )


@cache
def _join_kernel(dtype: mx.Dtype, constants: Constants) -> Any:
    return mx.fast.cuda_kernel(
        name=f"onekv_join_{kernel_name(dtype, constants)}",
        input_names=["scratch", "work", "sinks"],
        output_names=["out"],
        header=define(dtype, constants),
        source=read("join", __package__),
    )


@cache
def _store_kernel(dtype: mx.Dtype, constants: Constants) -> Any:
    return mx.fast.cuda_kernel(
        name=f"onekv_store_{kernel_name(dtype, constants)}",
        input_names=["k", "v", "new_k", "new_v", "slots", "lengths", "turns"],
        output_names=["stored"],
        header=define(dtype, constants) + read("rope", __package__),
        source=read("store", __package__),
    )


class Counters:
    """Zeros for kernels to find out which thread block ends last, and that are zeros again when it has.

    Every layer has its own: layers that do not need each other, as those of a model and of its draft model, may run at
    the same time.
    """

    def __init__(self) -> None:
        self.zeros = mx.zeros(0, mx.int32)

    def take(self, count: int) -> mx.array:
        if self.zeros.size < count:
            self.zeros = mx.zeros(count, mx.int32)
            mx.eval(self.zeros)
        return self.zeros


def cuda_store(
    arrays: LayerArrays, new: Pair, slots: mx.array, lengths: mx.array, turn: Turn | None = None
) -> mx.array:
    """Store `new` keys and values [rows, heads, 1, dim] in `slots` [rows]; -1 is nowhere.

    Gives back `lengths`: who uses these instead starts when all is stored.
    """
    heads, _, k_dim = arrays.k.shape
    dtype = arrays.k.dtype
    constants: Constants = (("H", heads), ("D", k_dim), ("DV", arrays.v.shape[2]), *_rope(turn))
    inputs = [
        arrays.k,
        arrays.v,
        *(array.astype(dtype) for array in new),
        slots,
        lengths,
        turn.angles if turn is not None else _no_angles(),
    ]
    stored: mx.array = _store_kernel(dtype, constants)(
        inputs=inputs,
        grid=(len(lengths) * 32, heads, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[lengths.shape],
        output_dtypes=[lengths.dtype],
    )[0]
    return stored


def _rope(turn: Turn | None) -> Constants:
    return (("ROPE", turn.dims if turn else 0), ("TRADITIONAL", turn.traditional if turn else False))


@cache
def _no_angles() -> mx.array:
    """What a kernel that turns nothing is given."""
    angles = mx.zeros(1, mx.float32)
    mx.eval(angles)
    return angles


def cuda_decode(
    queries: mx.array,
    arrays: LayerArrays,
    new: tuple[mx.array, mx.array] | None,
    grid: Grid,
    lengths: mx.array,
    reach: tuple[int, int],
    scale: float,
    sinks: mx.array | None,
    own: Counters,
    turn: Turn | None = None,
) -> mx.array:
    """Attention of `queries` [rows, query heads, 1, dim] at positions `lengths`; `reach` is (window, kept tokens).

    `new` are the keys and values [rows, heads, 1, dim] of those positions, to be stored; None if they are. With `turn`,
    queries and new keys are still to be turned.
    """
    heads, _, k_dim = arrays.k.shape
    v_dim, dtype = arrays.v.shape[2], arrays.k.dtype
    rows, query_heads = queries.shape[:2]
    shared = query_heads // heads
    fit = MOST_QUERIES // shared
    work = grid.work(Kernel(heads, 4 * fit, ALONE, TOGETHER, 1, fit))
    constants: Constants = (
        ("H", heads),
        ("G", shared),
        ("D", k_dim),
        ("DV", v_dim),
        ("BS", grid.block_size),
        ("SCALE", float(scale)),
        ("WINDOW", reach[0]),
        ("KEEP", reach[1]),
        ("NEW", new is not None),
        ("SINKS", sinks is not None),
        ("SEVERAL", work.shape.several),
        *_rope(turn),
    )
    new_k, new_v = new if new is not None else (queries, queries)
    inputs = [
        *(queries.astype(dtype), arrays.k, arrays.v, new_k.astype(dtype), new_v.astype(dtype)),
        *(work.table, lengths, turn.angles if turn is not None else _no_angles()),
    ]
    out = _launch(dtype, constants, inputs, work, (rows, query_heads, 1, v_dim), sinks, own)
    return out.astype(queries.dtype)


def _launch(
    dtype: mx.Dtype,
    constants: Constants,
    inputs: list[mx.array],
    work: Work,
    shape: tuple[int, int, int, int],
    sinks: mx.array | None,
    own: Counters,
) -> mx.array:
    """The output, of that shape: by one kernel where each row reads for itself, else by two."""
    rows, query_heads, _, v_dim = shape
    heads = dict(constants)["H"]
    launch: Any = {"grid": (heads * THREADS, work.shape.pieces, 1), "threadgroup": (THREADS, 1, 1)}
    parts = (work.shape.parts * query_heads * (v_dim + 2),)
    if not work.shape.together:
        counters = own.take(rows * int(heads))
        alone: mx.array = _kernel(dtype, constants)(
            inputs=[*inputs, counters, counters if sinks is None else sinks],
            output_shapes=[shape, parts],
            output_dtypes=[dtype, mx.float32],
            **launch,
        )[0]
        return alone
    ahead = AHEAD if int(dict(constants)["D"]) + v_dim <= 256 else AHEAD_LARGE
    scratch = _parts_kernel(dtype, (*constants, ("AHEAD", ahead), ("STAGES", STAGES)))(
        inputs=inputs, output_shapes=[parts], output_dtypes=[mx.float32], **launch
    )[0]
    joined: mx.array = _join_kernel(dtype, constants)(
        inputs=[scratch, work.table, work.table if sinks is None else sinks],
        grid=(rows * THREADS, query_heads, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
    )[0]
    return joined
