"""Decode attention over encoded blocks on CPU by compiled loops (`kernel`), where numba is installed.

MLX's graph cannot contain such loops. So their inputs are evaluated first, they run immediately on the pool's memory,
and their result is a new array: a layer is computed when the model calls it, not when the step is evaluated (`Runner`
reads its tokens at once). The pool is written without MLX knowing, while MLX does not use it. Views of it end with the
call, or MLX's next write would copy it.
"""

import functools
from typing import Any

import mlx.core as mx
import numpy as np

from .... import loops
from ...device import Kind
from ...formats import Codec
from ...formats.centre import Centre, Rope
from ...formats.rotation import rotation
from ...layout import KVLayer
from ...pairs import Grid
from ...pool import LayerArrays
from ...step import GroupStep
from ..base import Backend, Call
from ..layer import LayerKV, Pair

Array = np.ndarray[Any, Any]
NOTHING = np.zeros(0, np.float32)
COMPILING = "onekv: compiling attention over encoded KV for this processor; this is done once and takes about 20 s"


class Numba(Backend):
    kernel = True
    eager = True
    stores = stores_several = True

    @classmethod
    def supports(cls, layer: KVLayer, block_size: int, device: Kind) -> bool:
        known = layer.keys.codes is not None and layer.values.codes is not None
        return known and block_size % 4 == 0 and device == "cpu" and loops.why_not() is None

    def decode(self, call: Call, new: Pair | None) -> mx.array | None:
        step, kv = call.step, self.kv
        reach = step.reach(call.mask)
        if reach is None:
            return None
        where = (step.grid, step.lengths, reach)
        return encoded_decode(call.queries, kv.arrays, kv.layer, new, *where, call.scale, call.sinks, _turns(kv, step))


def _turns(kv: LayerKV, step: GroupStep) -> mx.array | None:
    """What a centred layer needs of a step."""
    layer = kv.layer
    return kv.turns.table(step, layer.centre.rope, layer.k_dim) if layer.centre is not None else None


def encoded_decode(
    queries: mx.array,
    arrays: LayerArrays,
    stored: KVLayer,
    new: Pair | None,
    grid: Grid,
    positions: list[int],
    reach: tuple[int, int],
    scale: float,
    sinks: mx.array | None,
    turns: mx.array | None,
) -> mx.array:
    """Attention of `queries` [rows, query heads, 1, dim], one token per row, over what `arrays` hold and the `new`
    token, which is encoded and stored.

    `reach` is (window, kept tokens). A centred layer needs the `turns.table` of the step.
    """
    given = [array.astype(mx.float32) for array in (queries, *(new or ()))]
    mx.eval(given, arrays.all, *([] if sinks is None else [sinks]))
    asked, *fresh = (_contiguous(array)[:, :, 0] for array in given)
    out = decode_rows(
        asked,
        arrays,
        stored,
        (fresh[0], fresh[1]) if fresh else None,
        grid,
        positions,
        reach,
        scale,
        np.asarray(sinks.astype(mx.float32)) if sinks is not None else None,
        turns,
    )
    return mx.array(out)[:, :, None].astype(queries.dtype)


def attend_encoded(
    kv: LayerKV,
    step: GroupStep,
    queries: Array,
    new: tuple[Array, Array] | None,
    reach: tuple[int, int],
    scale: float,
    sinks: Array | None,
) -> Array:
    """The same over one layer's KV, for a step; NumPy's arrays in and out, [rows, heads, dim]."""
    where = (step.grid, step.lengths, reach)
    return decode_rows(queries, kv.arrays, kv.layer, new, *where, scale, sinks, _turns(kv, step))


def decode_rows(
    queries: Array,
    arrays: LayerArrays,
    stored: KVLayer,
    new: tuple[Array, Array] | None,
    grid: Grid,
    positions: list[int],
    reach: tuple[int, int],
    scale: float,
    sinks: Array | None,
    turns: mx.array | None,
) -> Array:
    rows, query_heads, dim = queries.shape
    if turns is not None:
        turns = turns.astype(mx.float32)
        mx.eval(turns)
    fresh = new if new is not None else (np.zeros((0, 1, dim), np.float32), np.zeros((0, 1, stored.v_dim), np.float32))
    asked = (
        stored.heads,
        *(np.ascontiguousarray(array) for array in (queries, *fresh)),
        float(scale),
        sinks if sinks is not None else NOTHING,
    )
    centres = _centres(stored.centre, _contiguous(turns) if turns is not None else NOTHING.reshape(0, 0, 0))
    reads = (*grid.numbers, np.array(positions), *reach, grid.block_size)
    out = np.empty((rows, query_heads, stored.v_dim), np.float32)
    rotations = _rotation(dim), _rotation(stored.v_dim)
    _decode(asked, rotations, _side(stored.keys, arrays.keys), _side(stored.values, arrays.values), centres, reads, out)
    return out


def _decode(*arguments: Any) -> None:
    # Not before it is needed: this imports numba.
    from .kernel import decode

    loops.call(decode, COMPILING, *arguments)


def _contiguous(array: mx.array) -> Array:
    """What is not in its order in memory, as where a model swaps axes, is copied."""
    return np.ascontiguousarray(np.asarray(array))


def _side(codec: Codec, planes: list[mx.array]) -> tuple[Any, ...]:
    codes, scales, biases = (np.asarray(plane) for plane in (planes[0], planes[1], planes[-1]))
    kind, *book = _book(codec)
    codes = codes.view(np.uint8)
    flat = (codes.reshape(-1), *(plane.view(np.uint16).reshape(-1) for plane in (scales, biases)))
    return (kind, *codes.shape[1:], scales.shape[2], *flat, *book)


@functools.cache
def _book(codec: Codec) -> tuple[int, Array, Array, Array]:
    """Kind; the two numbers of each byte's pair of codes as one double, the codebook, and what lies between."""
    from .kernel import AFFINE

    codes = codec.codes
    assert codes is not None
    if codes.book is None:
        return codes.bits + AFFINE, np.zeros(0), NOTHING, NOTHING
    book = codes.book
    return codes.bits, np.array(book.pairs).view(np.float64), np.array(book.entries), np.array(book.edges)


@functools.cache
def _rotation(dim: int) -> tuple[Array, Array]:
    return np.array(rotation(dim).signs), rotation(dim).matrix


def _centres(centre: Centre | None, turns: Array) -> tuple[Array, ...]:
    if centre is None:
        return (NOTHING.reshape(0, 0), *_channels(Rope(), 0), turns)
    return (np.asarray(centre.mean), *_channels(centre.rope, centre.mean.shape[1]), turns)


@functools.cache
def _channels(rope: Rope, dim: int) -> tuple[Array, Array, Array]:
    first, second = rope.pairs()
    return first, second, np.arange(rope.dims, dim)
