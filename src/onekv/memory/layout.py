"""What a model keeps per token, read from the model itself.

mlx-lm's own caches are made once and given to one lazy forward pass; nothing is computed, but afterwards they show
every layer's kind, shape and dtype. Layers that keep the same tokens form a group and share their block tables.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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

from ..errors import SettingError, UnsupportedLayerError
from . import hook
from .formats import PLAIN, Codec, KVFormat
from .formats.centre import Centre

# mlx-lm keeps this many first tokens in a cache that is cut by `max_kv_size`.
KEEP = 4


@dataclass(frozen=True)
class Rule:
    """Which positions a query may read: k <= q and (k > q - window or k < keep); no window reads all.

    `chunk` marks llama4's layers: they keep the last `chunk` tokens and the model makes its own mask.
    `ring` marks a cache cut by `max_kv_size`: its blocks are reserved at once and only ever reused by itself.
    """

    window: int | None = None
    keep: int = 0
    chunk: int | None = None
    ring: bool = False

    @property
    def span(self) -> int | None:
        """Tokens a query at position p needs, besides the kept first ones: those from p - span + 1 on."""
        return self.chunk + 1 if self.chunk is not None else self.window

    def first(self, position: int) -> int:
        """The oldest position, besides the kept first ones, that a query at `position` reads."""
        return 0 if self.span is None else max(0, position - self.span + 1)

    def __str__(self) -> str:
        if self.chunk is not None:
            return f"chunks of {self.chunk}"
        if self.window is None:
            return "full attention"
        kept = f", first {self.keep} kept" if self.keep else ""
        return f"{'last' if self.ring else 'window of'} {self.window}{kept}"


@dataclass(frozen=True)
class KVLayer:
    """Keys and values of one layer, per token. `dtype` is the model's own; `format` is how they are stored.

    `centre`, if there is one, is taken off the keys before they are encoded.
    """

    name: str
    heads: int
    k_dim: int
    v_dim: int
    dtype: mx.Dtype
    format: KVFormat = PLAIN
    centre: Centre | None = None

    @property
    def wants_centre(self) -> bool:
        return self.heads > 0 and self.k_dim > 0 and self.format.centred

    @property
    def keys(self) -> Codec:
        return self.format.keys(self.k_dim, self.dtype)

    @property
    def values(self) -> Codec:
        return self.format.values(self.v_dim, self.dtype)

    @property
    def codecs(self) -> str:
        """Names what decides the bytes of a stored token."""
        centre = f"-{self.centre.name}" if self.centre is not None else ""
        return f"{self.keys.name}{centre}/{self.values.name}"

    @property
    def token_bytes(self) -> int:
        return self.heads * (self.keys.token_bytes + self.values.token_bytes)

    @property
    def plain_bytes(self) -> int:
        """Bytes per token as the model has them."""
        return self.heads * (self.k_dim + self.v_dim) * self.dtype.size


@dataclass(frozen=True)
class StateLayer:
    """The recurrent state of one layer, per sequence: the shape (without batch) and dtype of each part."""

    name: str
    parts: tuple[tuple[tuple[int, ...], mx.Dtype] | None, ...]

    @property
    def sequence_bytes(self) -> int:
        sizes = [mx.zeros(part[0], part[1]).nbytes for part in self.parts if part is not None]
        return sum(sizes)


@dataclass(frozen=True)
class Group:
    rule: Rule
    layers: tuple[KVLayer, ...]

    @property
    def token_bytes(self) -> int:
        return sum(layer.token_bytes for layer in self.layers)


@dataclass(frozen=True)
class Leaf:
    """Where one cache of the model's list is kept: a layer of a group, or (group -1) a recurrent layer."""

    group: int
    layer: int


@dataclass(frozen=True)
class Layout:
    groups: tuple[Group, ...]
    states: tuple[StateLayer, ...]
    # One entry per cache the model expects: a leaf, or a tuple of leaves for a composite.
    structure: tuple[Leaf | tuple[Leaf, ...], ...]
    # Tokens the model knows: ids are below this.
    vocabulary: int
    # The most query heads an attention of the model has.
    query_heads: int

    @property
    def sequence_bytes(self) -> int:
        """Bytes of recurrent state of one sequence."""
        return sum(state.sequence_bytes for state in self.states)

    @property
    def codecs(self) -> str:
        """Names everything that decides what a stored token's bytes are."""
        return " ".join(layer.codecs for group in self.groups for layer in group.layers)

    def leaves(self, caches: Sequence[Any]) -> Iterator[tuple[Leaf, Any]]:
        """Where each of a model's caches, or part of a composite, is kept."""
        for entry, cache in zip(self.structure, caches, strict=True):
            if isinstance(entry, tuple):
                yield from zip(entry, cache.caches, strict=True)
            else:
                yield entry, cache

    def build(self, make: Callable[[Leaf], Any]) -> list[Any]:
        """The list of caches the model expects, each leaf made by `make`."""
        return [CacheList(*map(make, entry)) if isinstance(entry, tuple) else make(entry) for entry in self.structure]


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


def encoded(layout: Layout, format: KVFormat, plain_layers: int) -> Layout:
    """`layout` with its keys and values stored in `format`, but for the first and the last `plain_layers` layers.

    Recurrent states stay as they are. Raises UnsupportedLayerError for head dims that the format cannot store.
    """
    numbers = sorted({_number(layer) for group in layout.groups for layer in group.layers})
    kept = {*numbers[:plain_layers], *numbers[len(numbers) - plain_layers :]}
    groups = tuple(
        replace(
            group,
            layers=tuple(
                layer if _number(layer) in kept or not layer.heads else replace(layer, format=format)
                for layer in group.layers
            ),
        )
        for group in layout.groups
    )
    stored = replace(layout, groups=groups)
    # Makes every codec: what cannot be stored is refused here, before anything is allocated.
    _ = stored.codecs
    return stored


def _number(layer: KVLayer) -> int:
    """Which layer of the model it belongs to."""
    return int(layer.name.split()[1].split(".")[0])


def stock_caches(model: Module) -> list[Any]:
    """mlx-lm's own caches for `model`: they say what each layer keeps.

    Also where `onekv.mlx_lm.install` has put others in their place: those know which ones they stand for.
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
        # A model with an attention of its own does not say; eight query heads per KV head are many.
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
            f"{name} keeps its state in a {type(cache).__name__}, which OneKV cannot hold; "
            "supported are KVCache, RotatingKVCache, ChunkedKVCache, ArraysCache and lists of them"
        )
