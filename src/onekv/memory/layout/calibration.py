"""Finds the centres of a model's keys (`formats.centre`): one pass over a short text, with mlx-lm's own caches.

While the model runs, `mx.fast.rope` is watched. Keys that a layer stores and that such a call has returned have the
mean of what the call was given, and are turned like it; other keys have the mean of what is stored.

The text is short and of several kinds. It is not looked at again: whoever gives the same tokens to the same model gets
the same centres, but for rounding, which moves what is put back as little as it moves everything else.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from typing import Any

import mlx.core as mx
import xxhash
from mlx.nn.layers.base import Module

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
    found = _Watch(wanted)
    with found.watching(), _watched(layout, model, found) as caches:
        model(mx.array(list(tokens))[None], cache=caches)
    mx.eval([mean for mean, _ in found.means.values()])
    name = xxhash.xxh3_64_hexdigest(repr(list(tokens)).encode())

    def centre(leaf: Leaf, layer: KVLayer) -> KVLayer:
        return replace(layer, centre=Centre(*found.means[leaf], name)) if leaf in found.means else layer

    groups = tuple(
        replace(group, layers=tuple(centre(Leaf(g, i), layer) for i, layer in enumerate(group.layers)))
        for g, group in enumerate(layout.groups)
    )
    return replace(layout, groups=groups)


class _Watch:
    def __init__(self, wanted: set[Leaf]) -> None:
        self._wanted = wanted
        self.means: dict[Leaf, tuple[mx.array, Rope]] = {}
        # What rope has returned since keys were last stored, what it was given, and how it was called.
        self._turned: list[tuple[mx.array, mx.array, dict[str, Any]]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        rope: Callable[..., mx.array] = mx.fast.rope

        def watched(a: mx.array, dims: int, **how: Any) -> mx.array:
            out = rope(a, dims, **how)
            self._turned.append((out, a, {"dims": dims, **how}))
            return out

        mx.fast.rope = watched
        try:
            yield
        finally:
            mx.fast.rope = rope

    def store(self, leaf: Leaf, keys: mx.array) -> None:
        """`keys` [1, heads, tokens, dim] are stored."""
        if leaf in self._wanted:
            rows, rope = keys, Rope()
            for out, given, how in self._turned:
                if out is keys and isinstance(how["offset"], int):
                    rows, rope = given, _rope(how)
            self.means[leaf] = (rows[0, :, 1:].astype(mx.float32).mean(axis=1), rope)
        self._turned.clear()


def _rope(how: dict[str, Any]) -> Rope:
    freqs = how.get("freqs")
    return Rope(
        how["dims"],
        how["traditional"],
        how["base"],
        how["scale"],
        tuple(freqs.tolist()) if freqs is not None else None,
    )


@contextmanager
def _watched(layout: Layout, model: Module, found: _Watch) -> Iterator[list[Any]]:
    """mlx-lm's caches for `model`, which tell `found` what they store."""
    caches = stock_caches(model)
    telling: list[Any] = []
    for leaf, cache in layout.leaves(caches):
        if leaf.group >= 0:
            cache.update_and_fetch = _telling(cache.update_and_fetch, leaf, found)
            telling.append(cache)
    try:
        yield caches
    finally:
        # A cache that refers to itself would live until the next collection.
        for cache in telling:
            del cache.update_and_fetch


def _telling(update: Callable[..., Any], leaf: Leaf, found: _Watch) -> Callable[..., Any]:
    def update_and_fetch(keys: mx.array, values: mx.array, *rest: Any) -> Any:
        found.store(leaf, keys)
        return update(keys, values, *rest)

    return update_and_fetch
