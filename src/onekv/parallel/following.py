"""KV memory of a follower: tables and states are whatever rank 0 says.

Every change of tables comes with a digest of the result. On a mismatch the rank fails, instead of reading other blocks
than rank 0.
"""

from collections.abc import Callable

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..errors import ParallelError
from ..memory.layout import Layout
from ..memory.pool import Pool
from ..memory.pool.sequence import Sequence, State
from ..memory.pool.table import FORGOTTEN, Table
from .guard import Guard
from .sharded import ShardedMemory, digest

# Of a table: how many leading blocks are unchanged, and the blocks after these.
Change = tuple[int, list[int]]


class FollowingTable(Table):
    """A copy of rank 0's table; allocates and frees nothing."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.rule = pool, pool.group.rule
        self.blocks: list[int] = []
        self.kept = -(-self.rule.keep // pool.block_size)
        self.first = self.version = 0

    def set(self, same: int, following: list[int]) -> None:
        self.blocks[same:] = following
        self.first = max((i + 1 for i, block in enumerate(self.blocks) if block == FORGOTTEN), default=0)
        self.version += 1


class FollowingSequence(Sequence):
    def __init__(self, pools: list[Pool]) -> None:
        self.following = [FollowingTable(pool) for pool in pools]
        self.tables = [*self.following]
        self.length, self.anchor, self.states = 0, None, []

    def advance(self, count: int) -> None:
        """Rank 0 has allocated the blocks."""

    def close(self) -> None:
        """Nothing to free."""


class _Dropped(Exception):
    """Rank 0 has withdrawn the pass."""


class FollowingMemory(ShardedMemory):
    def __init__(
        self, guard: Guard, layout: Layout, blocks: tuple[int, ...], block_size: int, chunk: int, kernels: bool
    ) -> None:
        super().__init__(guard, layout, blocks, block_size, chunk, kernels)
        self._sequences: dict[int, FollowingSequence] = {}
        # Recurrent states by rank 0's numbers.
        self._states: dict[int, list[State]] = {}

    def _sequence(self, number: int) -> FollowingSequence:
        if number not in self._sequences:
            self._sequences[number] = FollowingSequence(self.pools)
            self._open.add(self._sequences[number])
        return self._sequences[number]

    def end(self, number: int) -> None:
        """Drop a sequence, which may never have been part of a pass."""
        if number in self._sequences:
            self.close(self._sequences.pop(number))

    # Passes

    def change(self, tables: list[tuple[int, list[Change]]], expected: str) -> None:
        """Apply changes to the tables of some sequences; `expected` is the digest of the result."""
        changed: list[Sequence] = []
        for number, changes in tables:
            sequence = self._sequence(number)
            for table, each in zip(sequence.following, changes, strict=True):
                table.set(*each)
            changed.append(sequence)
        if digest(changed) != expected:
            raise ParallelError("block tables differ from those of rank 0")

    def run_told(
        self,
        model: Module,
        tokens: mx.array,
        rows: list[tuple[int, int]],
        counts: list[int],
        spread: bool,
        logits: bool,
        confirmed: Callable[[], bool],
    ) -> None:
        """Build a pass, and evaluate it once rank 0 has `confirmed` it. `rows` are sequences with their lengths."""
        sequences: list[Sequence] = []
        for number, length in rows:
            sequences.append(sequence := self._sequence(number))
            sequence.length = length
        try:
            with self.forgettable(), self.step(sequences, counts, spread) as caches:
                failed: Exception | None = None
                try:
                    out = model(tokens, cache=caches)
                except Exception as error:  # noqa: BLE001  if rank 0 raised the same, it withdraws the pass
                    failed = error
                if not confirmed():
                    raise _Dropped
                if failed is not None:
                    raise ParallelError(f"building a pass failed on this rank only: {failed}") from failed
        except _Dropped:
            return
        self.compute(out, logits)

    # Recurrent states

    def keep(self, number: int, states: list[State]) -> None:
        self._states[number] = states

    def keep_of(self, number: int, sequence: int) -> None:
        self.keep(number, self.states_of(self._sequence(sequence)))

    def kept(self, number: int) -> list[State]:
        return self._states[number]

    def restore_kept(self, sequence: int, number: int) -> None:
        self.restore(self._sequence(sequence), self._states[number])

    def forget(self, numbers: list[int]) -> None:
        for number in numbers:
            del self._states[number]
