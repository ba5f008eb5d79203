"""How a stored cache is handed out without a copy: shared where that costs nothing, otherwise lent.

Shared: a cache whose content two holders can read while both continue. OneKV's KVCache counts references; ArraysCache
replaces its arrays and never writes into them; a CacheList is shared if all its parts are.

Lent: any other cache is handed out as a twin, another object with the same attributes (one `__dict__` for both). What
the borrower stores is visible to the lender, and no array gets a second reference, so writes stay in place. The loan
ends when no twin is alive any more, because it was returned or the request ended. Until then, the lender must not hand
it out again.

    stored --lend--> lent --insert_cache--> stored under its new key
                      |
                      +--twins are gone--> stored, trimmed to its length; dropped if that is no longer possible
"""

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, _BaseCache

from .kv import KVCache
from .kv_batch import BatchKVCache
from .slabs import own

Cache = Any


def shareable(cache: Cache) -> bool:
    if isinstance(cache, CacheList):
        return all(shareable(part) for part in cache.caches)
    return isinstance(cache, KVCache | ArraysCache)


def share(cache: Cache) -> Cache:
    """A second cache with the same content, of which nothing is copied."""
    if isinstance(cache, CacheList):
        return CacheList(*(share(part) for part in cache.caches))
    if isinstance(cache, ArraysCache):
        other = copy.copy(cache)
        other.cache = list(cache.cache)
        return other
    return copy.deepcopy(cache)


def lend(cache: Cache) -> Cache:
    twin = object.__new__(type(cache))
    twin.__dict__ = cache.__dict__
    return twin


def identity(cache: Cache) -> int:
    """The same for a cache and its twins."""
    return id(getattr(cache, "__dict__", cache))


def keep(cache: Cache) -> Cache:
    """What to store of a cache that came from somewhere: evaluated, and not a part of something larger."""
    if isinstance(cache, CacheList):
        return CacheList(*(keep(part) for part in cache.caches))
    if isinstance(cache, ArraysCache):
        kept = share(cache)
        kept.cache = [None if array is None else own(array) for array in cache.cache]
        mx.eval(kept.cache)
        return kept
    if isinstance(cache, _BaseCache):
        mx.eval(cache.state)
    return share(cache) if shareable(cache) else cache


def footprint(cache: Cache) -> Iterator[tuple[int, int]]:
    """What `cache` holds, as (identity, bytes): things of the same identity are in memory once."""
    if isinstance(cache, CacheList):
        for part in cache.caches:
            yield from footprint(part)
    elif isinstance(cache, KVCache | BatchKVCache):
        yield from cache.footprint()
    elif isinstance(cache, ArraysCache):
        yield from ((id(array), array.nbytes) for array in cache.cache if array is not None)
    else:
        yield identity(cache), cache.nbytes


def length(cache: Cache) -> int | None:
    """How many tokens have been stored in it; None if it does not say."""
    if isinstance(cache, CacheList):
        return next((n for n in map(length, cache.caches) if n is not None), None)
    offset = getattr(cache, "offset", None)
    return offset if isinstance(offset, int) else None


def compact(cache: Cache) -> None:
    """Release memory that is no longer read."""
    if isinstance(cache, CacheList):
        for part in cache.caches:
            compact(part)
    elif isinstance(cache, KVCache):
        cache.compact()


class Loan:
    """The twins that were handed out, as long as one of them is alive."""

    def __init__(self, twins: list[Cache]) -> None:
        self._twins = [weakref.ref(twin) for twin in twins]

    @property
    def open(self) -> bool:
        return any(twin() is not None for twin in self._twins)
