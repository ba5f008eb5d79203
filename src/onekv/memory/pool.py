"""The arrays of one group and who holds each of its blocks.

Each layer has one array for keys and one for values, `[heads, blocks * block_size, dim]`, allocated here, once. Block b
is the columns [b * block_size, (b + 1) * block_size) of every one of them. Writes happen in place because a
`LayerArrays` is the only owner of its two arrays: never keep a slice of them beyond a step, or the next write copies.

A block is free (nobody refers to it) or held (`references` > 0). Some free blocks are promised to running sequences
(`reserved`), so that a sequence that was admitted never fails for lack of a block:

    | held | free: reserved | free: available |
"""

import mlx.core as mx
import numpy as np

from ..errors import OneKVError
from .layout import Group, KVLayer


class OutOfBlocks(OneKVError):
    """The pool cannot promise that many blocks now."""


class IntegrityError(OneKVError):
    """A count that must hold does not: a bug in OneKV."""


class LayerArrays:
    """The only reference to one layer's keys and values."""

    __slots__ = ("k", "v")

    def __init__(self, layer: KVLayer, slots: int) -> None:
        self.k = mx.zeros((layer.heads, slots, layer.k_dim), layer.dtype)
        self.v = mx.zeros((layer.heads, slots, layer.v_dim), layer.dtype)


class Pool:
    def __init__(self, group: Group, blocks: int, block_size: int) -> None:
        self.group = group
        self.blocks = blocks
        self.block_size = block_size
        self.references = np.zeros(blocks, np.int32)
        self.reserved = 0
        self.layers = [LayerArrays(layer, blocks * block_size) for layer in group.layers]
        # Layer by layer, so that no more than the pool itself is ever asked for.
        for arrays in self.layers:
            mx.eval(arrays.k, arrays.v)
        self._free = blocks

    @property
    def free(self) -> int:
        return self._free

    @property
    def available(self) -> int:
        return self._free - self.reserved

    @property
    def block_bytes(self) -> int:
        return self.group.token_bytes * self.block_size

    @property
    def nbytes(self) -> int:
        return self.block_bytes * self.blocks

    def reserve(self, count: int) -> None:
        """Promise `count` free blocks; each is redeemed by `take` or given back by `unreserve`."""
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks of {self.group.rule} asked for, {self.available} are available")
        self.reserved += count

    def unreserve(self, count: int) -> None:
        if count > self.reserved:
            raise IntegrityError(f"{count} reserved blocks given back, {self.reserved} are reserved")
        self.reserved -= count

    def take(self, count: int, after: int | None, room: int) -> list[int]:
        """Turn `count` reserved blocks into held ones, adjacent to each other and to block `after` if possible.

        `room` is how many blocks the sequence may want in all: a new run is placed where they all fit.
        """
        self.unreserve(count)
        taken: list[int] = []
        while len(taken) < count:
            start = after + 1 if after is not None else self.blocks
            if start >= self.blocks or self.references[start]:
                start = self._place(max(room, count) - len(taken))
            run = self.references[start : start + count - len(taken)]
            length = int(np.argmax(run > 0)) if run.any() else len(run)
            taken.extend(range(start, start + length))
            run[:length] = 1
            self._free -= length
            after = taken[-1]
        return taken

    def _place(self, room: int) -> int:
        """Where a run of `room` blocks fits best: the smallest gap that holds it, else the largest gap."""
        free = np.concatenate(([False], self.references == 0, [False]))
        edges = np.flatnonzero(free[1:] != free[:-1])
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        if not len(starts):
            raise IntegrityError("a reserved block was asked for, but none is free")
        fits = lengths >= room
        best = np.argmin(np.where(fits, lengths, self.blocks + 1)) if fits.any() else np.argmax(lengths)
        return int(starts[best])

    def share(self, blocks: list[int]) -> None:
        """One more reference to each of `blocks`, all of them held."""
        if (self.references[blocks] < 1).any():
            raise IntegrityError("a free block was shared")
        self.references[blocks] += 1

    def release(self, blocks: list[int]) -> None:
        """One reference less to each of `blocks`; those nobody refers to any more are free."""
        if not blocks:
            return
        if (self.references[blocks] < 1).any():
            raise IntegrityError("a free block was released")
        self.references[blocks] -= 1
        self._free += int((self.references[blocks] == 0).sum())

    def check_integrity(self, held: list[int]) -> None:
        """Compare with `held`: the block ids of all tables, an id once per table that holds it."""
        counts = np.bincount(np.array(held, np.int64), minlength=self.blocks)
        wrong = np.flatnonzero(counts != self.references)
        if len(wrong):
            b = int(wrong[0])
            raise IntegrityError(
                f"{len(wrong)} blocks of {self.group.rule} are miscounted; "
                f"block {b} has {self.references[b]} references and {counts[b]} holders"
            )
        if self._free != int((self.references == 0).sum()) or not 0 <= self.reserved <= self._free:
            raise IntegrityError(f"{self._free} free blocks, {self.reserved} of them reserved: miscounted")
        for arrays in self.layers:
            if arrays.k.shape[1] != self.blocks * self.block_size:
                raise IntegrityError("a pool array changed its shape")
