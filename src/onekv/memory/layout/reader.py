"""Reads the layout of a model from the model itself.

mlx-lm's own caches are created once and passed to one lazy forward pass; nothing is computed, but afterwards they have
every layer's kind, shape and dtype.
"""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
)

from ...errors import SettingError, UnsupportedLayerError
from .. import hook
from .types import Group, KVLayer, Layout, Leaf, Rule, StateLayer

# mlx-lm keeps this many first tokens in a cache that is cut by `max_kv_size`.
KEEP = 4


def read_layout(model: Module, max_kv_size: int | None = None) -> Layout:
    """The layout of `model`; with `max_kv_size` its full-attention layers keep only that many tokens."""
    if max_kv_size is not None and max_kv_size <= KEEP:
        raise SettingError(
            f"--max-kv-size is {max_kv_size}; it must be more than {KEEP}, the first tokens that are always kept"
        )
    caches = stock_caches(model)
    hook.install(model)
    with hook.watch() as heads:
        logits = model(mx.zeros((1, 2), mx.int32), cache=caches)
    return _Reader(max_kv_size).read(caches, logits.shape[-1], heads)


def stock_caches(model: Module) -> list[Any]:
    """mlx-lm's own caches for `model`: they say what each layer keeps.

    Even where `onekv.mlx_lm.install` has put others in their place: those know which ones they stand for.
    """
    made = model.make_cache() if hasattr(model, "make_cache") else [KVCache() for _ in model.layers]
    return [_stock(cache) for cache in made]


def _stock(cache: Any) -> Any:
    if type(cache) is CacheList:
        return CacheList(*map(_stock, cache.caches))
    return cache.stock() if hasattr(cache, "stock") else cache


class _Reader:
    """Sorts mlx-lm's caches, which one forward has filled, into groups."""

    def __init__(self, max_kv_size: int | None) -> None:
        self.max_kv_size = max_kv_size
        self.groups: dict[Rule, list[KVLayer]] = {}
        self.states: list[StateLayer] = []

    def read(self, caches: list[Any], vocabulary: int, query_heads: list[int]) -> Layout:
        structure: list[Leaf | tuple[Leaf, ...]] = []
        for index, cache in enumerate(caches):
            name = f"layer {index}"
            if type(cache) is CacheList:
                parts = enumerate(cache.caches)
                structure.append(tuple(self._leaf(f"{name}.{i}", part) for i, part in parts))
            else:
                structure.append(self._leaf(name, cache))
        groups = tuple(Group(rule, tuple(layers)) for rule, layers in self.groups.items())
        # Unknown for a model with its own attention; eight query heads per KV head is a high estimate.
        most = max((8 * layer.heads for group in groups for layer in group.layers), default=1)
        heads = max(query_heads, default=most)
        return Layout(groups, tuple(self.states), tuple(structure), vocabulary, heads)

    def _leaf(self, name: str, cache: Any) -> Leaf:
        if type(cache) is ArraysCache:
            parts = tuple(None if a is None else (a.shape[1:], a.dtype) for a in cache.cache)
            self.states.append(StateLayer(name, parts))
            return Leaf(-1, len(self.states) - 1)
        layers = self.groups.setdefault(self._rule(name, cache), [])
        if cache.keys is None:
            # A cache the model makes but never fills costs nothing.
            layers.append(KVLayer(name, 0, 0, 0, mx.float32))
        else:
            heads, k_dim = cache.keys.shape[1], cache.keys.shape[3]
            layers.append(KVLayer(name, heads, k_dim, cache.values.shape[3], cache.keys.dtype))
        return Leaf(list(self.groups).index(self._rule(name, cache)), len(layers) - 1)

    def _rule(self, name: str, cache: Any) -> Rule:
        if type(cache) is KVCache:
            if self.max_kv_size is not None:
                return Rule(window=self.max_kv_size - KEEP, keep=KEEP, ring=True)
            return Rule()
        if type(cache) is RotatingKVCache:
            return Rule(window=cache.max_size - cache.keep, keep=cache.keep)
        if type(cache) is ChunkedKVCache:
            return Rule(chunk=cache.chunk_size)
        raise UnsupportedLayerError(
            f"{name} keeps its state in a {type(cache).__name__}, which OneKV does not support; "
            "supported are KVCache, RotatingKVCache, ChunkedKVCache, ArraysCache and lists of them"
        )
