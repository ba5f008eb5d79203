"""All (row, block) pairs of a step, as index arrays for attention over the pool.

They stay valid as long as the tables hold the same blocks. There is always a `Grid`, [rows, blocks of the longest row];
if rows have very different lengths and most of it would be padding, its `PairList`, [pairs], is more efficient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from .formats.centre import Rope
from .pool import Pool
from .pool.table import Table
from .work import Kernel, Segment, Tokens, Work, find_segments, make_work, rounded

# A position no query reads: beyond all of them.
NOWHERE = 2**30
# Tokens that a thread block reads, at least.
LEAST = 256
# Tokens that several rows begin with, from which on they are read together; 0: each row reads for itself.
SHARED = 256

Made = TypeVar("Made")
# Whether rows of one sequence are read as each would be alone, if there is a kernel for that.
_alike = True


@contextmanager
def reading_together() -> Iterator[None]:
    """Inside, rows of one sequence are read as those of sequences that share a prefix are."""
    global _alike
    _alike = False
    try:
        yield
    finally:
        _alike = True


Matrices = tuple[mx.array, mx.array, mx.array]
Integers = np.ndarray[Any, Any]
Row = list[int] | Integers
# Of each row: its table and that table's version, and the blocks of it that the row reads.
Key = list[tuple[Table, int, int, int]]


class Grid:
    """`ids[row, i]` is the row's i-th block and `base` the position of its first slot.

    Short rows are padded with their last block, at position NOWHERE.
    """

    def __init__(self, ids: Integers, base: Integers, counts: Integers, pool: Pool, from_start: bool) -> None:
        """Of each row the first `counts` blocks are real; `from_start`: all rows begin at position 0."""
        self._ids, self._base, self._counts = ids, base, counts
        self._pool, self.block_size, self._blocks = pool, pool.block_size, pool.blocks
        self.from_start = from_start
        # Of each row, the first so many blocks may be read together with other rows.
        self._shareable = counts.copy()
        # Of what it was made from: stale when that has changed.
        self.key: Key = []
        # What each row would read alone, where some are tokens of one sequence.
        self._tokens: Tokens | None = None
        self._matrices: dict[int, Matrices] = {}
        self._works: dict[tuple[Kernel, int], Work] = {}
        self._turns: dict[tuple[Rope, int], mx.array] = {}
        self._derived: dict[str, Any] = {}

    @classmethod
    def of(cls, tables: list[Table], lengths: list[int], previous: "Grid | None" = None) -> "Grid":
        """The grid of `tables`, made from a `previous` one if that is of the same tables."""
        pool = tables[0].pool
        # Rows whose windows have moved on do not begin with the same blocks.
        grid = cls(*(_updated(tables, previous) or _live(tables)), pool, tables[0].rule.span is None)
        grid.key = _key(tables, lengths)
        firsts: dict[int, int] = {}
        for row, table in enumerate(tables):
            if id(table) in firsts:
                # Both are tokens of one sequence, of which the first does not see all that the other does.
                own = firsts[id(table)]
                grid._shareable[[own, row]] = lengths[own] // pool.block_size
            else:
                firsts[id(table)] = row
        if len(firsts) < len(tables):
            grid._tokens = _tokens(tables, lengths, grid._counts, [firsts[id(table)] for table in tables])
        return grid

    def segments(self, least: int) -> list[Segment]:
        """Blocks that several rows begin with, `least` tokens or more, and what each row has of its own."""
        blocks = max(1, least // self.block_size)
        if not self.from_start or len(self._ids) == 1:
            return []
        return find_segments(self._ids, self._counts, blocks, self._shareable)

    def part(self, firsts: list[int]) -> "Grid":
        """Without the first so many blocks of each row."""
        left = [slice(first, count) for first, count in zip(firsts, self._counts, strict=True)]
        ids, base = ([array[row, some] for row, some in enumerate(left)] for array in (self._ids, self._base))
        return Grid(*_padded(ids, base), self._pool, False)

    def derived(self, name: str, make: "Callable[[Grid], Made]") -> "Made":
        """What a backend makes of the grid once, under a name of its own."""
        if name not in self._derived:
            self._derived[name] = make(self)
        made: Made = self._derived[name]
        return made

    def blocks_of(self, segment: Segment) -> list[int]:
        """Where the blocks of a segment lie in the pool."""
        blocks: list[int] = self._ids[segment.rows[0], segment.first : segment.end].tolist()
        return blocks

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
        return int(self._ids.shape[1]) * self.block_size

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
        return slot_positions(self.base, self.block_size).reshape(len(self._ids), -1)

    def turns(self, rope: Rope, dim: int) -> mx.array:
        """`Rope.table` of all slots, [rows, slots, dim]; lazy."""
        if (rope, dim) not in self._turns:
            table = rope.table(dim, self.base.reshape(-1), self._ids.size, self.block_size)
            self._turns[rope, dim] = table.reshape(len(self._ids), -1, dim)
        return self._turns[rope, dim]

    @property
    def rows(self) -> tuple[Integers, Integers, Integers]:
        """What it was made from."""
        return self._ids, self._base, self._counts

    @property
    def width(self) -> int:
        """Blocks of the longest row, rounded up so that it stays while they grow."""
        return rounded(self._ids.shape[1])

    def wide_ids(self, rows: int) -> mx.array:
        """`ids` with more padding: `rows` rows of `width` blocks."""
        return self.derived(f"{rows} rows of ids", lambda grid: mx.array(_wider(grid._ids, rows, grid.width, **_IDS)))

    def wide_base(self, rows: int) -> mx.array:
        """`base` with as much padding."""
        return self.derived(
            f"{rows} rows of base", lambda grid: mx.array(_wider(grid._base, rows, grid.width, **_BASE))
        )

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

    def work(self, kernel: Kernel, rows: int | None = None) -> Work:
        """For the CUDA kernels. With `rows`, there are that many: those after the grid's own are padding."""
        rows = rows or len(self._ids)
        if (kernel, rows) not in self._works:
            size, padding = self.block_size, rows - len(self._ids)
            shared = SHARED // size if self.from_start else 0
            self._works[kernel, rows] = make_work(
                self._ids, self._base, self._counts, kernel, LEAST // size, shared, padding, self._tokens
            )
        return self._works[kernel, rows]


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


def slot_positions(base: mx.array, block_size: int) -> mx.array:
    """The position of each slot of blocks that begin at `base`, [..., block_size]; lazy."""
    return base[..., None] + mx.arange(block_size)


def _padded(ids: Sequence[Row], base: Sequence[Row]) -> tuple[Integers, Integers, Integers]:
    """Rows of blocks as `ids` and `base` of a grid, and how many of each row are real."""
    counts = np.array([len(row) for row in ids])
    shape = (len(ids), int(counts.max()))
    all_ids, all_base = np.empty(shape, np.uint32), np.full(shape, NOWHERE, np.int32)
    for row, count in enumerate(counts):
        all_ids[row, :count], all_ids[row, count:] = ids[row], ids[row][-1]
        all_base[row, :count] = base[row]
    return all_ids, all_base, counts


# How rows of a grid are padded: with their last block, at position NOWHERE.
_IDS: dict[str, Any] = {"mode": "edge"}
_BASE: dict[str, Any] = {"constant_values": NOWHERE}


def _wider(array: Integers, rows: int, width: int, **padding: Any) -> Integers:
    """A copy with more padding: `rows` rows of `width` blocks."""
    return np.pad(array, ((0, rows - len(array)), (0, width - array.shape[1])), **padding)


def _live(tables: list[Table]) -> tuple[Integers, Integers, Integers]:
    """The blocks that `tables` hold, as `_padded` gives them."""
    live = [table.live() for table in tables]
    ids = [[table.blocks[i] for i in indices] for table, indices in zip(tables, live, strict=True)]
    return _padded(ids, [np.array(indices) * tables[0].pool.block_size for indices in live])


def _updated(tables: list[Table], previous: Grid | None) -> tuple[Integers, Integers, Integers] | None:
    """The same, where `previous` is of these tables, each from its start: only rows that have changed are made anew."""
    if previous is None or not previous.from_start or len(previous.key) != len(tables):
        return None
    if any(table is not key[0] for table, key in zip(tables, previous.key, strict=True)):
        return None
    changed = [row for row, table in enumerate(tables) if table.version != previous.key[row][1]]
    ids, base, counts = previous.rows
    counts = counts.copy()
    counts[changed] = [len(tables[row].blocks) for row in changed]
    width = int(counts.max())
    ids = _wider(ids[:, :width], len(ids), width, **_IDS)
    base = _wider(base[:, :width], len(base), width, **_BASE)
    for row in changed:
        blocks, count = tables[row].blocks, counts[row]
        ids[row, :count], ids[row, count:] = blocks, blocks[-1]
        base[row, :count], base[row, count:] = np.arange(count) * previous.block_size, NOWHERE
    return ids, base, counts


def make_grid(tables: list[Table], lengths: list[int], previous: Grid | None) -> Grid:
    """The grid of `tables`; `previous` if they still hold the same blocks."""
    if previous is not None and previous.key == _key(tables, lengths):
        return previous
    return Grid.of(tables, lengths, previous)


def _key(tables: list[Table], lengths: list[int]) -> Key:
    """The blocks of each row, and which of them it reads itself."""
    return [(table, table.version, *_own(table, length)) for table, length in zip(tables, lengths, strict=True)]


def _own(table: Table, position: int) -> tuple[int, int]:
    """From which block on a query at `position` reads, besides kept ones, and where that ends."""
    size = table.pool.block_size
    return table.rule.first(position) // size, position // size + 1


def _tokens(tables: list[Table], lengths: list[int], counts: Integers, firsts: list[int]) -> Tokens:
    """What each row would read alone of the `counts` blocks that its table has."""
    own = [_own(table, length) for table, length in zip(tables, lengths, strict=True)]
    begins = np.array([max(0, begin - table.first) for table, (begin, _) in zip(tables, own, strict=True)])
    behind = np.array([len(table.blocks) - end for table, (_, end) in zip(tables, own, strict=True)])
    # Kept blocks come before what is forgotten: what is left is no run.
    runs = not tables[0].kept or not begins.any()
    return Tokens(firsts, begins, counts - behind, runs and _alike)
