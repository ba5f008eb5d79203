"""Decode attention over encoded blocks on CPU by compiled loops (`kernel`), where numba is installed.

MLX has no way to put such loops into its graph. So what they need is evaluated first, they run at once on the pool's
memory, and what they give is a new array: a layer is computed when the model calls it, not when the step is evaluated
(`Runner` reads its tokens at once). The pool is written without MLX knowing, between its own uses of it. Views of it
end with the call, or the next write of MLX's would copy it.
"""

import functools
import logging
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import numpy as np

from ...device import Kind
from ...formats import Codec
from ...formats.centre import Centre, Rope
from ...formats.rotation import rotation
from ...layout import KVLayer
from ...pairs import Grid
from ...pool import LayerArrays
from ..base import Backend, Call
from ..layer import Pair

log = logging.getLogger("onekv")

Array = np.ndarray[Any, Any]
NOTHING = np.zeros(0, np.float32)
COMPILING = "onekv: compiling attention over encoded KV for this processor; that is done once and takes about 20 s"
SLOW = "so decoding with this --kv-format is slow on CPU; run pip install -U 'onekv[cpu]'"


class Numba(Backend):
    eager = True
    stores = True

    @classmethod
    def supports(cls, layer: KVLayer, block_size: int, device: Kind) -> bool:
        known = layer.keys.codes is not None and layer.values.codes is not None
        return known and block_size % 4 == 0 and device == "cpu" and why_not() is None

    def decode(self, call: Call, new: Pair | None) -> mx.array | None:
        step, kv, layer, turns = call.step, self.kv, self.kv.layer, None
        reach = step.reach(call.mask)
        if reach is None:
            return None
        if layer.centre is not None:
            turns = kv.turns.table(step, layer.centre.rope, layer.k_dim)
        return encoded_decode(
            call.queries, kv.arrays, layer, new, step.grid, step.lengths, reach, call.scale, call.sinks, turns
        )


@functools.cache
def why_not() -> str | None:
    """None if numba can be used, else the reason and what to do about it."""
    if find_spec("numba") is None:
        return f"numba is not installed, {SLOW}"
    try:
        import numba  # noqa: F401
    except ImportError as error:
        # It refuses a numpy that is newer than itself.
        return f"numba cannot be used ({error}), {SLOW}"
    return None


def encoded_decode(
    queries: mx.array,
    arrays: LayerArrays,
    stored: KVLayer,
    new: tuple[mx.array, mx.array] | None,
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
    rows, query_heads, _, dim = queries.shape
    fresh = new if new is not None else (mx.zeros((0, 1, 1, dim)), mx.zeros((0, 1, 1, stored.v_dim)))
    inputs = [array.astype(mx.float32) for array in (queries, *fresh)]
    others = [array.astype(mx.float32) for array in (sinks, turns) if array is not None]
    mx.eval(inputs, others, arrays.all)
    asked = (
        stored.heads,
        *(_contiguous(array)[:, :, 0] for array in inputs),
        float(scale),
        np.asarray(others[0]) if sinks is not None else NOTHING,
    )
    centres = _centres(stored.centre, _contiguous(others[-1]) if turns is not None else NOTHING.reshape(0, 0, 0))
    reads = (*grid.numbers, np.array(positions), *reach, grid.block_size)
    out = np.empty((rows, query_heads, stored.v_dim), np.float32)
    rotations = _rotation(dim), _rotation(stored.v_dim)
    _decode(asked, rotations, _side(stored.keys, arrays.keys), _side(stored.values, arrays.values), centres, reads, out)
    return mx.array(out)[:, :, None].astype(queries.dtype)


def _decode(*arguments: Any) -> None:
    # Not before it is needed: this imports numba.
    from numba.core.event import install_listener

    from .kernel import Compiling, decode

    if decode.signatures:
        decode(*arguments)
        return
    with install_listener("numba:compile", Compiling(lambda: log.warning(COMPILING))):
        decode(*arguments)


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
