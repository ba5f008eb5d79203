"""A decode step as a compiled function sees it: placeholder arrays for everything that changes from step to step.

Positions, blocks and work are inputs of the function, and so are the pool's arrays: a compiled function that kept one
as a constant would make the next write copy it. Everything else follows from the shapes of the inputs, so the function
serves every step with these shapes (`GroupShape`). The number of rows is rounded up, too: padding rows have position
-1, for which nothing is read or stored. A traced step has no concrete numbers: code that needs one, or writes to the
pool with an MLX operation, cannot be compiled, and gets Untraceable.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import mlx.core as mx

from .attention.turns import UNIT
from .pairs import slot_positions
from .step import GroupStep, Step
from .work import Kernel, Shape, Work

# The kernels whose works the layers of a group ask for.
Keys = list[Kernel]
# The ids and base of `Grid.wide`, and the tables of works.
Inputs = tuple[mx.array, mx.array, list[mx.array]]


class Untraceable(Exception):
    """A step does something that a compiled function cannot."""


class KeyAdded(Untraceable):
    """A layer requests a work list that was not requested before; it is available the next time."""


@dataclass(frozen=True)
class GroupShape:
    """What of one group's part of a step a compiled function depends on."""

    blocks: tuple[int, ...]
    works: tuple[Shape, ...]
    end: int


class TracedGrid:
    """Stands for a `Grid`, for what kernels and masks need of it."""

    def __init__(self, inputs: Inputs, shape: GroupShape, keys: Keys, block_size: int) -> None:
        self.ids, self.base, tables = inputs
        self.block_size, self._keys = block_size, keys
        self._works = [Work(table, work) for table, work in zip(tables, shape.works, strict=True)]

    @property
    def slots(self) -> int:
        return self.ids.shape[1] * self.block_size

    @cached_property
    def all_positions(self) -> mx.array:
        return slot_positions(self.base, self.block_size).reshape(self.base.shape[0], -1)

    def work(self, kernel: Kernel, rows: int | None = None) -> Work:
        if kernel not in self._keys:
            self._keys.append(kernel)
            raise KeyAdded
        return self._works[self._keys.index(kernel)]

    def __getattr__(self, name: str) -> NoReturn:
        raise Untraceable(f"a layer needs the {name} of a step")


class TracedGroup(GroupStep):
    """A group's part of a step of as many rows as `positions` has: those after the group's own are padding."""

    def __init__(self, group: GroupStep, positions: mx.array, inputs: Inputs, shape: GroupShape, keys: Keys) -> None:
        padding = len(positions) - len(group.tables)
        super().__init__(group.tables + group.tables[-1:] * padding, [], group.counts + [1] * padding, None)
        self.repeated = group.repeated
        self.alone, self.positions, self._end = False, positions, shape.end
        self.grid = TracedGrid(inputs, shape, keys, self.block_size)  # type: ignore[assignment]

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
    ids, base = group.grid.wide(rows)
    works = [group.grid.work(key, rows) for key in keys]
    shape = GroupShape(ids.shape, tuple(work.shape for work in works), -(-group.end // UNIT) * UNIT)
    return (ids, base, [work.table for work in works]), shape
