"""All (row, block) pairs of a step, as index arrays for attention over the pool.

They stay valid as long as the tables hold the same blocks. A `Grid`, [rows, blocks of the longest row], is what there
always is; where rows are of very different lengths and most of it would be padding, its `PairList`, [pairs], is better
to compute with.
"""

from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from .formats.centre import Rope
from .pool.table import Table

# A position no query reads: beyond all of them.
NOWHERE = 2**30

Matrices = tuple[mx.array, mx.array, mx.array]
Integers = np.ndarray[Any, Any]


class Grid:
    """`ids[row, i]` is the row's i-th block and `base` the position of its first slot.

    Short rows are padded with their last block, at position NOWHERE.
    """

    def __init__(self, tables: list[Table]) -> None:
        self.key = _key(tables)
        self.block_size, self._blocks = tables[0].pool.block_size, tables[0].pool.blocks
        live = [table.live() for table in tables]
        self._counts = np.array([len(indices) for indices in live])
        shape = (len(tables), int(self._counts.max()))
        self._ids, self._base = np.empty(shape, np.uint32), np.full(shape, NOWHERE, np.int32)
        for row, (table, indices) in enumerate(zip(tables, live, strict=True)):
            self._ids[row, : len(indices)] = [table.blocks[i] for i in indices]
            self._ids[row, len(indices) :] = table.blocks[-1]
            self._base[row, : len(indices)] = np.array(indices) * self.block_size
        self._matrices: dict[int, Matrices] = {}
        self._splits: dict[tuple[int, tuple[int, int]], tuple[mx.array, int]] = {}
        self._turns: dict[tuple[Rope, int], mx.array] = {}

    @cached_property
    def ids(self) -> mx.array:
        return mx.array(self._ids)

    @cached_property
    def base(self) -> mx.array:
        return mx.array(self._base)

    @cached_property
    def numbers(self) -> tuple[Integers, Integers]:
        """`ids` and `base` for compiled loops."""
        return self._ids.astype(np.int64), self._base.astype(np.int64)

    @property
    def slots(self) -> int:
        """Slots of a row."""
        return self._ids.shape[1] * self.block_size

    @property
    def start(self) -> int:
        """The position of the first row's first slot."""
        return int(self._base[0, 0])

    def positions(self, row: int) -> Integers:
        """The position of each slot of one row."""
        positions: Integers = (self._base[row][:, None] + np.arange(self.block_size)).reshape(-1)
        return positions

    @cached_property
    def all_positions(self) -> mx.array:
        """The position of each slot of all rows, [rows, slots]; lazy."""
        return (self.base[..., None] + mx.arange(self.block_size)).reshape(len(self._ids), -1)

    def turns(self, rope: Rope, dim: int) -> mx.array:
        """`Rope.table` of all slots, [rows, slots, dim]; lazy."""
        if (rope, dim) not in self._turns:
            table = rope.table(dim, self.base.reshape(-1), self._ids.size, self.block_size)
            self._turns[rope, dim] = table.reshape(len(self._ids), -1, dim)
        return self._turns[rope, dim]

    @property
    def ragged(self) -> bool:
        """Whether so much of it is padding that a list is better."""
        return int(self._ids.size - self._counts.sum()) * 4 > int(self._counts.sum())

    @cached_property
    def pair_list(self) -> "PairList":
        return PairList(self._ids, self._base, self._counts, self._blocks)

    def spread(self, per_row: mx.array) -> mx.array:
        """One value per row, broadcastable to `base`."""
        return per_row[:, None]

    def shape_bias(self, bias: mx.array) -> mx.array:
        """[rows, n, block_size] as it is added to scores [rows, heads, n, G, block_size]."""
        return bias[:, None, :, None]

    def matrices(self, heads: int) -> Matrices:
        """For gather_mm, each [rows, heads, n]: which row of q, which matrix of the pool, which pair."""
        if heads not in self._matrices:
            head = np.arange(heads, dtype=np.uint32)[:, None]
            row = np.arange(len(self._ids), dtype=np.uint32)[:, None, None]
            block = head * np.uint32(self._blocks) + self._ids[:, None, :]
            query = np.broadcast_to(row * heads + head, block.shape)
            pair = np.arange(block.size, dtype=np.uint32).reshape(block.shape)
            self._matrices[heads] = (mx.array(query), mx.array(block), mx.array(pair))
        return self._matrices[heads]

    def split(self, heads: int, reach: tuple[int, int], wanted: int, least: int) -> tuple[mx.array, int]:
        """For the CUDA kernel: [n, blocks per split, splits, *reach, rows, *ids, *base], and how many splits there are.

        There are about `wanted` pieces of work, but none of fewer than `least` tokens.
        """
        if (heads, reach) not in self._splits:
            rows, n = self._ids.shape
            per = max(-(-n * rows * heads // wanted), least // self.block_size, 1)
            sizes = [n, per, -(-n // per), *reach, rows]
            blocks = np.concatenate((sizes, self._ids.reshape(-1), self._base.reshape(-1))).astype(np.int32)
            self._splits[heads, reach] = (mx.array(blocks), sizes[2])
        return self._splits[heads, reach]


class PairList:
    """Pairs of all rows after each other; `index[row]` says where a row's pairs are, except where `padding`."""

    def __init__(self, ids: Integers, base: Integers, counts: Integers, blocks: int) -> None:
        self._blocks = blocks
        column = np.arange(ids.shape[1])
        padding = column >= counts[:, None]
        self._ids = ids[~padding]
        self._row = np.repeat(np.arange(len(ids), dtype=np.uint32), counts)
        first = (np.cumsum(counts) - counts)[:, None]
        self.base = mx.array(base[~padding])
        self.row = mx.array(self._row)
        self.index = mx.array(np.where(padding, 0, first + column).astype(np.uint32))
        self.padding = mx.array(padding)
        self._matrices: dict[int, Matrices] = {}

    def spread(self, per_row: mx.array) -> mx.array:
        """One value per row as one per pair."""
        return per_row[self.row]

    def shape_bias(self, bias: mx.array) -> mx.array:
        """[pairs, block_size] as it is added to scores [pairs, heads, G, block_size]."""
        return bias[:, None, None]

    def matrices(self, heads: int) -> Matrices:
        """For gather_mm, each [pairs, heads]: which row of q, which matrix of the pool, which pair."""
        if heads not in self._matrices:
            head = np.arange(heads, dtype=np.uint32)
            block = head * np.uint32(self._blocks) + self._ids[:, None]
            query = self._row[:, None] * heads + head
            pair = np.arange(block.size, dtype=np.uint32).reshape(block.shape)
            self._matrices[heads] = (mx.array(query), mx.array(block), mx.array(pair))
        return self._matrices[heads]


Pairs = Grid | PairList


def make_grid(tables: list[Table], previous: Grid | None) -> Grid:
    """The grid of `tables`; `previous` if they still hold the same blocks."""
    return previous if previous is not None and previous.key == _key(tables) else Grid(tables)


def _key(tables: list[Table]) -> list[tuple[Table, int]]:
    return [(table, table.version) for table in tables]
