"""Lets a model's own attention calls reach the pool, without touching the model.

mlx-lm's model files import the name `scaled_dot_product_attention` from `mlx_lm.models.base`. In the modules of the
loaded model's layers, that name is replaced, once, by a function that asks our layer first and otherwise calls the
original.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import base

NAME = "scaled_dot_product_attention"
Mask = mx.array | str | None

stock_attention: Callable[..., mx.array] = base.scaled_dot_product_attention
# The modules whose models OneKV's engine runs: there the name stays replaced.
hooked: set[str] = set()


class _Watched(threading.local):
    # Query heads of the calls of this thread since it began to watch, if it does: others load models meanwhile.
    heads: list[int] | None = None


_watched = _Watched()


class Attends:
    """A cache that can do the attention itself."""

    # What `update_and_fetch` returned last.
    _fetched: tuple[mx.array, mx.array] | None = None

    def _is_fetched(self, keys: mx.array, values: mx.array) -> bool:
        """Whether the attention is over what `update_and_fetch` returned, and not over something made from it."""
        return self._fetched is not None and keys is self._fetched[0] and values is self._fetched[1]

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Mask,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """The attention's output, or None where the stock attention must do it."""
        raise NotImplementedError


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: object,
    scale: float,
    mask: Mask,
    sinks: mx.array | None = None,
) -> mx.array:
    if _watched.heads is not None:
        _watched.heads.append(queries.shape[1])
    if isinstance(cache, Attends):
        out = cache.attend(queries, keys, values, scale, mask, sinks)
        if out is not None:
            return out
    return stock_attention(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)


def install(model: Module) -> None:
    """Replace the name in every module that defines a part of `model`."""
    for name in {type(part).__module__ for part in model.modules()}:
        if getattr(sys.modules[name], NAME, None) in (stock_attention, attention):
            setattr(sys.modules[name], NAME, attention)
            hooked.add(name)


@contextmanager
def watch() -> Iterator[list[int]]:
    """Collects the number of query heads of every attention call that this thread makes inside."""
    assert _watched.heads is None, "one at a time"
    heads: list[int] = []
    _watched.heads = heads
    try:
        yield heads
    finally:
        _watched.heads = None
