"""KV memory of rank 0: every change to its arrays is also sent to the followers.

A pass takes two messages. `pass` describes it: tokens, rows, and changes to their block tables. All ranks build the
graph concurrently. Then rank 0 confirms or withdraws it:

    rank 0      | pass -> | build        | go -> | evaluate, in lockstep through collectives
    followers   |         | build        |       | evaluate
                              \\_ raised on rank 0: drop ->  all ranks discard the graph

Hence an exception during building, which self-tests provoke on purpose, only concerns rank 0's caller. A failure during
evaluation ends all ranks (guard.py).

Recurrent states are numbered: each rank keeps its own part of a snapshot under the same number, for as long as rank 0's
`NumberedStates` object is referenced.
"""

import weakref
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..memory.layout import Group, Layout
from ..memory.pool import Pool
from ..memory.pool.sequence import Sequence, State
from .links import Links
from .sharded import ShardedMemory, digest


class LeadingPool(Pool):
    """Copies and erases blocks on all ranks."""

    def __init__(self, group: Group, blocks: int, block_size: int, number: int, links: Links) -> None:
        """`number` is the group's index in the layout."""
        super().__init__(group, blocks, block_size)
        self._number, self._links = number, links

    def copy(self, source: int, target: int) -> None:
        self._links.tell("copy", group=self._number, source=source, target=target)
        super().copy(source, target)

    def erase(self, blocks: list[int]) -> None:
        # Followers do not know which blocks are in use.
        free = [block for block in blocks if not (self.references[block] or self.cached[block])]
        self._links.tell("erase", group=self._number, blocks=free)
        super().erase(free)


class NumberedStates(list[State]):
    """A sequence's recurrent states, of which every follower keeps its own part under the same number."""

    def __init__(self, number: int, states: list[State]) -> None:
        super().__init__(states)
        self.number = number


class _Told:
    """What followers know about a sequence."""

    def __init__(self, number: int, groups: int) -> None:
        self.number = number
        self.blocks: list[list[int]] = [[] for _ in range(groups)]
        self.versions: list[int] = []


class LeadingMemory(ShardedMemory):
    def __init__(
        self, links: Links, layout: Layout, blocks: tuple[int, ...], block_size: int, chunk: int, kernels: bool
    ) -> None:
        self._links = links
        self._told: dict[Sequence, _Told] = {}
        self._opened = 0
        self._told_direct: list[bool] = []
        # The last number given to recurrent states, and numbers that are no longer in use.
        self._kept = 0
        self._unkept: list[int] = []
        super().__init__(links.guard, layout, blocks, block_size, chunk, kernels)

    def _pool(self, number: int, group: Group, blocks: int) -> Pool:
        return LeadingPool(group, blocks, self.block_size, number, self._links)

    def open(self, max_length: int, prefixes: list[list[int]] | None = None) -> Sequence:
        sequence = super().open(max_length, prefixes)
        self._told[sequence] = _Told(self._opened, len(self.pools))
        self._opened += 1
        return sequence

    def close(self, sequence: Sequence) -> None:
        super().close(sequence)
        if (told := self._told.pop(sequence, None)) is not None:
            self._links.tell("close", sequence=told.number)

    def close_all(self) -> None:
        self._links.part()

    # Passes

    def run(
        self,
        model: Module,
        tokens: mx.array,
        sequences: list[Sequence],
        counts: list[int],
        spread: bool = False,
        logits: bool = True,
    ) -> mx.array:
        # As the step would do; here already, so that the message has the new blocks.
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.advance(count)
        rows = [[self._told[sequence].number, sequence.length] for sequence in sequences]
        with self._guard.busy(f"a pass over {sum(counts)} tokens"):
            step = {"tokens": tokens.tolist(), "rows": rows, "counts": counts, "spread": spread, "logits": logits}
            self._links.tell("pass", **step, **self._changes(sequences))
            try:
                with self.forgettable():
                    out = super().run(model, tokens, sequences, counts, spread, logits)
            except BaseException:
                self._links.tell("drop")
                raise
            self._links.tell("go")
            self.compute(out, logits)
        return out

    def _changes(self, sequences: list[Sequence]) -> dict[str, Any]:
        """What followers do not know yet."""
        fields: dict[str, Any] = {}
        if self._unkept:
            fields["unkept"], self._unkept[:] = list(self._unkept), []
        if self.direct != self._told_direct:
            fields["direct"] = self._told_direct = self.direct
        changed = [each for each in sequences if self._told[each].versions != [t.version for t in each.tables]]
        if changed:
            fields["tables"] = [[self._told[each].number, self._change(each)] for each in changed]
            fields["digest"] = digest(changed)
        return fields

    def _change(self, sequence: Sequence) -> list[tuple[int, list[int]]]:
        """For each table, how many leading blocks are unchanged, and the blocks after these."""
        told, before = self._told[sequence], self._told[sequence].blocks
        told.versions = [table.version for table in sequence.tables]
        told.blocks = [list(table.blocks) for table in sequence.tables]
        same = [_common(old, new) for old, new in zip(before, told.blocks, strict=True)]
        return [(count, blocks[count:]) for count, blocks in zip(same, told.blocks, strict=True)]

    # Recurrent states

    def keep_states(self, sequence: Sequence) -> list[State]:
        states = self._numbered(super().keep_states(sequence))
        self._links.tell("keep", sequence=self._told[sequence].number, number=states.number)
        return states

    def make_states(self, data: memoryview) -> list[State]:
        """From what was just read from the disk tiers of all ranks."""
        states = self._numbered(super().make_states(data))
        self._links.tell("keep_read", number=states.number)
        return states

    def restore(self, sequence: Sequence, states: list[State]) -> None:
        assert isinstance(states, NumberedStates), "followers have no such states"
        self._links.tell("restore", sequence=self._told[sequence].number, number=states.number)
        super().restore(sequence, states)

    def _numbered(self, states: list[State]) -> NumberedStates:
        self._kept += 1
        numbered = NumberedStates(self._kept, states)
        # Sent with the next pass.
        weakref.finalize(numbered, self._unkept.append, self._kept).atexit = False
        return numbered


def _common(before: list[int], now: list[int]) -> int:
    """The number of leading blocks that are the same."""
    pairs = enumerate(zip(before, now, strict=False))
    return next((index for index, (old, new) in pairs if old != new), min(len(before), len(now)))
