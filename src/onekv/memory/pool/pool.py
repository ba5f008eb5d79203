"""The arrays of one group and who holds each of its blocks.

Each layer has one array for keys and one for values, `[heads, blocks * block_size, dim]`, allocated here, once; where
they are encoded, one for each plane of the format. Block b is the columns [b * block_size, (b + 1) * block_size) of
every one of them. Writes happen in place because a `LayerArrays` is the only owner of its arrays: never keep a slice of
them beyond a step, or the next write copies.

A block is held (`references` > 0: tables refer to it), idle (nobody does, but the prefix cache keeps it: `cached`) or
free. Some free or idle blocks are promised to running sequences (`reserved`), so that a sequence that was admitted
never fails for lack of a block. The cache evicts idle blocks before they are taken: the pool itself never evicts.
Pinned blocks are not promised:

    | held (perhaps cached too) | idle, pinned | idle | free |
                                               | reserved: some of these | available: the others |

In a window, tables release blocks while they run and take others instead. A block that two of them share is then still
held by one when the other requests a new one, so in a window, a block counts once for every table that refers to it.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import OneKVError
from ...models.freed import freed
from ..device import settle
from ..figures import CACHED, FREE, HELD, MOST, PINNED, PoolStats
from ..layout import Group, KVLayer


class OutOfBlocks(OneKVError):
    """The pool cannot promise that many blocks now."""


class IntegrityError(OneKVError):
    """A count that must hold does not: a bug in OneKV."""


class LayerArrays:
    """The only reference to one layer's keys and values: `all` has the planes of the keys, then those of the values."""

    __slots__ = ("all", "key_planes")

    def __init__(self, layer: KVLayer, slots: int) -> None:
        self.key_planes = len(layer.keys.planes)
        planes = (*layer.keys.planes, *layer.values.planes)
        self.all = [mx.zeros((layer.heads, slots, plane.width), plane.dtype) for plane in planes]

    # Where they are stored as they are, there is one array for each.

    @property
    def k(self) -> mx.array:
        return self.all[0]

    @k.setter
    def k(self, array: mx.array) -> None:
        self.all[0] = array

    @property
    def v(self) -> mx.array:
        return self.all[1]

    @v.setter
    def v(self, array: mx.array) -> None:
        self.all[1] = array

    @property
    def keys(self) -> list[mx.array]:
        return self.all[: self.key_planes]

    @property
    def values(self) -> list[mx.array]:
        return self.all[self.key_planes :]


class Pool:
    def __init__(self, group: Group, blocks: int, block_size: int) -> None:
        self.group = group
        self.blocks = blocks
        self.block_size = block_size
        self.references = np.zeros(blocks, np.int32)
        self.cached = np.zeros(blocks, np.bool_)
        self.pinned = np.zeros(blocks, np.bool_)
        self.reserved = 0
        self.layers = [LayerArrays(layer, blocks * block_size) for layer in group.layers]
        # Layer by layer, so that no more than the pool itself is ever asked for.
        for arrays in self.layers:
            freed.take(sum(array.nbytes for array in arrays.all))
            mx.eval(arrays.all)
        self._free = blocks
        self._idle = 0
        # The most blocks that were held, and that were idle, at once.
        self.peak_held = self.peak_idle = 0

    @property
    def held(self) -> int:
        return int((self.references > 0).sum())

    @property
    def free(self) -> int:
        return self._free

    @property
    def idle(self) -> int:
        """Blocks that are cached, not pinned, and that no sequence refers to: they can be evicted."""
        return self._idle

    @property
    def available(self) -> int:
        """How many more blocks can be promised."""
        if self.group.rule.span is None:
            return self._free + self._idle - self.reserved
        return self.blocks - int(self.pinned.sum()) - int(self.references.sum()) - self.reserved

    def can_pin(self, blocks: list[int]) -> bool:
        """Whether all promises still hold when these cached blocks are pinned."""
        if self.group.rule.span is None:
            return self._count_idle(blocks) <= self.available
        return int((~self.pinned[blocks]).sum()) <= self.available

    @property
    def block_bytes(self) -> int:
        return self.group.token_bytes * self.block_size

    @property
    def nbytes(self) -> int:
        return self.block_bytes * self.blocks

    def reserve(self, count: int) -> None:
        """Promise `count` blocks; each is redeemed by `take` or given back by `unreserve`."""
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks of {self.group.rule} asked for, {self.available} are available")
        self.reserved += count

    def unreserve(self, count: int) -> None:
        if count > self.reserved:
            raise IntegrityError(f"{count} reserved blocks given back, {self.reserved} are reserved")
        self.reserved -= count

    def take(self, count: int, after: int | None, room: int) -> list[int]:
        """Turn `count` reserved blocks into held ones, adjacent to each other and to block `after` if possible.

        `room` is how many blocks the sequence may need in total: a new run is placed where they all fit. That many must
        be free: evict first.
        """
        if count > self._free:
            raise IntegrityError(f"{count} blocks of {self.group.rule} are to be taken and {self._free} are free")
        self.unreserve(count)
        used = (self.references > 0) | self.cached
        taken: list[int] = []
        while len(taken) < count:
            start = after + 1 if after is not None else self.blocks
            if start >= self.blocks or used[start]:
                start = self._place(used, max(room, count) - len(taken))
            run = used[start : start + count - len(taken)]
            length = int(np.argmax(run)) if run.any() else len(run)
            taken.extend(range(start, start + length))
            run[:length] = True
            after = taken[-1]
        self.references[taken] = 1
        self._free -= count
        self.peak_held = max(self.peak_held, self.held)
        return taken

    def _place(self, used: np.ndarray[Any, Any], room: int) -> int:
        """Where a run of `room` blocks fits best: the smallest gap that holds it, else the largest gap."""
        free = np.concatenate(([False], ~used, [False]))
        edges = np.flatnonzero(free[1:] != free[:-1])
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        if not len(starts):
            raise IntegrityError("a reserved block was asked for, but none is free")
        fits = lengths >= room
        best = np.argmin(np.where(fits, lengths, self.blocks + 1)) if fits.any() else np.argmax(lengths)
        return int(starts[best])

    def share(self, blocks: list[int]) -> None:
        """One more reference to each of `blocks`, all of them held or cached."""
        if not blocks:
            return
        if ((self.references[blocks] < 1) & ~self.cached[blocks]).any():
            raise IntegrityError("a free block was shared")
        self._idle -= self._count_idle(blocks)
        self.references[blocks] += 1
        self.peak_held = max(self.peak_held, self.held)

    def release(self, blocks: list[int]) -> None:
        """Remove a reference from each of `blocks`; those without references become free or idle."""
        if not blocks:
            return
        if (self.references[blocks] < 1).any():
            raise IntegrityError("a free block was released")
        self.references[blocks] -= 1
        self._free += int(((self.references[blocks] == 0) & ~self.cached[blocks]).sum())
        self._idle += self._count_idle(blocks)
        self.peak_idle = max(self.peak_idle, self._idle)

    def keep(self, block: int) -> None:
        """The prefix cache keeps a block that a table holds."""
        if self.references[block] < 1 or self.cached[block]:
            raise IntegrityError(f"block {block} cannot be cached: it is free or cached already")
        self.cached[block] = True

    def drop(self, block: int) -> None:
        """The prefix cache lets go of a block; it is free if no table holds it."""
        if not self.cached[block]:
            raise IntegrityError(f"block {block} is not cached")
        self._idle -= self._count_idle([block])
        self.cached[block] = self.pinned[block] = False
        self._free += int(self.references[block] == 0)

    def pin(self, block: int, pinned: bool) -> None:
        """A pinned block is never evicted; unpinned again it may be."""
        self._idle -= self._count_idle([block])
        self.pinned[block] = pinned
        self._idle += self._count_idle([block])

    def _count_idle(self, blocks: list[int]) -> int:
        idle = (self.references[blocks] == 0) & self.cached[blocks] & ~self.pinned[blocks]
        return int(idle.sum())

    def copy(self, source: int, target: int) -> None:
        """The keys and values of one block into another, in every layer."""
        # A step that still reads the pool would make MLX copy all of it for the writes below.
        mx.synchronize()
        arrays = self.arrays()
        # Gathered, because a slice would share the buffer that is then written; and computed before it is.
        content = [self.gather(array, source) for array in arrays]
        settle(content)
        slots = slice(target * self.block_size, (target + 1) * self.block_size)
        for array, rows in zip(arrays, content, strict=True):
            array[:, slots] = rows
        settle(arrays)

    def erase(self, blocks: list[int]) -> None:
        """Write zeros into those of `blocks` that are free."""
        for block in blocks:
            if self.references[block] or self.cached[block]:
                continue
            slots = slice(block * self.block_size, (block + 1) * self.block_size)
            for array in self.arrays():
                array[:, slots] = 0

    def arrays(self) -> list[mx.array]:
        """Those of all layers that hold something."""
        return [array for layer in self.layers for array in layer.all if array.size]

    def gather(self, array: mx.array, block: int) -> mx.array:
        """One block of one of the arrays, copied: [heads, block_size, dim]."""
        heads, _, dim = array.shape
        rows = mx.arange(heads) * self.blocks + block
        return array.reshape(heads * self.blocks, self.block_size * dim)[rows].reshape(heads, self.block_size, dim)

    def states(self) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """What each block is (`figures`), in an array of its own."""
        unheld = np.where(self.pinned, PINNED, np.where(self.cached, CACHED, FREE))
        held = np.minimum(self.references + (HELD - 1), MOST)
        return np.where(self.references > 0, held, unheld).astype(np.uint8)

    def stats(self) -> PoolStats:
        return PoolStats(
            group=str(self.group.rule),
            layers=len(self.group.layers),
            block_bytes=self.block_bytes,
            blocks=self.blocks,
            held=self.held,
            peak_held=self.peak_held,
            idle=self.idle,
            peak_idle=self.peak_idle,
            pinned=int((self.pinned & (self.references == 0)).sum()),
            free=self.free,
            reserved=self.reserved,
            available=self.available,
        )

    def check_integrity(self, held: list[int], cached: list[int], reserved: int) -> None:
        """Compare with the block ids of all tables (once per table that holds it) and of the prefix cache, and with
        what the tables have reserved.
        """
        counts = np.bincount(np.array(held, np.int64), minlength=self.blocks)
        wrong = np.flatnonzero(counts != self.references)
        if len(wrong):
            b = int(wrong[0])
            raise IntegrityError(
                f"{len(wrong)} blocks of {self.group.rule} are miscounted; "
                f"block {b} has {self.references[b]} references and {counts[b]} holders"
            )
        kept = np.bincount(np.array(cached, np.int64), minlength=self.blocks)
        if (kept > 1).any() or ((kept == 1) != self.cached).any() or (self.pinned & ~self.cached).any():
            raise IntegrityError(f"cached blocks of {self.group.rule} are miscounted")
        idle = self._count_idle(list(range(self.blocks)))
        free = int(((self.references == 0) & ~self.cached).sum())
        if (self._free, self._idle) != (free, idle) or self.reserved != reserved or self.available < 0:
            raise IntegrityError(
                f"{self._free} free and {self._idle} idle blocks, {self.reserved} reserved: miscounted; "
                f"there are {free} and {idle}, and {reserved} are promised"
            )
        for arrays in self.layers:
            if any(array.shape[1] != self.blocks * self.block_size for array in arrays.all):
                raise IntegrityError("a pool array changed its shape")
