"""A decode step as a compiled function sees it: placeholder arrays for everything that changes from step to step.

Positions, blocks and work are inputs of the function, and so are the pool's arrays: a compiled function that kept one
as a constant would make the next write copy it. Everything else follows from the shapes of the inputs, so the function
serves every step with these shapes (`GroupShape`). The number of rows is rounded up, too: padding rows have position
-1, for which nothing is read or stored. A traced step has no concrete numbers: code that needs one, or writes to the
pool with an MLX operation, cannot be compiled, and gets Untraceable.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NoReturn

import mlx.core as mx

from .attention.turns import UNIT
from .pairs import NOWHERE, slot_positions
from .step import GroupStep, Step
from .work import Kernel, Shape, Work

# `Grid.wide_ids` if they are asked for, `Grid.wide_base` unless it follows from positions, and the tables of works.
Inputs = tuple[list[mx.array], list[mx.array], list[mx.array]]


class Untraceable(Exception):
    """A step does something that a compiled function cannot."""


class KeyAdded(Untraceable):
    """A layer requests what was not requested before; it is available the next time."""


@dataclass
class Keys:
    """What the layers of a group ask for: work for these kernels, and whether they ask where blocks lie."""

    kernels: list[Kernel] = field(default_factory=list)
    ids: bool = False


@dataclass(frozen=True)
class GroupShape:
    """What of one group's part of a step a compiled function depends on; `blocks` is [rows, blocks of the longest]."""

    blocks: tuple[int, int]
    works: tuple[Shape, ...]
    end: int


class TracedGrid:
    """Stands for a `Grid`, for what kernels and masks need of it."""

    def __init__(self, inputs: Inputs, shape: GroupShape, keys: Keys, block_size: int, positions: mx.array) -> None:
        self._ids, self._base, tables = inputs
        self.block_size, self._blocks, self._keys, self._positions = block_size, shape.blocks, keys, positions
        self._works = [Work(table, work) for table, work in zip(tables, shape.works, strict=True)]

    @property
    def slots(self) -> int:
        return self._blocks[1] * self.block_size

    @property
    def ids(self) -> mx.array:
        if not self._ids:
            self._keys.ids = True
            raise KeyAdded
        return self._ids[0]

    @cached_property
    def base(self) -> mx.array:
        if self._base:
            return self._base[0]
        # All rows begin at position 0.
        starts = mx.arange(0, self.slots, self.block_size)
        return mx.where(starts <= self._positions[:, None], starts, NOWHERE)

    @cached_property
    def all_positions(self) -> mx.array:
        return slot_positions(self.base, self.block_size).reshape(self._blocks[0], -1)

    def work(self, kernel: Kernel, rows: int | None = None) -> Work:
        if kernel not in self._keys.kernels:
            self._keys.kernels.append(kernel)
            raise KeyAdded
        return self._works[self._keys.kernels.index(kernel)]

    def __getattr__(self, name: str) -> NoReturn:
        raise Untraceable(f"a layer needs the {name} of a step")


class TracedGroup(GroupStep):
    """A group's part of a step of as many rows as `positions` has: those after the group's own are padding."""

    def __init__(self, group: GroupStep, positions: mx.array, inputs: Inputs, shape: GroupShape, keys: Keys) -> None:
        padding = len(positions) - len(group.tables)
        super().__init__(group.tables + group.tables[-1:] * padding, [], group.counts + [1] * padding, None)
        self.repeated = group.repeated
        self.alone, self.positions, self._end = False, positions, shape.end
        self.grid = TracedGrid(inputs, shape, keys, self.block_size, positions)  # type: ignore[assignment]

    @property
    def end(self) -> int:
        return self._end

    @property
    def first(self) -> int:
        raise Untraceable("the model needs the first position that a step reads")

    @cached_property
    def row_slots(self) -> mx.array:
        begin, at = self.grid.base, self.positions[:, None]
        here = (begin <= at) & (at < begin + self.block_size)
        slots = self.grid.ids.astype(mx.int32) * self.block_size + at - begin
        # -1 for padding, which is nowhere.
        return mx.where(here, slots + 1, 0).sum(axis=1) - 1

    @property
    def new_slots(self) -> mx.array:
        raise Untraceable("new tokens are stored by an MLX operation")


class TracedStep(Step):
    def __init__(self, step: Step, groups: list[TracedGroup]) -> None:
        self.rows, self.lengths, self.counts, self.groups = step.rows, step.lengths, step.counts, list(groups)


def inputs_of(group: GroupStep, keys: Keys, rows: int) -> tuple[Inputs, GroupShape]:
    """What a compiled function of `rows` rows is given of a group, and what of that decides which function it is."""
    grid = group.grid
    ids = [grid.wide_ids(rows)] if keys.ids else []
    base = [] if grid.from_start else [grid.wide_base(rows)]
    works = [grid.work(kernel, rows) for kernel in keys.kernels]
    shape = GroupShape((rows, grid.width), tuple(work.shape for work in works), -(-group.end // UNIT) * UNIT)
    return (ids, base, [work.table for work in works]), shape
