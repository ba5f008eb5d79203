"""Decode attention over encoded blocks as a CUDA kernel: the bytes are read once, where they lie, and never unpacked to
memory.

Like `plain` (read that first): one thread block per (piece of work, KV head), four warps, 16 tokens at a time through
the tensor cores. What is different:

    queries    are rotated first, by every thread block for itself
    keys       a lane turns the codes it loads into numbers in its registers; what they must be multiplied with and
               moved by is one pair per token, so it is applied to the scores: <q, c * scale + bias> = scale * <q, c> +
               bias * sum(q)
    values     the same: weights are multiplied with the scale, and the sum of weight * bias is added at the end
    new token  is rotated, encoded and stored by the warp that reads its tile, like `Codec.encode` does it
    centres    (`formats.centre`) of 16 tokens are one more product: with a, b the factors of a pair's cosine and sine,
               S its angle at the first of the tokens and s that from there on,
               a cos(S + s) + b sin(S + s) = (a cos S + b sin S) cos s + (b cos S - a sin S) sin s
               the factors are turned by S, which a table has for every 16th position; that of s is the same for all
    output     is unrotated by the thread block that joins a row's parts

Codes of up to 4 bits become numbers by a table of pairs in shared memory, those of 8 bits by conversion. Affine codes
are centred (8 or 128 is taken off and added to the bias), so that rounding weights to T costs as little as it can.
For head dim 128, which is that of nearly all models this is for.
"""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ...device import Kind
from ...formats import Codec
from ...formats.centre import Rope
from ...formats.rotation import rotation
from ...layout import KVLayer
from ...pairs import Grid
from ...pool import LayerArrays
from ..base import Backend, Call
from ..layer import Pair
from .plain import THREADS, zero_counters
from .source import Constants, define, kernel_name, read

DIM = 128


class CudaEncoded(Backend):
    stores = True

    @classmethod
    def supports(cls, layer: KVLayer, block_size: int, device: Kind) -> bool:
        fits = layer.k_dim == layer.v_dim == DIM and block_size % 16 == 0 and layer.dtype in (mx.bfloat16, mx.float16)
        known = layer.keys.codes is not None and layer.values.codes is not None
        return device == "cuda" and fits and known

    def decode(self, call: Call, new: Pair | None) -> mx.array | None:
        step, kv, layer, turns = call.step, self.kv, self.kv.layer, None
        # Rows of a tile, and with centres what fits shared memory.
        most = 16 if layer.centre is None else 8
        reach = step.reach(call.mask)
        if reach is None or call.queries.shape[1] > most * layer.heads:
            return None
        if layer.centre is not None:
            turns = kv.turns.starts(layer.centre.rope, layer.k_dim, step.end)
        return encoded_decode(
            call.queries, kv.arrays, layer, new, step.grid, step.positions, reach, call.scale, call.sinks, turns
        )


@cache
def _kernel(dtype: mx.Dtype, constants: Constants) -> Any:
    names = ["q", "k", "k_scale", "k_bias", "v", "v_scale", "v_bias", "new_k", "new_v"]
    return mx.fast.cuda_kernel(
        name=f"onekv_encoded_{kernel_name(dtype, constants)}",
        input_names=[*names, "work", "lengths", "counters", "sinks", "constants", "centre", "rope", "turns"],
        output_names=["out", "scratch"],
        header=read("mma") + define(dtype, constants) + read("codes"),
        source=read("encoded"),
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
    turns: mx.array | None = None,
) -> mx.array:
    """Like `plain.cuda_decode`, over encoded keys and values; `new` ones are encoded and stored.

    A centred layer needs the `turns.starts` of all positions.
    """
    keys, values = stored.keys.codes, stored.values.codes
    assert keys is not None and values is not None
    heads, slots = arrays.all[0].shape[:2]
    rows, query_heads = queries.shape[:2]
    # Rows that share blocks read them one by one here.
    work = grid.work(heads, 1)
    kernel = _kernel(
        stored.dtype,
        (
            ("H", heads),
            ("G", query_heads // heads),
            ("KBITS", keys.bits),
            ("VBITS", values.bits),
            ("KAFFINE", keys.book is None),
            ("VAFFINE", values.book is None),
            ("BS", grid.block_size),
            ("SLOTS", slots),
            ("SCALE", float(scale)),
            ("WINDOW", reach[0]),
            ("KEEP", reach[1]),
            ("NEW", new is not None),
            ("SINKS", sinks is not None),
            ("CENTRE", stored.centre is not None),
        ),
    )
    new_k, new_v = new if new is not None else (queries, queries)
    counters = zero_counters(rows * heads)
    k, v = arrays.keys, arrays.values
    numbers = _constants(stored.keys, stored.values)
    centred = (numbers, numbers, numbers)
    if stored.centre is not None:
        assert turns is not None
        centred = (stored.centre.paired, _rope(stored.centre.rope), turns)
    out: mx.array = kernel(
        inputs=[
            queries.astype(stored.dtype),
            # A codebook has no bias: its scale stands in for it.
            *(k[0], k[1], k[-1]),
            *(v[0], v[1], v[-1]),
            new_k.astype(stored.dtype),
            new_v.astype(stored.dtype),
            work.table,
            lengths,
            counters,
            counters if sinks is None else sinks,
            numbers,
            *centred,
        ],
        grid=(work.shape.pieces * THREADS, heads, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows, query_heads, 1, DIM), (work.shape.parts * query_heads * (DIM + 3),)],
        output_dtypes=[stored.dtype, mx.float32],
    )[0]
    return out.astype(queries.dtype)
