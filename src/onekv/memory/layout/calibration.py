"""Finds the centres of a model's keys (`formats.centre`): one pass over a short text, with mlx-lm's own caches.

While the model runs, calls of `mx.fast.rope` are recorded (`traces`). If the keys that a layer stores are the result of
such a call, their centre is the mean of the call's input, rotated in the same way; otherwise it is the mean of what is
stored.

The text is short and of several kinds, and is read only once: the same tokens and the same model give the same centres,
except for rounding, which changes what is added back as little as everything else.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from typing import Any

import mlx.core as mx
import xxhash
from mlx.nn.layers.base import Module

from ...models.freed import freed
from ...traces import Notes, Turned, watching
from ..formats.centre import Centre, Rope
from .reader import stock_caches
from .types import KVLayer, Layout, Leaf

# Tokens of the text that are read.
LENGTH = 384


def calibration_tokens(tokenizer: Any) -> list[int]:
    text = files(__package__).joinpath("calibration.txt").read_text(encoding="utf-8")
    return list(tokenizer.encode(text)[:LENGTH])


def centred(layout: Layout, model: Module, tokens: Sequence[int]) -> Layout:
    """`layout` with the centres of all layers whose format wants them, as `tokens` show them."""
    wanted = {
        Leaf(g, i)
        for g, group in enumerate(layout.groups)
        for i, layer in enumerate(group.layers)
        if layer.wants_centre
    }
    if not wanted or len(tokens) < 2:
        return layout
    # A pass allocates what it needs without asking.
    freed.release()
    with watching() as notes:
        means = _Means(wanted, notes)
        with _watched(layout, model, means) as caches:
            model(mx.array(list(tokens))[None], cache=caches)
    found = means.by_leaf
    mx.eval([mean for mean, _ in found.values()])
    name = xxhash.xxh3_64_hexdigest(repr(list(tokens)).encode())

    def centre(leaf: Leaf, layer: KVLayer) -> KVLayer:
        return replace(layer, centre=Centre(*found[leaf], name)) if leaf in found else layer

    groups = tuple(
        replace(group, layers=tuple(centre(Leaf(g, i), layer) for i, layer in enumerate(group.layers)))
        for g, group in enumerate(layout.groups)
    )
    return replace(layout, groups=groups)


class _Means:
    def __init__(self, wanted: set[Leaf], notes: Notes) -> None:
        self._wanted, self._notes = wanted, notes
        self.by_leaf: dict[Leaf, tuple[mx.array, Rope]] = {}

    def store(self, leaf: Leaf, keys: mx.array) -> None:
        """`keys` [1, heads, tokens, dim] are stored."""
        if leaf in self._wanted:
            rows, rope = keys, Rope()
            turned = self._notes.turned(keys)
            if turned is not None and isinstance(turned.how["offset"], int):
                rows, rope = turned.x, _rope(turned)
            self.by_leaf[leaf] = (rows[0, :, 1:].astype(mx.float32).mean(axis=1), rope)
        # What was noted of this layer would be held until the last one is computed.
        self._notes.clear()


def _rope(turned: Turned) -> Rope:
    how = turned.how
    freqs = how.get("freqs")
    return Rope(
        turned.dims,
        how["traditional"],
        how["base"],
        how["scale"],
        tuple(freqs.tolist()) if freqs is not None else None,
    )


@contextmanager
def _watched(layout: Layout, model: Module, means: _Means) -> Iterator[list[Any]]:
    """mlx-lm's caches for `model`, which tell `means` what they store."""
    caches = stock_caches(model)
    telling: list[Any] = []
    for leaf, cache in layout.leaves(caches):
        if leaf.group >= 0:
            cache.update_and_fetch = _telling(cache.update_and_fetch, leaf, means)
            telling.append(cache)
    try:
        yield caches
    finally:
        # A cache that refers to itself would live until the next collection.
        for cache in telling:
            del cache.update_and_fetch


def _telling(update: Callable[..., Any], leaf: Leaf, means: _Means) -> Callable[..., Any]:
    def update_and_fetch(keys: mx.array, values: mx.array, *rest: Any) -> Any:
        means.store(leaf, keys)
        return update(keys, values, *rest)

    return update_and_fetch
