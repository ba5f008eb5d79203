"""Rotating caches that allocate their whole ring once.

The cache owns one array for keys and one for values, `[rows, heads, max_size, dim]`, allocated by the first update. No
other reference to them is kept, so that writes happen in place. Columns are used as in mlx-lm, so that masks and
results are the same:

    not full   | 0 .. _idx: tokens in order | free |
    full       | keep | newest .. _idx | oldest .. max_size |       _idx is where the next token goes

Data from a prompt-cache file, `state` or `extract` may have any number of columns; the next update moves it into a
ring. A chunk that does not fit into the free columns is concatenated with the kept ones, only for its own attention.
"""

from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache as StockRotating

from .slabs import KV


def join(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def in_order(array: mx.array, idx: int, keep: int, turned: bool) -> list[mx.array]:
    """Views of the columns of a ring, oldest first."""
    ranges = [(0, keep), (idx, array.shape[2]), (keep, idx)] if turned else [(0, idx)]
    views = [array[..., start:end, :] for start, end in ranges]
    return [view for view in views if view.shape[2]] or [array[..., :0, :]]


def newest(array: mx.array, size: int, keep: int) -> list[mx.array]:
    """The first `keep` columns and the last of the others, `size` in total; everything if that is less."""
    excess = array.shape[2] - size
    if excess <= 0:
        return [array]
    return [array[..., :keep, :], array[..., keep + excess :, :]] if keep else [array[..., excess:, :]]


def put(ring: mx.array, columns: mx.array, at: int) -> mx.array:
    """Writes `columns` into `ring` from column `at`, in place once evaluated."""
    size = columns.shape[2]
    if size == ring.shape[2]:
        # An assignment to the whole array would replace it, by a view of whatever `columns` is a part of.
        ring[..., :1, :] = columns[..., :1, :]
        ring[..., 1:, :] = columns[..., 1:, :]
    else:
        ring[..., at : at + size, :] = columns
    return ring


def ring_like(part: mx.array, size: int) -> mx.array:
    return mx.zeros((*part.shape[:2], size, part.shape[3]), part.dtype)


def filled(parts: list[mx.array], ring: mx.array) -> mx.array:
    """`ring` with `parts` one after the other from its first column."""
    at = 0
    for part in parts:
        put(ring, part, at)
        at += part.shape[2]
    return ring


class RotatingKVCache(StockRotating):  # type: ignore[misc]
    """mlx-lm's RotatingKVCache in a ring that is allocated once."""

    keys: mx.array | None
    values: mx.array | None
    offset: int
    max_size: int
    keep: int
    _idx: int
    # What a chunk that did not fit reads, for layers that share it; gone with the next update.
    _fetched: KV | None = None

    def stock(self) -> StockRotating:
        """An empty cache of mlx-lm's own that keeps the same."""
        return StockRotating(max_size=self.max_size, keep=self.keep)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KV:
        self._fetched = None
        count = keys.shape[2]
        empty = self.keys is None
        self._make_ring(keys, values)
        if count == 1 or (self._idx + count <= self.max_size and not self._turned):
            if self._idx >= self.max_size:
                self._idx = self.keep
            put(cast(mx.array, self.keys), keys, self._idx)
            put(cast(mx.array, self.values), values, self._idx)
            self._idx += count
            self.offset += count
            return self.keys_and_values()
        if empty:
            self._fetched = (keys, values)
        else:
            self._fetched = (self._joined(self.keys, keys), self._joined(self.values, values))
        self.keys = filled(newest(self._fetched[0], self.max_size, self.keep), cast(mx.array, self.keys))
        self.values = filled(newest(self._fetched[1], self.max_size, self.keep), cast(mx.array, self.values))
        self._idx = self.max_size
        self.offset += count
        return self._fetched

    @property
    def _turned(self) -> bool:
        """Whether the oldest column is not the first any more."""
        return self._idx < min(self.offset, self.max_size)

    def _make_ring(self, keys: mx.array, values: mx.array) -> None:
        """The ring, with what is held in it in the order of time."""
        if self.keys is None or self.values is None:
            self.keys, self.values = ring_like(keys, self.max_size), ring_like(values, self.max_size)
            self._idx = 0
        elif self.keys.shape[2] != self.max_size:
            parts = [newest(self._ordered(array), self.max_size, self.keep) for array in (self.keys, self.values)]
            self._idx = sum(part.shape[2] for part in parts[0])
            self.keys = filled(parts[0], ring_like(self.keys, self.max_size))
            self.values = filled(parts[1], ring_like(self.values, self.max_size))

    def _ordered(self, array: mx.array) -> mx.array:
        turned = self._idx != array.shape[2] and self._idx < self.offset
        return join(in_order(array, self._idx, self.keep, turned))

    _temporal_order = _ordered

    def _joined(self, held: mx.array | None, new: mx.array) -> mx.array:
        """What a chunk reads: all that its first token may see of what is held, and itself."""
        ordered = self._ordered(cast(mx.array, held))
        return join([*newest(ordered, self.max_size - 1, self.keep), new])

    def keys_and_values(self) -> KV:
        if self._fetched is not None:
            return self._fetched
        keys, values = cast(mx.array, self.keys), cast(mx.array, self.values)
        used = min(self.offset, keys.shape[2])
        return keys[..., :used, :], values[..., :used, :]

    @property
    def state(self) -> tuple[Any, ...]:
        # Free columns need not be stored. The columns that a chunk reads are not part of the state.
        self._fetched = None
        keys, values = self.keys, self.values
        if keys is not None and values is not None and self.offset < keys.shape[2]:
            keys, values = keys[..., : self.offset, :], values[..., : self.offset, :]
        return keys, values, self.offset, self.keep, self.max_size, self._idx

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.keys, self.values, self.offset, self.keep, self.max_size, self._idx = state

    @classmethod
    def merge(cls, caches: list[Any]) -> Any:
        from .rotating_batch import BatchRotatingKVCache

        return BatchRotatingKVCache.merge(caches)
