"""Tables of RoPE for the positions that steps read, shared by all layers that rotate their keys in the same way.

Without a window, rows start at position 0: one table, which grows by `UNIT` positions when it is too short, serves all
steps. With a window, a table is built for the blocks of a step and kept as long as they stay the same.
"""

import mlx.core as mx
import numpy as np

from ..formats.centre import Rope
from ..step import GroupStep

# Positions by which a table grows.
UNIT = 1024


class Turns:
    def __init__(self) -> None:
        self._tables: dict[tuple[Rope, int], mx.array] = {}
        self._starts: dict[tuple[Rope, int], mx.array] = {}

    def table(self, step: GroupStep, rope: Rope, dim: int) -> mx.array:
        """`Rope.table` for all slots of the step's blocks, [rows or 1, slots, dim]; lazy."""
        if step.rule.span is not None:
            return step.grid.turns(rope, dim)
        slots = step.grid.slots
        table = self._tables.get((rope, dim))
        if table is None or table.shape[1] < slots:
            table = self._tables[rope, dim] = rope.table(dim, 0, 1, -(-slots // UNIT) * UNIT)
        return table[:, :slots]

    def starts(self, rope: Rope, dim: int, length: int) -> mx.array:
        """Cosine and sine of all pairs at every 16th position below `length`, and on: [positions / 16, dim / 2, 2]."""
        starts = self._starts.get((rope, dim))
        if starts is None or starts.shape[0] * 16 < length:
            turned = np.arange(0, -(-length // UNIT) * UNIT, 16)[:, None] * rope.angles(dim)
            starts = mx.array(np.stack([np.cos(turned), np.sin(turned)], axis=-1).astype(np.float16))
            self._starts[rope, dim] = starts
        return starts
