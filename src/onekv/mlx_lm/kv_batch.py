"""mlx-lm's BatchKVCache: a row is what one sequence refers to (`kv`), and padding is a number, not memory."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import BatchKVCache as StockBatchKVCache

from ..memory.hook import Attends, Mask
from .attention import attend, row_mask
from .kv import KVCache
from .slabs import KV, CacheState, Columns, Slab, dense, footprint


class BatchKVCache(StockBatchKVCache, Attends):  # type: ignore[misc]
    """Row r's first token is in column `_pads[r]` of what mlx-lm would hold; `_idx` columns are in use.

    While rows are padded on the right (`prepare`), `_lengths` says what is still to be stored of each.
    """

    def __init__(self, left_padding: list[int]) -> None:
        self._pads = [int(pad) for pad in left_padding]
        self._rows = [Columns() for _ in self._pads]
        self._idx = 0
        self._right_padding: list[int] | None = None
        self._lengths: list[int] | None = None
        # Heads, dimensions and types of keys and values, once known.
        self._like: KV | None = None
        self._fetched: KV | None = None
        self._counts: tuple[list[int], mx.array] | None = None

    @property
    def offset(self) -> mx.array:
        counts = [self._idx - pad for pad in self._pads]
        if self._counts is None or self._counts[0] != counts:
            self._counts = (counts, mx.array(counts))
        return self._counts[1]

    @property
    def left_padding(self) -> mx.array:
        return mx.array(self._pads)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KV:
        self._fetched = None
        self._like = (keys[:1, :, :0], values[:1, :, :0])
        self._rows += [Columns() for _ in range(keys.shape[0] - len(self._rows))]
        count = keys.shape[2]
        for r, row in enumerate(self._rows):
            start = max(0, self._pad(r) - self._idx)
            end = count if self._lengths is None else min(count, self._lengths[r])
            if start < end:
                row.append(keys[r : r + 1, :, start:end], values[r : r + 1, :, start:end], self.step)
        if self._lengths is not None:
            self._lengths = [max(0, length - count) for length in self._lengths]
        self._idx += count
        return self.keys_and_values()

    def _pad(self, row: int) -> int:
        return self._pads[row] if row < len(self._pads) else 0

    def keys_and_values(self) -> KV:
        if self._fetched is None:
            assert self._like is not None, "keys_and_values of an empty cache"
            rows = [self._row_arrays(r) for r in range(len(self._rows))]
            self._fetched = rows[0] if len(rows) == 1 else (_stack([k for k, _ in rows]), _stack([v for _, v in rows]))
        return self._fetched

    def _row_arrays(self, r: int) -> KV:
        """Row `r` as mlx-lm holds it, padding included."""
        assert self._like is not None
        views, length = self._rows[r].views(), self._rows[r].length
        left = min(self._pad(r), self._idx)
        right = self._idx - left - length
        before, after = (_zeros(self._like, count) for count in (left, right))
        return dense([*before, *views, *after] or [self._like])

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask, sinks: mx.array | None
    ) -> mx.array | None:
        if self._like is None or isinstance(mask, str) or self._is_plain or not self._is_fetched(keys, values):
            return None
        outputs = []
        for r, row in enumerate(self._rows):
            seen = row_mask(mask, r, self._pad(r), self._pad(r) + row.length)
            outputs.append(attend(queries[r : r + 1], row.views() or [self._like], scale, seen, sinks))
        return _stack(outputs)

    @property
    def _is_plain(self) -> bool:
        """Whether what was fetched is a view."""
        return len(self._rows) == 1 and len(self._rows[0].extents) == 1 and self._idx == self._rows[0].length

    @property
    def keys(self) -> mx.array | None:
        return None if self._like is None else self.keys_and_values()[0]

    @keys.setter
    def keys(self, value: mx.array) -> None:
        """See KVCache."""
        for slab in self._last_slabs():
            slab.k = mx.depends(slab.k, [value])

    @property
    def values(self) -> mx.array | None:
        return None if self._like is None else self.keys_and_values()[1]

    @values.setter
    def values(self, value: mx.array) -> None:
        for slab in self._last_slabs():
            slab.v = mx.depends(slab.v, [value])

    def _last_slabs(self) -> list[Slab]:
        return [slab for row in self._rows for slab in row.slabs[-1:]]

    def prepare(
        self,
        *,
        left_padding: list[int] | None = None,
        lengths: list[int] | None = None,
        right_padding: list[int] | None = None,
    ) -> None:
        if left_padding is not None:
            if self._like is not None:
                raise ValueError("Left padding can only be added to an empty BatchKVCache")
            self._pads = [pad + int(more) for pad, more in zip(self._pads, left_padding, strict=True)]
        if right_padding is not None and max(right_padding) > 0:
            self._right_padding = [int(pad) for pad in right_padding]
            self._lengths = None if lengths is None else [int(length) for length in lengths]

    def finalize(self) -> None:
        if self._right_padding is not None:
            self._pads = [pad + more for pad, more in zip(self._pads, self._right_padding, strict=True)]
            self._right_padding = self._lengths = None
            self._cut()

    def trim(self, n: int) -> int:
        n = min(self._idx, n)
        self._idx -= n
        self._cut()
        return n

    def _cut(self) -> None:
        """Rows give up what is past the columns in use."""
        self._fetched = None
        for r, row in enumerate(self._rows):
            row.trim(row.length - max(0, self._idx - self._pad(r)))

    def filter(self, batch_indices: Any) -> None:
        self._fetched = None
        kept: list[int] = np.array(batch_indices).tolist()
        self._rows = [self._rows[r].fork() for r in kept]
        self._pads = [self._pads[r] for r in kept]
        shift = min(self._pads)
        if shift > 0:
            self._idx -= shift
            self._pads = [pad - shift for pad in self._pads]

    def extend(self, other: "BatchKVCache") -> None:
        self._fetched = None
        idx = max(self._idx, other._idx)
        pads = [pad + idx - cache._idx for cache in (self, other) for pad in cache._pads]
        self._rows = [*self._rows, *(row.fork() for row in other._rows)]
        self._like = self._like or other._like
        self._pads, self._idx = pads, idx

    def extract(self, idx: int) -> KVCache:
        return KVCache.over(self._rows[idx].fork(), self.step)

    @classmethod
    def merge(cls, caches: list[Any]) -> "BatchKVCache":
        lengths = [cache.size() for cache in caches]
        merged = cls([max(lengths) - length for length in lengths])
        merged._idx = max(lengths)
        for r, cache in enumerate(caches):
            if isinstance(cache, KVCache):
                merged._rows[r] = cache.columns.fork()
            elif cache.size():
                merged._rows[r] = Columns.of(*(array[..., : cache.offset, :] for array in (cache.keys, cache.values)))
        some = next((row for row in merged._rows if row.extents), None)
        if some is not None:
            merged._like = _empty(some)
        return merged

    @property
    def state(self) -> Any:
        keys, values = (None, None) if self._like is None else self.keys_and_values()
        plain = self._like is None or self._is_plain
        self._fetched = None
        shown = (keys, values, self.offset, self.left_padding, self._idx)
        return shown if plain else CacheState([slab for row in self._rows for slab in row.slabs], shown)

    @state.setter
    def state(self, state: Any) -> None:
        keys, values, _, left_padding, idx = state
        BatchKVCache.__init__(self, left_padding.tolist())
        self._idx = idx
        if keys is not None:
            self._like = (keys[:1, :, :0], values[:1, :, :0])
            self._rows = []
            for r in range(keys.shape[0]):
                columns = (slice(r, r + 1), slice(None), slice(max(0, self._pad(r)), idx))
                self._rows.append(Columns.of(keys[columns], values[columns]))

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchKVCache":
        other = BatchKVCache(self._pads)
        other.__dict__.update(self.__dict__)
        other._fetched = None
        other._rows = [row.fork() for row in self._rows]
        return other

    def __copy__(self) -> "BatchKVCache":
        return self.__deepcopy__({})

    def size(self) -> int:
        return self._idx

    def empty(self) -> bool:
        return self._like is None

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.footprint())

    def footprint(self) -> Iterator[tuple[int, int]]:
        return footprint(self._rows)


def _stack(rows: list[mx.array]) -> mx.array:
    return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=0)


def _zeros(like: KV, columns: int) -> list[KV]:
    if not columns:
        return []
    k, v = (mx.zeros((*array.shape[:2], columns, array.shape[3]), array.dtype) for array in like)
    return [(k, v)]


def _empty(row: Columns) -> KV:
    k, v = row.views()[0]
    return k[:1, :, :0], v[:1, :, :0]
