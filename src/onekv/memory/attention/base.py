"""The contract of an attention backend: how one layer attends over the pool.

When a model is loaded, every layer gets the backends that support its storage format on this device, in the order of
the list (`attention.backends`), one object each. A decode step tries them in that order; one that cannot handle the
call returns None, and the next is tried. If none of them can, mlx-lm's own attention runs over what is read.

A backend owns only what it derives at load: the layer's arrays belong to `LayerKV`, and references to them must not
outlive the call, or the next write copies the pool. Backends that are `eager` read and write the pool's memory while
the model is called, the others when the step is evaluated.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import mlx.core as mx

from ..device import Kind
from ..hook import Mask, stock_attention
from ..layout import KVLayer, Rule
from ..step import GroupStep
from .chunk import chunk_attention
from .layer import LayerKV, Pair


class Call(NamedTuple):
    """One attention call of a model, whose mask says no more than the step knows by itself (`GroupStep.owns`).

    Queries are [rows, query heads, tokens, dim]; so are outputs, with the values' dim. `sinks` [query heads] are scores
    of nothing.
    """

    step: GroupStep
    queries: mx.array
    scale: float
    mask: Mask
    sinks: mx.array | None


class Backend(ABC):
    # Whether it uses OneKV's own kernels or loops, which `--kernels off` leaves out.
    kernel: ClassVar[bool] = False
    # Whether decode steps compute this layer while the model is called, not when the step is evaluated.
    eager: ClassVar[bool] = False
    # Whether `decode` stores the step's tokens; if not, they are stored before it is called.
    stores: ClassVar[bool] = False
    # Whether it does so even where rows are tokens of one sequence (`GroupStep.repeated`), before the first row reads.
    stores_several: ClassVar[bool] = False

    def __init__(self, kv: LayerKV) -> None:
        self.kv = kv

    @classmethod
    @abstractmethod
    def supports(cls, layer: KVLayer, block_size: int, device: Kind) -> bool:
        """Whether it can attend over a layer that is stored like this, in blocks of this size."""

    @classmethod
    def why_not(cls, layer: KVLayer, block_size: int, rule: Rule, query_heads: int) -> str | None:
        """Why it is not used for a layer that it supports; None if it is.

        Called when a model is loaded, for backends that have to prove themselves on the device. `query_heads` is the
        largest number of query heads in the model.
        """
        return None

    @abstractmethod
    def decode(self, call: Call, new: Pair | None) -> mx.array | None:
        """Attention of one query token per row over all that its row reads; None, and nothing done, if it cannot.

        `new` are the keys and values [rows, heads, 1, dim] of that token where they are still to be stored. Rules with
        chunks do not come here.
        """

    def stores_in(self, step: GroupStep) -> bool:
        """Whether `decode` stores the tokens of this step."""
        return self.stores_several if step.repeated else self.stores

    def chunk(self, call: Call, fetched: Pair) -> mx.array:
        """Attention of a piece of a prompt; `fetched` is what the step reads as the model would have stored it."""
        kv, step = self.kv, call.step
        keys, values = fetched if kv.layer.plain else kv.read(step)
        queries = kv.keys.rotate(call.queries)
        ours = kv.device == "cpu" and call.sinks is None and step.alone
        if ours and queries.dtype == keys.dtype == mx.float32:
            out = chunk_attention(queries, keys, values, call.scale, call.mask, kv.kernels)
        else:
            out = stock_attention(queries, keys, values, None, scale=call.scale, mask=call.mask, sinks=call.sinks)
        return kv.values.unrotate(out)
