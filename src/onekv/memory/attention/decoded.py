"""MLX's own attention, if no other backend can read the pool in place: over encoded rows that are dequantized one layer
at a time, and over plain ones as in mlx-lm.
"""

import mlx.core as mx

from ..device import Kind
from ..hook import stock_attention
from ..layout import KVLayer
from .base import Backend, Call
from .layer import Pair, gather


class Decoded(Backend):
    """For whatever a codec stores: all slots of the step's blocks, in the basis of the codec."""

    @classmethod
    def supports(cls, layer: KVLayer, block_size: int, device: Kind) -> bool:
        return not layer.plain

    def decode(self, call: Call, new: Pair | None) -> mx.array:
        step, kv, dtype = call.step, self.kv, self.kv.layer.dtype
        keys = kv.keys.decode([gather(step, array, cut=False) for array in kv.arrays.keys], dtype)
        values = kv.values.decode([gather(step, array, cut=False) for array in kv.arrays.values], dtype)
        bias = step.row_bias(call.mask)[:, None, None]
        if (added := kv.centre_scores(step, call.queries, call.scale)) is not None:
            bias = bias + added[:, :, None]
        queries, bias = kv.keys.rotate(call.queries), bias.astype(dtype)
        out = stock_attention(queries, keys, values, None, scale=call.scale, mask=bias, sinks=call.sinks)
        return kv.values.unrotate(out)


class Stock(Backend):
    """For all layers: a decode step is left to the model's own attention."""

    @classmethod
    def supports(cls, layer: KVLayer, block_size: int, device: Kind) -> bool:
        return True

    def decode(self, call: Call, new: Pair | None) -> None:
        return None
