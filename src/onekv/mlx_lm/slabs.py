"""The memory of KVCache: slabs that are written in place, and who reads how much of each.

A slab is one pair of arrays, `[rows, heads, capacity, dim]`, for one layer; it owns them and no other handle to them is
kept, so that writes happen in place. A piece is one holder's view of the first `length` columns of a slab. A sequence
is a list of pieces. Copying a sequence copies pieces; no KV moves:

    slab      | columns 0 .. capacity                                |
    piece a   | a reads these          |
    piece b   | b reads these     |        b goes on in a slab of its own, because a's next columns are taken
                                  ^ a may go on here: nobody else reads past it

Growth is another slab: nothing is moved, and what is there stays where it is. The pool counts the bytes of all slabs
that are alive against its limit. When it is full, caches that hold old conversations are asked to let go of some.
"""

import threading
import weakref
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

Views = list[tuple[mx.array, mx.array]]


class PoolFullError(MemoryBudgetError):
    """The KV memory limit does not allow another slab."""


class Reclaims(Protocol):
    def reclaim(self, pool: "Pool", size: int) -> None:
        """Let go of entries until `size` bytes are free or nothing is left."""

    def identities(self) -> set[int]:
        """Of the slabs and other parts it holds."""


class Pool:
    """Counts; it owns no memory itself."""

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
                f"{format_size(self.limit)} are in use; raise kv_memory (--kv-memory) or send less at once"
            )
        with self._lock:
            self.used += size

    def give(self, size: int) -> None:
        with self._lock:
            self.used -= size


POOL = Pool()


def own(array: mx.array) -> mx.array:
    """A copy that keeps nothing else in memory. A contiguous row of a batch would stay a view of all of it."""
    return mx.maximum(array, array)


class Slab:
    __slots__ = ("__weakref__", "_pool", "capacity", "k", "nbytes", "pieces", "v")

    def __init__(self, k: mx.array, v: mx.array, pool: Pool = POOL) -> None:
        self.nbytes = 0
        self._pool = pool
        pool.take(k.nbytes + v.nbytes)
        self.nbytes = k.nbytes + v.nbytes
        self.k, self.v = k, v
        self.capacity = k.shape[2]
        self.pieces: weakref.WeakSet[Piece] = weakref.WeakSet()

    def __del__(self) -> None:
        self._pool.give(self.nbytes)

    def write(self, at: int, keys: mx.array, values: mx.array) -> None:
        end = at + keys.shape[2]
        self.k[..., at:end, :] = keys
        # Some layers store keys alone; there is nothing to write then.
        if values.shape[3]:
            self.v[..., at:end, :] = values


class Piece:
    __slots__ = ("__weakref__", "length", "slab")

    def __init__(self, slab: Slab, length: int) -> None:
        self.slab = slab
        self.length = length
        slab.pieces.add(self)

    @property
    def room(self) -> int:
        """How many tokens can be added here without touching what another piece reads."""
        if any(piece.length > self.length for piece in self.slab.pieces):
            return 0
        return self.slab.capacity - self.length

    def view(self) -> tuple[mx.array, mx.array]:
        return self.slab.k[..., : self.length, :], self.slab.v[..., : self.length, :]


class Sequence:
    """The keys and values of one layer for one sequence (or several of one length), in pieces."""

    __slots__ = ("expected", "pieces")

    def __init__(self, pieces: list[Piece] | None = None) -> None:
        self.pieces = pieces or []
        # How many tokens there will be in all, if somebody said so.
        self.expected = 0

    @classmethod
    def of(cls, keys: mx.array, values: mx.array) -> "Sequence":
        """A sequence that holds these arrays themselves."""
        return cls([Piece(Slab(keys, values), keys.shape[2])]) if keys.shape[2] else cls()

    @property
    def length(self) -> int:
        return sum(piece.length for piece in self.pieces)

    @property
    def slabs(self) -> list[Slab]:
        return [piece.slab for piece in self.pieces]

    def fork(self) -> "Sequence":
        other = Sequence([Piece(piece.slab, piece.length) for piece in self.pieces])
        other.expected = self.expected
        return other

    def trim(self, count: int) -> None:
        while count > 0 and self.pieces:
            cut = min(count, self.pieces[-1].length)
            self.pieces[-1].length -= cut
            count -= cut
            if not self.pieces[-1].length:
                self.pieces.pop()

    def append(self, keys: mx.array, values: mx.array, step: int = STEP) -> None:
        count, done = keys.shape[2], 0
        while done < count:
            room = self.pieces[-1].room if self.pieces else 0
            if not room:
                self._add_slab(keys, values, count - done, step)
                continue
            piece = self.pieces[-1]
            size = min(room, count - done)
            piece.slab.write(piece.length, keys[..., done : done + size, :], values[..., done : done + size, :])
            piece.length += size
            done += size

    def _add_slab(self, keys: mx.array, values: mx.array, count: int, step: int) -> None:
        length = self.length
        part = FINE if len(self.pieces) < FEW_SLABS else COARSE
        wanted = max(count, self.expected - length if self.expected > length else length // part)
        # The first slab is as mlx-lm would make it. Later ones are often tails of a few tokens on a shared prefix.
        step = max(1, step // TAILS) if self.pieces else step
        capacity = (wanted + step - 1) // step * step
        like = self.pieces[0].slab if self.pieces else None
        k_type, v_type = (like.k.dtype, like.v.dtype) if like else (keys.dtype, values.dtype)
        heads = keys.shape[:2]
        slab = Slab(
            mx.zeros((*heads, capacity, keys.shape[3]), k_type), mx.zeros((*heads, capacity, values.shape[3]), v_type)
        )
        self.pieces.append(Piece(slab, 0))

    def compact(self) -> None:
        """Move what is the only use of a slab, and less than half of it, into one that fits."""
        for i, piece in enumerate(self.pieces):
            if len(piece.slab.pieces) == 1 and 2 * piece.length < piece.slab.capacity:
                k, v = (own(array) for array in piece.view())
                mx.eval(k, v)
                self.pieces[i] = Piece(Slab(k, v), piece.length)

    def views(self) -> Views:
        return [piece.view() for piece in self.pieces]


def dense(views: Views) -> tuple[mx.array, mx.array]:
    """All columns in one array: a view if they are in one slab, else a copy that is made when it is used."""
    if len(views) == 1:
        return views[0]
    return mx.concatenate([k for k, _ in views], axis=2), mx.concatenate([v for _, v in views], axis=2)


class State(dict[int, Any]):
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
