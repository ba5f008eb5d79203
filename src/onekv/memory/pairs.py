"""All (row, block) pairs of a decode step, as index arrays for the attention over the pool.

They stay valid as long as the tables hold the same blocks. As a `Grid`, [rows, blocks of the longest row], where little
of that is padding; else as a `PairList`, [pairs].
"""

from typing import Any

import mlx.core as mx
import numpy as np

from .table import Table

# A position no query reads: beyond all of them.
NOWHERE = 2**30

Matrices = tuple[mx.array, mx.array, mx.array]
Integers = np.ndarray[Any, Any]


class Grid:
    """`ids[row, i]` is the row's i-th block and `base` the position of its first slot; padding is NOWHERE."""

    def __init__(self, tables: list[Table], ids: Integers, base: Integers) -> None:
        self.key = _key(tables)
        self._blocks, self._ids = tables[0].pool.blocks, ids
        self.base = mx.array(base)
        self._matrices: dict[int, Matrices] = {}

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


class PairList:
    """Pairs of all rows after each other; `index[row]` says where a row's pairs are, except where `padding`."""

    def __init__(self, tables: list[Table], ids: Integers, base: Integers, counts: Integers) -> None:
        self.key = _key(tables)
        self._blocks = tables[0].pool.blocks
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


def make_pairs(tables: list[Table], previous: Pairs | None) -> Pairs:
    """The pairs of `tables`; `previous` if they still hold the same blocks."""
    if previous is not None and previous.key == _key(tables):
        return previous
    live = [table.live() for table in tables]
    counts = np.array([len(indices) for indices in live])
    padding = np.arange(counts.max()) >= counts[:, None]
    ids = np.zeros(padding.shape, np.uint32)
    base = np.full(padding.shape, NOWHERE, np.int32)
    ids[~padding] = [t.blocks[i] for t, indices in zip(tables, live, strict=True) for i in indices]
    base[~padding] = [i * tables[0].pool.block_size for indices in live for i in indices]
    if padding.sum() * 4 <= counts.sum():
        return Grid(tables, ids, base)
    return PairList(tables, ids, base, counts)


def _key(tables: list[Table]) -> list[tuple[Table, int]]:
    return [(table, table.version) for table in tables]
