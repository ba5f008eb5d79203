"""Decode attention over encoded blocks as a CUDA kernel: the bytes are read once, in place, and never unpacked to
memory.

Like `plain` (read that first): one thread block per (piece of work, KV head), four warps, 16 tokens at a time through
the tensor cores. What is different:

    queries    are rotated first, by every thread block for itself
    keys       a lane converts the codes it loads to numbers in its registers; scale and bias are one pair per token, so
               they are applied to the scores: <q, c * scale + bias> = scale * <q, c> + bias * sum(q)
    values     the same: weights are multiplied by the scale, and the sum of weight * bias is added at the end
    new token  is rotated, encoded and stored by the warp that reads its tile, as `Codec.encode` does
    centres    (`formats.centre`) of 16 tokens are one more product: with a, b the factors of a pair's cosine and sine,
               S its angle at the first of the tokens and s that from there on,
               a cos(S + s) + b sin(S + s) = (a cos S + b sin S) cos s + (b cos S - a sin S) sin s
               the factors are rotated by S, from a table with every 16th position; that of s is the same for all
    output     is rotated back by the thread block that joins a row's parts
    rows       that share blocks, or are tokens of one sequence, convert codes to numbers once for all of them; with
               centres half as many, whose factors fill the other half of a tile's registers

Codes of up to 4 bits are converted by a table of pairs in shared memory, those of 5, 6 and 8 bits arithmetically.
Affine codes are centred (half of their range is subtracted and added to the bias), so that rounding weights to T costs
as little precision as possible.
Supports head dim 128 only, which nearly all models concerned have.
"""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ....cuda.source import Constants, define, kernel_name, read
from ...device import Kind
from ...formats import Codec
from ...formats.centre import Rope
from ...formats.rotation import rotation
from ...layout import KVLayer
from ...pairs import Grid
from ...pool import LayerArrays
from ...work import Kernel
from ..base import Backend, Call
from ..layer import LayerKV, Pair
from .plain import MULTIPROCESSORS, THREADS, Counters

DIM = 128


class CudaEncoded(Backend):
    kernel = True
    stores = stores_several = True

    def __init__(self, kv: LayerKV) -> None:
        super().__init__(kv)
        self._counters = Counters()

    @classmethod
    def supports(cls, layer: KVLayer, block_size: int, device: Kind) -> bool:
        fits = layer.k_dim == layer.v_dim == DIM and block_size % 16 == 0 and layer.dtype in (mx.bfloat16, mx.float16)
        known = layer.keys.codes is not None and layer.values.codes is not None
        return device == "cuda" and fits and known

    def decode(self, call: Call, new: Pair | None) -> mx.array | None:
        step, kv, layer, turns = call.step, self.kv, self.kv.layer, None
        reach = step.reach(call.mask)
        if reach is None or call.queries.shape[1] > _tile(layer) * layer.heads:
            return None
        if layer.centre is not None:
            turns = kv.turns.starts(layer.centre.rope, layer.k_dim, step.end)
        positions = step.positions
        if step.repeated and new is not None:
            positions, new = encoded_store(kv.arrays, layer, new, step.row_slots, positions), None
        how = (reach, call.scale, call.sinks, self._counters, turns)
        return encoded_decode(call.queries, kv.arrays, layer, new, step.grid, positions, *how)


def _tile(layer: KVLayer) -> int:
    """Queries of a tile."""
    return 16 if layer.centre is None else 8


STORED = ["k", "k_scale", "k_bias", "v", "v_scale", "v_bias"]
INPUTS = ["q", *STORED, "new_k", "new_v", "work", "lengths", "constants", "centre", "rope", "turns"]


def _header(dtype: mx.Dtype, constants: Constants) -> str:
    return read("mma") + define(dtype, constants) + read("codes", __package__)


@cache
def _kernel(dtype: mx.Dtype, constants: Constants) -> Any:
    return mx.fast.cuda_kernel(
        name=f"onekv_encoded_{kernel_name(dtype, constants)}",
        input_names=[*INPUTS, "counters", "sinks"],
        output_names=["out", "scratch"],
        header=_header(dtype, constants),
        source=read("encoded", __package__) + read("encoded_alone", __package__),
    )


@cache
def _parts_kernel(dtype: mx.Dtype, constants: Constants) -> Any:
    return mx.fast.cuda_kernel(
        name=f"onekv_encoded_parts_{kernel_name(dtype, constants)}",
        input_names=INPUTS,
        output_names=["scratch"],
        header=_header(dtype, constants),
        source=read("encoded", __package__),
    )


@cache
def _join_kernel(dtype: mx.Dtype, constants: Constants) -> Any:
    return mx.fast.cuda_kernel(
        name=f"onekv_encoded_join_{kernel_name(dtype, constants)}",
        input_names=["scratch", "work", "constants", "sinks"],
        output_names=["out"],
        header=_header(dtype, constants),
        source=read("encoded_join", __package__),
    )


@cache
def _store_kernel(dtype: mx.Dtype, constants: Constants) -> Any:
    return mx.fast.cuda_kernel(
        name=f"onekv_encoded_store_{kernel_name(dtype, constants)}",
        input_names=[*STORED, "new_k", "new_v", "slots", "lengths", "constants", "centre", "rope"],
        output_names=["stored"],
        header=_header(dtype, constants),
        source=read("encoded_store", __package__),
    )


@cache
def _constants(keys: Codec, values: Codec) -> mx.array:
    """Signs, codebooks and tables of pairs, one after the other."""
    signs = np.array(rotation(DIM).signs)
    numbers = [*(_levels(codec) for codec in (keys, values)), *(_table(codec) for codec in (keys, values))]
    constants = mx.array(np.concatenate([signs, *numbers]).astype(np.float32))
    mx.eval(constants)
    return constants


def _levels(codec: Codec) -> "np.ndarray[Any, Any]":
    """What a code stands for when a row is encoded; 16 numbers."""
    book = codec.codes.book if codec.codes is not None else None
    return np.resize(np.array(book.entries), 16) if book is not None else np.zeros(16)


def _table(codec: Codec) -> "np.ndarray[Any, Any]":
    """The two numbers of each byte's pair of codes, [256 * 2]."""
    book = codec.codes.book if codec.codes is not None else None
    if book is not None:
        return np.array(book.pairs).view(np.float32)
    octets = np.arange(256)
    return np.stack([octets % 16 - 8, octets // 16 - 8], axis=-1).reshape(-1)


@cache
def _rope(rope: Rope) -> mx.array:
    """Angles, channels of pairs, and cosines and sines of all pairs 0 to 15 positions on."""
    angles = rope.angles(DIM)
    turned = np.arange(16)[:, None] * angles
    steps = np.stack([np.cos(turned), np.sin(turned)], axis=-1).reshape(-1)
    numbers = mx.array(np.concatenate([angles, *rope.all_pairs(DIM), steps]).astype(np.float32))
    mx.eval(numbers)
    return numbers


def _codes(stored: KVLayer) -> Constants:
    """How rows of a layer are stored."""
    keys, values = stored.keys.codes, stored.values.codes
    assert keys is not None and values is not None
    return (
        ("KBITS", keys.bits),
        ("VBITS", values.bits),
        ("KAFFINE", keys.book is None),
        ("VAFFINE", values.book is None),
        ("CENTRE", stored.centre is not None),
    )


def _planes(arrays: LayerArrays) -> list[mx.array]:
    """A codebook has no bias: its scale stands in for it."""
    return [plane for planes in (arrays.keys, arrays.values) for plane in (planes[0], planes[1], planes[-1])]


def _numbers(stored: KVLayer) -> list[mx.array]:
    """Constants, centre and RoPE, with anything in the place of what there is not."""
    numbers = _constants(stored.keys, stored.values)
    if stored.centre is None:
        return [numbers, numbers, numbers]
    return [numbers, stored.centre.paired, _rope(stored.centre.rope)]


def encoded_store(arrays: LayerArrays, stored: KVLayer, new: Pair, slots: mx.array, lengths: mx.array) -> mx.array:
    """Like `plain.cuda_store`: `new` keys and values are encoded, for positions `lengths`."""
    heads = arrays.all[0].shape[0]
    constants: Constants = (("H", heads), *_codes(stored))
    out: mx.array = _store_kernel(stored.dtype, constants)(
        inputs=[*_planes(arrays), *(array.astype(stored.dtype) for array in new), slots, lengths, *_numbers(stored)],
        grid=(len(lengths) * 32, heads, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[lengths.shape],
        output_dtypes=[lengths.dtype],
    )[0]
    return out


def encoded_decode(
    queries: mx.array,
    arrays: LayerArrays,
    stored: KVLayer,
    new: tuple[mx.array, mx.array] | None,
    grid: Grid,
    lengths: mx.array,
    reach: tuple[int, int],
    scale: float,
    sinks: mx.array | None,
    own: Counters,
    turns: mx.array | None = None,
) -> mx.array:
    """Like `plain.cuda_decode`, over encoded keys and values; `new` ones are encoded and stored.

    A centred layer needs the `turns.starts` of all positions.
    """
    heads = arrays.all[0].shape[0]
    rows, query_heads = queries.shape[:2]
    shared, dtype = query_heads // heads, stored.dtype
    fit = _tile(stored) // shared
    work = grid.work(Kernel(heads, 4 * fit, 3 * MULTIPROCESSORS, 2 * MULTIPROCESSORS, 4, fit))
    constants: Constants = (
        ("H", heads),
        ("G", shared),
        ("BS", grid.block_size),
        ("SCALE", float(scale)),
        ("WINDOW", reach[0]),
        ("KEEP", reach[1]),
        ("NEW", new is not None),
        ("SINKS", sinks is not None),
        ("TOGETHER", work.shape.together),
        ("SEVERAL", work.shape.several),
        *_codes(stored),
    )
    assert stored.centre is None or turns is not None
    numbers = _numbers(stored)
    new_k, new_v = new if new is not None else (queries, queries)
    inputs = [
        *(queries.astype(dtype), *_planes(arrays), new_k.astype(dtype), new_v.astype(dtype)),
        *(work.table, lengths, *numbers, numbers[0] if turns is None else turns),
    ]
    launch: Any = {"grid": (heads * THREADS, work.shape.pieces, 1), "threadgroup": (THREADS, 1, 1)}
    parts = (work.shape.parts * query_heads * (DIM + 3),)
    shape = (rows, query_heads, 1, DIM)
    if work.shape.together:
        scratch = _parts_kernel(dtype, constants)(
            inputs=inputs, output_shapes=[parts], output_dtypes=[mx.float32], **launch
        )[0]
        out: mx.array = _join_kernel(dtype, constants)(
            inputs=[scratch, work.table, numbers[0], work.table if sinks is None else sinks],
            grid=(rows * DIM, query_heads, 1),
            threadgroup=(DIM, 1, 1),
            output_shapes=[shape],
            output_dtypes=[dtype],
        )[0]
    else:
        counters = own.take(rows * heads)
        out = _kernel(dtype, constants)(
            inputs=[*inputs, counters, counters if sinks is None else sinks],
            output_shapes=[shape, parts],
            output_dtypes=[dtype, mx.float32],
            **launch,
        )[0]
    return out.astype(queries.dtype)
