"""The memory of KVCache: slabs that are written in place, and how much of each is read by which cache.

A slab is one pair of arrays, `[rows, heads, capacity, dim]`, for one layer; it owns them and no other reference to them
is kept, so that writes happen in place. An extent is the first `length` columns of a slab, as one holder reads them. A
layer's part of a sequence is a list of extents. Copying it copies extents; no KV moves:

    slab       | columns 0 .. capacity                                |
    extent a   | a reads these          |
    extent b   | b reads these     |        b continues in a slab of its own, because a's next columns are taken
                                        ^ a may continue here: nothing else reads past it

A cache grows by adding a slab: nothing is moved. `SLABS` counts the bytes of all live slabs against a limit. When it is
reached, caches that hold old conversations are asked to evict some.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import mlx.core as mx

from ..errors import MemoryBudgetError
from ..memory.plan.device import read_device
from ..units import format_size, parse_size

STEP = 256
# A new slab holds at least one part of so many of what there is: little while there are few slabs, more later, so that
# there are never very many.
FINE, COARSE, FEW_SLABS = 32, 4, 16
TAILS = 4
# Of the memory that is free when the first slab is made.
DEFAULT_SHARE = "80%"

# Keys and values, [rows, heads, columns, dim].
KV = tuple[mx.array, mx.array]
Views = list[KV]


class PoolFullError(MemoryBudgetError):
    """The KV memory limit does not allow another slab."""


class Reclaims(Protocol):
    def reclaim(self, slabs: "Slabs", size: int) -> None:
        """Let go of what is stored until `size` bytes are free or nothing is left."""

    def identities(self) -> set[int]:
        """Of the slabs and other parts it holds."""


class Slabs:
    """Counts those that are alive; it owns no memory itself."""

    def __init__(self) -> None:
        self.used = 0
        # Slabs die wherever their last holder does, perhaps while this thread counts another.
        self._lock = threading.RLock()
        self._limit: int | None = None
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def limit(self) -> int:
        if self._limit is None:
            self.set_limit(DEFAULT_SHARE)
            assert self._limit is not None
        return self._limit

    def set_limit(self, size: int | str | None) -> None:
        """Bytes, a text like 4GiB or 50% (of what is free now), or None: the default when a slab is first made."""
        self._limit = None if size is None else parse_size(size, whole=read_device().available, name="kv_memory")

    @property
    def free(self) -> int:
        return self.limit - self.used

    def register(self, holder: Reclaims) -> None:
        self._holders.add(holder)

    def cached(self) -> set[int]:
        """What any of those who can let go holds."""
        return set().union(*(holder.identities() for holder in list(self._holders)))

    def take(self, size: int) -> None:
        if size > self.free:
            for holder in list(self._holders):
                holder.reclaim(self, size)
        if size > self.free:
            raise PoolFullError(
                f"KV memory is full: {format_size(size)} more are needed, {format_size(self.used)} of "
                f"{format_size(self.limit)} are in use; raise kv_memory (--kv-memory) or send fewer requests at once"
            )
        with self._lock:
            self.used += size

    def give(self, size: int) -> None:
        with self._lock:
            self.used -= size


SLABS = Slabs()


def whole_steps(tokens: int, step: int = STEP) -> int:
    """`tokens`, rounded up to what is allocated for them."""
    return -(-tokens // step) * step


def own(array: mx.array) -> mx.array:
    """A copy that keeps nothing else in memory. A contiguous row of a batch would stay a view of all of it."""
    return mx.maximum(array, array)


class Slab:
    __slots__ = ("__weakref__", "_slabs", "capacity", "extents", "k", "nbytes", "v")

    def __init__(self, k: mx.array, v: mx.array, slabs: Slabs = SLABS) -> None:
        self.nbytes = 0
        self._slabs = slabs
        slabs.take(k.nbytes + v.nbytes)
        self.nbytes = k.nbytes + v.nbytes
        self.k, self.v = k, v
        self.capacity = k.shape[2]
        self.extents: weakref.WeakSet[Extent] = weakref.WeakSet()

    def __del__(self) -> None:
        self._slabs.give(self.nbytes)

    def write(self, at: int, keys: mx.array, values: mx.array) -> None:
        end = at + keys.shape[2]
        self.k[..., at:end, :] = keys
        # Some layers store keys alone; there is nothing to write then.
        if values.shape[3]:
            self.v[..., at:end, :] = values


class Extent:
    __slots__ = ("__weakref__", "length", "slab")

    def __init__(self, slab: Slab, length: int) -> None:
        self.slab = slab
        self.length = length
        slab.extents.add(self)

    @property
    def room(self) -> int:
        """How many tokens can be added here without touching what another extent reads."""
        if any(extent.length > self.length for extent in self.slab.extents):
            return 0
        return self.slab.capacity - self.length

    def view(self) -> KV:
        return self.slab.k[..., : self.length, :], self.slab.v[..., : self.length, :]


class Columns:
    """The keys and values of one layer for one sequence (or several of one length), in extents."""

    __slots__ = ("expected", "extents")

    def __init__(self, extents: list[Extent] | None = None) -> None:
        self.extents = extents or []
        # The total number of tokens, if it was announced.
        self.expected = 0

    @classmethod
    def of(cls, keys: mx.array, values: mx.array) -> "Columns":
        """A sequence that holds these arrays themselves."""
        return cls([Extent(Slab(keys, values), keys.shape[2])]) if keys.shape[2] else cls()

    @property
    def length(self) -> int:
        return sum(extent.length for extent in self.extents)

    @property
    def slabs(self) -> list[Slab]:
        return [extent.slab for extent in self.extents]

    def fork(self) -> "Columns":
        other = Columns([Extent(extent.slab, extent.length) for extent in self.extents])
        other.expected = self.expected
        return other

    def trim(self, count: int) -> None:
        while count > 0 and self.extents:
            cut = min(count, self.extents[-1].length)
            self.extents[-1].length -= cut
            count -= cut
            if not self.extents[-1].length:
                self.extents.pop()

    def append(self, keys: mx.array, values: mx.array, step: int = STEP) -> None:
        count, done = keys.shape[2], 0
        while done < count:
            room = self.extents[-1].room if self.extents else 0
            if not room:
                self._add_slab(keys, values, count - done, step)
                continue
            extent = self.extents[-1]
            size = min(room, count - done)
            extent.slab.write(extent.length, keys[..., done : done + size, :], values[..., done : done + size, :])
            extent.length += size
            done += size

    def _add_slab(self, keys: mx.array, values: mx.array, count: int, step: int) -> None:
        length = self.length
        part = FINE if len(self.extents) < FEW_SLABS else COARSE
        wanted = max(count, self.expected - length if self.expected > length else length // part)
        # The first slab is as mlx-lm would make it. Later ones are often tails of a few tokens on a shared prefix.
        step = max(1, step // TAILS) if self.extents else step
        capacity = whole_steps(wanted, step)
        like = self.extents[0].slab if self.extents else None
        k_type, v_type = (like.k.dtype, like.v.dtype) if like else (keys.dtype, values.dtype)
        heads = keys.shape[:2]
        slab = Slab(
            mx.zeros((*heads, capacity, keys.shape[3]), k_type), mx.zeros((*heads, capacity, values.shape[3]), v_type)
        )
        self.extents.append(Extent(slab, 0))

    def compact(self) -> None:
        """Move what is the only use of a slab, and less than half of it, into one that fits."""
        for i, extent in enumerate(self.extents):
            if len(extent.slab.extents) == 1 and 2 * extent.length < extent.slab.capacity:
                k, v = (own(array) for array in extent.view())
                mx.eval(k, v)
                self.extents[i] = Extent(Slab(k, v), extent.length)

    def views(self) -> Views:
        return [extent.view() for extent in self.extents]


def footprint(rows: Iterable[Columns]) -> Iterator[tuple[int, int]]:
    """The slabs that any of `rows` refers to, each once, and their sizes."""
    slabs = {id(slab): slab for row in rows for slab in row.slabs}
    return ((key, slab.nbytes) for key, slab in slabs.items())


def dense(views: Views) -> KV:
    """All columns in one array: a view if they are in one slab, else a copy that is made when it is used."""
    if len(views) == 1:
        return views[0]
    return mx.concatenate([k for k, _ in views], axis=2), mx.concatenate([v for _, v in views], axis=2)


class CacheState(dict[int, Any]):
    """What `state` gives where keys and values are in several slabs.

    Python sees mlx-lm's tuple. mx.eval, which is how mlx-lm makes a cache store what it was given, looks inside the
    dictionary and finds the slabs: it must not make one copy of everything.
    """

    def __init__(self, slabs: list[Slab], shown: tuple[Any, ...]) -> None:
        super().__init__({i: (slab.k, slab.v) for i, slab in enumerate(slabs)})
        self._shown = shown

    def __iter__(self) -> Any:
        return iter(self._shown)

    def __len__(self) -> int:
        return len(self._shown)

    def __getitem__(self, index: Any) -> Any:
        return self._shown[index]

    def items(self) -> Any:
        return dict(enumerate(self._shown)).items()
