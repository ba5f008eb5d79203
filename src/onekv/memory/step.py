"""What one forward pass needs to know, built once and used by every layer.

A step is one or several sequences, each with any number of new tokens. The model gets them as rows of equal width,
`count`, the largest number; the padding after a row's own tokens is neither stored nor read, and the output for it is
ignored. For one sequence `offset` is a plain int (some models require that); for several it is an array with one
position per row.

In a step that is `spread`, every new token is a row of its own, with one token at its own position: code that decodes
one token of each of several sequences can then decode several tokens of one. Rows of one sequence have the same table;
all of them are stored before the first one reads, and each reads up to its own position.

Reading is described by slots, the columns of a pool array. For one sequence they are exactly what the queries of this
step may read, in order of position, without padding:

    positions   [0, keep)  [first, length + count)        first = what the rule lets the first query read

For several sequences, each row reads its blocks, padded with its last block to the longest row, and masked. If nothing
is stored yet of any of them (`fresh`), each reads the tokens of the step up to its own.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from .layout import Rule
from .pairs import NOWHERE, Grid, Pairs, make_grid, slot_positions
from .pool.sequence import Sequence
from .pool.table import Table


def visible(rule: Rule, window: int | None, query: Any, key: Any) -> Any:
    """Whether a query position reads a key position; arrays of numpy or MLX, broadcast."""
    mask = key <= query
    if rule.window is not None:
        mask = mask & ((key > query - rule.window) | (key < rule.keep))
    if window is not None:
        mask = mask & (key > query - window)
    return mask


class GroupStep:
    """One group's part of a step."""

    def __init__(self, tables: list[Table], lengths: list[int], counts: list[int], previous: Grid | None) -> None:
        self.tables, self.lengths, self.counts, self.count = tables, lengths, counts, max(counts)
        self.rule = tables[0].rule
        self.block_size = tables[0].pool.block_size
        # Whether it is of one sequence, whose position is a plain number.
        self.alone = len(tables) == 1
        # Whether some of its rows are tokens of one sequence, which read what the others of these store.
        self.repeated = len(set(map(id, tables))) < len(tables)
        # The grid of an earlier step, which may still be right, and that of this one once it is used.
        self._previous = previous
        self.used_grid: Grid | None = None
        self._masks: dict[int, tuple[mx.array, int | None]] = {}
        # Takes the place of attention where the model is only traced.
        self.recorder: Callable[..., mx.array] | None = None
        self._bias: dict[tuple[int | None, mx.Dtype, int], mx.array] = {}
        self._stand_ins: dict[tuple[int, int], mx.array] = {}
        self._angles: dict[Any, mx.array] = {}

    @property
    def offset(self) -> int | mx.array:
        """The position of the first new token, as models ask for it: a number, or for several rows [rows]."""
        return self.lengths[0] if self.alone else self.positions

    @cached_property
    def positions(self) -> mx.array:
        """Each row's position, [rows]."""
        return mx.array(np.array(self.lengths, np.int32))

    def angles(self, dims: int, how: dict[str, Any]) -> mx.array:
        """Cosines and sines by which `mx.fast.rope(x, dims, **how)` turns rows of one token: [rows, dims], float32.

        They are what it makes of pairs of 1 and 0; all layers of a step that turn alike share them.
        """
        key = (dims, *(id(how[name]) if isinstance(how[name], mx.array) else how[name] for name in sorted(how)))
        if key not in self._angles:
            units = np.zeros((len(self.tables), 1, 1, dims), np.float32)
            units[..., slice(0, dims, 2) if how["traditional"] else slice(0, dims // 2)] = 1
            self._angles[key] = mx.fast.rope(mx.array(units), dims, **how).reshape(-1, dims)
        return self._angles[key]

    @property
    def fresh(self) -> bool:
        """Whether all that a prompt's queries read is new: the first chunk of one sequence, or of each of several."""
        return bool(self.lengths) and not any(self.lengths) and (self.alone or self.count > 1)

    @property
    def alike(self) -> bool:
        """Whether all rows read the same positions, so that nothing need be hidden from one that another reads."""
        return self.alone or self.fresh

    @property
    def end(self) -> int:
        """No row reads this position, or one after it."""
        return max(self.lengths) + self.count

    # Writing

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """One sequence: (slot, token, tokens) runs that say where its new tokens go."""
        position, end, size = self.lengths[0], self.lengths[0] + self.count, self.block_size
        spans: list[tuple[int, int, int]] = []
        while position < end:
            slot = self.tables[0].blocks[position // size] * size + position % size
            n = min(size - position % size, end - position)
            if spans and spans[-1][0] + spans[-1][2] == slot:
                spans[-1] = (spans[-1][0], spans[-1][1], spans[-1][2] + n)
            else:
                spans.append((slot, position - self.lengths[0], n))
            position += n
        return spans

    @cached_property
    def new_slots(self) -> mx.array:
        """Several sequences: the slots of all new tokens, row by row, [1, tokens, 1]."""
        size = self.block_size
        slots = [
            table.blocks[position // size] * size + position % size
            for table, length, count in zip(self.tables, self.lengths, self.counts, strict=True)
            for position in range(length, length + count)
        ]
        return mx.array(np.array(slots, np.int32)[None, :, None])

    @property
    def row_slots(self) -> mx.array:
        """Rows of one token: where each goes, [rows]."""
        return self.new_slots.reshape(-1)

    @cached_property
    def new_tokens(self) -> mx.array | None:
        """Several sequences: which of the [rows * count] tokens that the model is given are real; None: all are."""
        if min(self.counts) == self.count:
            return None
        starts = np.arange(len(self.counts)) * self.count
        real = [start + np.arange(count) for start, count in zip(starts, self.counts, strict=True)]
        return mx.array(np.concatenate(real).astype(np.uint32))

    # Reading

    @property
    def first(self) -> int:
        """One sequence: the oldest position read, besides the kept ones."""
        return self.rule.first(self.lengths[0])

    @cached_property
    def run(self) -> tuple[int, int] | None:
        """One sequence whose slots to read are adjacent: (first slot, end); else None."""
        table, size, end = self.tables[0], self.block_size, self.lengths[0] + self.count
        if not self.alone or min(self.rule.keep, self.first) > 0:
            return None
        blocks = table.blocks[self.first // size :]
        if blocks != list(range(blocks[0], blocks[0] + len(blocks))):
            return None
        start = blocks[0] * size + self.first % size
        return start, start + end - self.first

    @cached_property
    def grid(self) -> Grid:
        """The blocks that the step reads."""
        self.used_grid = make_grid(self.tables, self.lengths, self._previous)
        return self.used_grid

    @property
    def pairs(self) -> Pairs:
        """The grid, or a list where that is better to compute with."""
        return self.grid.pair_list if self.grid.ragged else self.grid

    @cached_property
    def cut(self) -> slice | mx.array:
        """Rows that are alike: which of the gathered slots are read."""
        if self.fresh:
            return slice(0, self.count)
        positions = self.grid.positions(0)
        end = self.lengths[0] + self.count
        kept = min(self.rule.keep, self.first)
        wanted = (positions < end) & ((positions >= self.first) | (positions < kept))
        slots = np.flatnonzero(wanted)
        if slots[-1] - slots[0] + 1 == len(slots):
            return slice(int(slots[0]), int(slots[-1]) + 1)
        return mx.array(slots.astype(np.uint32))

    def stand_in(self, heads: int, dim: int, dtype: mx.Dtype) -> mx.array:
        """An array of the shape that reading such a layer would give, and all NaN."""
        if (heads, dim) not in self._stand_ins:
            if self.alone:
                tokens = self.lengths[0] + self.count - self.first + min(self.rule.keep, self.first)
            else:
                tokens = self.grid.slots
            shape = (len(self.tables), heads, tokens, dim)
            self._stand_ins[heads, dim] = mx.broadcast_to(mx.array(mx.nan, dtype), shape)
        return self._stand_ins[heads, dim]

    # Masks

    def make_mask(self, window: int | None, return_array: bool) -> mx.array | str | None:
        """The mask for what `read` gives: as mlx-lm's caches would, but equal however a prompt is cut into chunks."""
        if self.alike:
            # What is after a row's own tokens is later than they are: causality hides it.
            position, end = self.lengths[0], self.lengths[0] + self.count
            spans = [w for w in (window, self.rule.window) if w is not None]
            if self.count == 1 and (window is None or end - self.first <= window):
                return None
            if not return_array and self.count > 1 and (not spans or end <= min(spans)):
                return "causal"
            kept = np.arange(min(self.rule.keep, self.first))
            keys = np.concatenate((kept, np.arange(self.first, end)))
            queries = np.arange(position, end)[:, None]
            return self._own(visible(self.rule, window, queries, keys), window)
        # Lazy: attention over the pool does not need it.
        positions = self.grid.all_positions[:, None, None, :]
        rows = self.positions[:, None, None, None] + mx.arange(self.count)[:, None]
        return self._own(visible(self.rule, window, rows, positions), window)

    def _own(self, mask: np.ndarray | mx.array, window: int | None) -> mx.array:
        array = mx.array(mask) if isinstance(mask, np.ndarray) else mask
        self._masks[id(array)] = (array, window)
        return array

    def owns(self, mask: mx.array | str | None) -> bool:
        """Whether `mask` says no more than this step knows by itself."""
        return mask is None or isinstance(mask, str) or id(mask) in self._masks

    def _window(self, mask: mx.array | str | None) -> int | None:
        """The window that the model asked for when this mask was made."""
        return self._masks[id(mask)][1] if isinstance(mask, mx.array) else None

    def bias(self, mask: mx.array | str | None, dtype: mx.Dtype, pairs: Pairs) -> mx.array:
        """What to add to decode scores of `pairs`, broadcastable to them: 0 for slots that are read, else -inf."""
        window = self._window(mask)
        key = (window, dtype, id(pairs))
        if key not in self._bias:
            query = pairs.spread(self.positions)
            slots = slot_positions(pairs.base, self.block_size)
            seen = visible(self.rule, window, query[..., None], slots)
            bias = mx.where(seen, mx.array(0, dtype), mx.array(-mx.inf, dtype))
            self._bias[key] = pairs.shape_bias(bias)
        return self._bias[key]

    def row_bias(self, mask: mx.array | str | None) -> mx.array:
        """Like `bias`, for all slots of the grid after each other: [rows, slots], float32."""
        positions = self.grid.all_positions
        seen = visible(self.rule, self._window(mask), self.positions[:, None], positions)
        return mx.where(seen, mx.array(0.0), mx.array(-mx.inf))

    def reach(self, mask: mx.array | str | None) -> tuple[int, int] | None:
        """The rule and `mask` as (window, kept tokens); None if one pair of numbers cannot say it."""
        window = self._window(mask)
        if window is None:
            return self.rule.window or NOWHERE, self.rule.keep
        return None if self.rule.keep else (min(window, self.rule.window or NOWHERE), 0)


class Step:
    """Sequence i gets `counts[i]` new tokens; makes room for them.

    `rows` says whose each row of the step is, `lengths` at which position its first token is, and `counts` how many
    of its tokens are real.
    """

    def __init__(
        self, sequences: list[Sequence], counts: list[int], previous: "Step | None" = None, spread: bool = False
    ) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.advance(count)
        self.rows, self.lengths = sequences, [sequence.length for sequence in sequences]
        if spread:
            pairs = list(zip(sequences, counts, strict=True))
            self.rows = [sequence for sequence, count in pairs for _ in range(count)]
            self.lengths = [sequence.length + i for sequence, count in pairs for i in range(count)]
            counts = [1] * len(self.rows)
        self.counts = counts
        self.groups: list[GroupStep] = []
        for g in range(len(sequences[0].tables)):
            tables = [row.tables[g] for row in self.rows]
            grid = previous.groups[g].used_grid if previous is not None else None
            self.groups.append(GroupStep(tables, self.lengths, counts, grid))
