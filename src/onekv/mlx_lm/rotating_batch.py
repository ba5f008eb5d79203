"""The rotating cache of a batch, in a ring that is allocated once for the current rows.

Rows are padded on the left, as in mlx-lm. When rows join or leave, a new ring is allocated, again of `max_size`
columns; between such changes the ring stays the same. See `rotating` for the columns and for ownership of the arrays.

A prompt that is shorter than others of its batch is padded on the right (`prepare`). The padding is moved to the left
as soon as the prompt is stored, because in a full ring it would push out tokens that are still needed.
"""

from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import BatchRotatingKVCache as StockBatchRotating

from .rotating import RotatingKVCache, filled, in_order, join, newest, put, ring_like
from .slabs import KV, own


class BatchRotatingKVCache(StockBatchRotating):  # type: ignore[misc]
    """mlx-lm's BatchRotatingKVCache in a ring that is allocated once."""

    keys: mx.array | None
    values: mx.array | None
    offset: mx.array
    left_padding: mx.array
    max_size: int
    rotated: bool
    _idx: int
    _offset: int
    # Where each row's prompt ends, while rows are padded on the right.
    _lengths: mx.array | None = None
    _fetched: KV | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KV:
        self._fetched = None
        if keys.shape[2] == 1:
            return self._update_one(keys, values)
        empty = self.keys is None
        self._make_ring(keys, values)
        if self._idx + keys.shape[2] <= self.max_size and not self.rotated and self._lengths is None:
            return self._append(keys, values)
        return self._update_chunk(keys, values, empty)

    def _update_one(self, keys: mx.array, values: mx.array) -> KV:
        if self._lengths is not None:
            raise RuntimeError("finalize() must be called before the first token is generated")
        self._make_ring(keys, values)
        if self._idx >= self.max_size:
            self.rotated, self._idx = True, 0
        if self.rotated:
            self.left_padding = self.left_padding - 1
        return self._append(keys, values)

    def _append(self, keys: mx.array, values: mx.array) -> KV:
        put(cast(mx.array, self.keys), keys, self._idx)
        put(cast(mx.array, self.values), values, self._idx)
        self._advance(keys.shape[2])
        self._idx += keys.shape[2]
        return self.keys_and_values()

    def _update_chunk(self, keys: mx.array, values: mx.array, empty: bool) -> KV:
        """A chunk that is joined with what is held before the oldest columns give way."""
        if not empty:
            self._to_order()
            excess = self._idx - self.max_size + 1
            if excess > 0:
                self.left_padding = self.left_padding - excess
            keys = join([*newest(cast(mx.array, self.keys)[..., : self._idx, :], self.max_size - 1, 0), keys])
            values = join([*newest(cast(mx.array, self.values)[..., : self._idx, :], self.max_size - 1, 0), values])
            self._advance(keys.shape[2] - min(self._idx, self.max_size - 1))
        else:
            self._advance(keys.shape[2])
        self._fetched = (keys, values)
        if self._lengths is not None:
            roll = mx.maximum(0, self.offset - self._lengths)
            keys, values = turned(keys, roll), turned(values, roll)
            self._pad(roll)
        excess = keys.shape[2] - self.max_size
        if excess > 0:
            self.left_padding = self.left_padding - excess
        self.keys = filled(newest(keys, self.max_size, 0), cast(mx.array, self.keys))
        self.values = filled(newest(values, self.max_size, 0), cast(mx.array, self.values))
        self._idx = min(keys.shape[2], self.max_size)
        self._tie()
        return self._fetched

    def _advance(self, count: int) -> None:
        self.offset = self.offset + count
        self._offset += count
        self._tie()

    def _pad(self, columns: mx.array) -> None:
        self.left_padding = self.left_padding + columns
        self.offset = self.offset - columns

    def _tie(self) -> None:
        """Evaluates the counts with the ring: else their graph would grow by a node with every token."""
        self.keys = mx.depends(cast(mx.array, self.keys), [self.left_padding, self.offset])

    def _make_ring(self, keys: mx.array, values: mx.array) -> None:
        if self.keys is None or self.values is None:
            self.keys, self.values = ring_like(keys, self.max_size), ring_like(values, self.max_size)
            self._idx = 0
        elif self.keys.shape[2] != self.max_size:
            self._to_order()
            excess = self._idx - self.max_size
            parts = [newest(array[..., : self._idx, :], self.max_size, 0) for array in (self.keys, self.values)]
            if excess > 0:
                self.left_padding = self.left_padding - excess
            self._idx = min(self._idx, self.max_size)
            self.keys = filled(parts[0], ring_like(self.keys, self.max_size))
            self.values = filled(parts[1], ring_like(self.values, self.max_size))

    def _to_order(self) -> None:
        """The oldest column first."""
        if self.rotated:
            keys, values = cast(mx.array, self.keys), cast(mx.array, self.values)
            size = keys.shape[2]
            self.keys = join(in_order(keys, self._idx, 0, True))
            self.values = join(in_order(values, self._idx, 0, True))
            self._idx, self.rotated = size, False

    _temporal_order = _to_order

    def keys_and_values(self) -> KV:
        if self._fetched is not None:
            return self._fetched
        keys, values = cast(mx.array, self.keys), cast(mx.array, self.values)
        used = min(self._offset, keys.shape[2])
        return keys[..., :used, :], values[..., :used, :]

    def finalize(self) -> None:
        """Rows that were padded on the right have been turned when their chunk was stored."""
        self._lengths = None

    @property
    def state(self) -> tuple[Any, ...]:
        self._fetched = None
        keys, values = self.keys, self.values
        if keys is not None and values is not None and self._offset < keys.shape[2]:
            keys, values = keys[..., : self._offset, :], values[..., : self._offset, :]
        counts = (self.offset, self.left_padding, self.max_size, self._offset, self._idx, self.rotated)
        return keys, values, *counts

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.keys, self.values, self.offset, self.left_padding, *rest = state
        self.max_size, self._offset, self._idx, self.rotated = rest

    def filter(self, batch_indices: Any) -> None:
        self._fetched = None
        kept: list[int] = np.array(batch_indices).tolist()
        if kept == list(range(self.offset.shape[0])):
            return
        rows = mx.array(kept, mx.int32)
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]
        self.offset, self.left_padding = self.offset[rows], self.left_padding[rows]

    def extend(self, other: "BatchRotatingKVCache") -> None:
        self._fetched = other._fetched = None
        some = next((cache for cache in (self, other) if cache.keys is not None), None)
        if some is not None:
            for cache in (self, other):
                if cache.keys is not None and cache.values is not None:
                    cache._make_ring(cache.keys, cache.values)
            if self.rotated != other.rotated or self._idx != other._idx:
                self._to_order()
                other._to_order()
            idx = max(self._idx, other._idx)
            padding = [cache.left_padding + (idx - cache._idx) for cache in (self, other)]
            self.keys, self.values = self._stack(other, some, "keys", idx), self._stack(other, some, "values", idx)
            self._idx = idx
            self._offset = max(self._offset, other._offset)
        else:
            padding = [self.left_padding, other.left_padding]
        self.left_padding = mx.concatenate(padding)
        self.offset = mx.concatenate([self.offset, other.offset])

    def _stack(self, other: "BatchRotatingKVCache", some: "BatchRotatingKVCache", name: str, idx: int) -> mx.array:
        """The rows of both in a new ring, each moved so that its newest column is at the same place."""
        like: mx.array = getattr(some, name)
        counts = [self.offset.shape[0], other.offset.shape[0]]
        # A turned ring is used whole, whatever its index.
        full = self.rotated and self._idx == other._idx
        ring = mx.zeros((sum(counts), like.shape[1], self.max_size, like.shape[3]), like.dtype)
        for cache, first in ((self, 0), (other, counts[0])):
            held: mx.array | None = getattr(cache, name)
            if held is None:
                continue
            used = held if full else held[..., : cache._idx, :]
            at = 0 if full else idx - cache._idx
            ring[first : first + used.shape[0], :, at : at + used.shape[2]] = used
        return ring

    def extract(self, idx: int) -> RotatingKVCache:
        cache = RotatingKVCache(self.max_size)
        keys, values = cast(mx.array, self.keys), cast(mx.array, self.values)
        mx.eval(self.left_padding, self.offset)
        padding = max(0, cast(list[int], self.left_padding.tolist())[idx])
        row = slice(idx, idx + 1)
        for name, array in (("keys", keys), ("values", values)):
            ordered = join(in_order(array[row], self._idx, 0, self.rotated))
            setattr(cache, name, own(ordered[:, :, padding:]))
        cache.offset = cast(list[int], self.offset.tolist())[idx]
        cache._idx = cast(mx.array, cache.keys).shape[2]
        return cache

    @classmethod
    def merge(cls, caches: list[Any]) -> "BatchRotatingKVCache":
        size = caches[0].max_size
        if any(cache.max_size != size for cache in caches):
            raise ValueError("BatchRotatingKVCache can only merge caches with the same maximum size")
        lengths = [cache.size() for cache in caches]
        longest = max(lengths)
        merged = cls(size, [longest - length for length in lengths])
        if longest:
            some = next(cache for cache in caches if cache.keys is not None)
            merged.keys = _gathered([(c.keys, c) for c in caches], some.keys, longest)
            merged.values = _gathered([(c.values, c) for c in caches], some.values, longest)
            merged.offset = mx.array([cache.offset for cache in caches])
            merged._idx = merged._offset = longest
        return merged


def _gathered(rows: list[tuple[mx.array | None, Any]], like: mx.array, longest: int) -> mx.array:
    ring = mx.zeros((len(rows), like.shape[1], rows[0][1].max_size, like.shape[3]), like.dtype)
    for row, (array, cache) in enumerate(rows):
        if array is not None and cache.size():
            ring[row : row + 1, :, longest - cache.size() : longest] = cache._temporal_order(array)[
                ..., -cache.size() :, :
            ]
    return ring


def turned(array: mx.array, columns: mx.array) -> mx.array:
    """Each row turned to the right by its number of `columns`."""
    size = array.shape[2]
    index = (mx.arange(size)[None] - columns[:, None]) % size
    return mx.take_along_axis(array, index[:, None, :, None], axis=2)
