"""What a model keeps per token: immutable, the same for all parts of memory.

Layers that keep the same tokens form a group and share their block tables.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from ..formats import PLAIN, Codec, KVFormat
from ..formats.centre import Centre


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
    def plain(self) -> bool:
        """Whether keys and values are stored as the model has them."""
        return self.keys.plain and self.values.plain

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

    @cached_property
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
