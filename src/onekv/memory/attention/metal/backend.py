"""The backend for Metal: used if a trial on this device says so."""

import mlx.core as mx

from ...device import Kind
from ...layout import KVLayer, Rule
from ..base import Backend, Call
from ..layer import Pair
from .language import KINDS
from .plain import attend, most_queries
from .trial import Shape, in_child, why_not

WIDEST = 256


class MetalPlain(Backend):
    kernel = True
    stores = stores_several = True

    @classmethod
    def supports(cls, layer: KVLayer, block_size: int, device: Kind) -> bool:
        fits = all(0 < dim <= WIDEST and dim % 8 == 0 for dim in (layer.k_dim, layer.v_dim))
        return device == "metal" and layer.plain and layer.heads > 0 and fits and layer.dtype in KINDS

    @classmethod
    def why_not(cls, layer: KVLayer, block_size: int, rule: Rule, query_heads: int) -> str | None:
        shape = Shape.of(layer, block_size, rule, query_heads)
        if shape.shared > most_queries(shape.k_dim):
            return f"{shape.shared} query heads share a KV head, more than the Metal kernel has room for"
        return why_not(in_child(shape, "metal"))

    def decode(self, call: Call, new: Pair | None) -> mx.array | None:
        return attend(self.kv, call, new)
