"""mlx-lm's KVCache, whose copies and lengths are references into slabs; `kv_batch` has the one for batches.

A cache owns its extents, not the slabs: `deepcopy`, `merge` and `trim`, and for batches `extract`, `filter` and
`extend`, change which columns a cache refers to and move no KV. `update_and_fetch` writes new tokens into the last
slab, or into a new one; it returns what mlx-lm's caches return, as views or as a copy that is made only if it is read.
With `install`, attention reads the slabs in place (`attention`), so it is not.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache as StockKVCache

from ..memory.hook import Attends, Mask
from .attention import attend
from .slabs import KV, CacheState, Columns, dense, footprint


class KVCache(StockKVCache, Attends):  # type: ignore[misc]
    """See the module. `columns` is what it refers to."""

    def __init__(self) -> None:
        self.columns = Columns()
        self._given: dict[str, mx.array] = {}
        self._fetched: KV | None = None

    def stock(self) -> StockKVCache:
        """An empty cache of mlx-lm's own that keeps the same."""
        return StockKVCache()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KV:
        self._fetched = None
        self.columns.append(keys, values, self.step)
        return self.keys_and_values()

    def keys_and_values(self) -> KV:
        if self._fetched is None:
            self._fetched = dense(self.columns.views())
        return self._fetched

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask, sinks: mx.array | None
    ) -> mx.array | None:
        if len(self.columns.extents) == 1 or not self._is_fetched(keys, values):
            return None
        return attend(queries, self.columns.views(), scale, mask, sinks)

    @property
    def offset(self) -> int:
        return self.columns.length

    @offset.setter
    def offset(self, value: int) -> None:
        self.trim(self.offset - value)

    @property
    def keys(self) -> mx.array | None:
        return dense(self.columns.views())[0] if self.columns.extents else None

    @keys.setter
    def keys(self, value: mx.array) -> None:
        """Models assign to have something evaluated together with the keys."""
        for slab in self.columns.slabs[-1:]:
            slab.k = mx.depends(slab.k, [value])
        self._adopt("keys", value)

    @property
    def values(self) -> mx.array | None:
        return dense(self.columns.views())[1] if self.columns.extents else None

    @values.setter
    def values(self, value: mx.array) -> None:
        """See `keys`."""
        for slab in self.columns.slabs[-1:]:
            slab.v = mx.depends(slab.v, [value])
        self._adopt("values", value)

    def _adopt(self, name: str, value: mx.array) -> None:
        """Keys and values that are assigned to an empty cache are what it holds from then on."""
        if not self.columns.extents:
            self._given[name] = value
            if len(self._given) == 2:
                self.columns = Columns.of(self._given.pop("keys"), self._given.pop("values"))

    def size(self) -> int:
        return self.offset

    def trim(self, n: int) -> int:
        self._fetched = None
        n = max(0, min(self.offset, n))
        self.columns.trim(n)
        return n

    def expect(self, length: int) -> None:
        """Says how many tokens there will be in total, so that one slab is made for them."""
        self.columns.expected = length

    @property
    def state(self) -> Any:
        self._fetched = None
        slabs = self.columns.slabs
        shown = (self.keys, self.values, self.offset)
        return shown if len(slabs) < 2 else CacheState(slabs, shown)

    @state.setter
    def state(self, state: Any) -> None:
        keys, values, offset = state
        KVCache.__init__(self)
        if keys is not None:
            self.columns = Columns.of(keys, values)
        self.offset = offset

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        return KVCache.over(self.columns.fork(), self.step)

    @staticmethod
    def over(columns: Columns, step: int) -> "KVCache":
        """A cache that refers to `columns`."""
        cache = KVCache()
        cache.columns = columns
        if step != KVCache.step:
            cache.step = step
        return cache

    def __copy__(self) -> "KVCache":
        return self.__deepcopy__({})

    def empty(self) -> bool:
        return not self.columns.extents

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.footprint())

    def footprint(self) -> Iterator[tuple[int, int]]:
        """The slabs it refers to and their sizes."""
        return footprint([self.columns])

    def compact(self) -> None:
        """Give up slabs of which this cache alone uses a small part."""
        self._fetched = None
        self.columns.compact()

    @property
    def token_bytes(self) -> int:
        return sum(slab.nbytes // slab.capacity for slab in self.columns.slabs[:1])

    @classmethod
    def merge(cls, caches: list[Any]) -> Any:
        from .kv_batch import BatchKVCache

        return BatchKVCache.merge(caches)
