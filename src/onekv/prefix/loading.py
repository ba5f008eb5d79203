"""Reading back from colder tiers: a sequence is *loading* until everything it lacks has been read into its blocks.

Blocks are read a few at a time, between two steps. Meanwhile the sequence holds its blocks like any other, and no other
sequence starts to read the same ones: it waits for this one.

    loading ->  loaded: its blocks are published, it continues from there
            ->  failed: something could not be read; it is released and opened again, without that
            ->  stopped: it is no longer wanted
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from ..memory.kv import KVMemory
from ..memory.pool.blocks import Blocks, shared_memory, state_tensors, write_block
from ..memory.pool.sequence import State
from ..tiers.base import STATES, Target, Tier

log = logging.getLogger("onekv.prefix")

# Parts requested at a time. If other threads cannot copy them into the pool, this many, less than four, are buffered.
AT_ONCE = 64 if shared_memory() else 2

# A part of a node: the node's key, and a group or STATES.
PartName = tuple[bytes, int]


@dataclass(eq=False)
class Loading:
    """A sequence will have `length` tokens stored when the parts in `left` have been read."""

    length: int
    # From which tier, and into which block of its group; recurrent states have no place in the pool.
    left: dict[PartName, tuple[Tier, int]]
    states: list[State] | None = None
    # The keys of what could not be read.
    failed: list[bytes] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return not self.left or bool(self.failed)

    def by_tier(self) -> dict[Tier, list[PartName]]:
        parts: dict[Tier, list[PartName]] = {}
        for name, (tier, _) in self.left.items():
            parts.setdefault(tier, []).append(name)
        return parts


class Loader:
    def __init__(self, memory: KVMemory, now: Callable[[], float] = time.perf_counter) -> None:
        self._memory, self._now = memory, now
        self._blocks = [Blocks(pool) for pool in memory.pools]
        self._states = state_tensors(memory.layout)
        # The oldest first.
        self._open: list[Loading] = []
        # Parts that tiers still keep although they are no longer expected, because `unexpect` raised.
        self._kept: list[tuple[Tier, list[PartName]]] = []

    def reads(self, parts: set[PartName]) -> bool:
        """Whether some of `parts` are being read now."""
        return any(not parts.isdisjoint(loading.left) for loading in self._open)

    def places(self) -> Iterator[tuple[int, int]]:
        """(group, block) of all that is being read now."""
        for loading in self._open:
            for (_, part), (_, block) in loading.left.items():
                if part != STATES:
                    yield part, block

    def start(self, loading: Loading) -> None:
        self._release_kept()
        told: list[tuple[Tier, list[PartName]]] = []
        try:
            for tier, parts in loading.by_tier().items():
                tier.expect(parts)
                told.append((tier, parts))
        except BaseException:
            self._release(told)
            raise
        self._open.append(loading)

    def stop(self, loading: Loading) -> None:
        """Stop reading the rest of it; does nothing if it was stopped before. Never raises."""
        # If reading raises, those that ended before have been stopped without being reported.
        if loading not in self._open:
            return
        self._open.remove(loading)
        self._release(loading.by_tier().items())

    def _release(self, expected: Iterable[tuple[Tier, list[PartName]]]) -> None:
        """Tell tiers what they need not keep any longer.

        This is part of ending a request, also after an error. A tier that breaks its promise and raises must not end
        more than that: it is told again before anything else is read, since what it keeps may be all it has room for.
        """
        for tier, parts in expected:
            try:
                tier.unexpect(parts)
            except Exception:
                log.exception("a tier could not be notified that %d parts will not be read; to be retried", len(parts))
                self._kept.append((tier, parts))

    def _release_kept(self) -> None:
        for tier, parts in list(self._kept):
            # Logged when it failed for the first time.
            with suppress(Exception):
                tier.unexpect(parts)
                self._kept.remove((tier, parts))

    def ready(self, seconds: float) -> bool:
        """Whether something can be read now; waits for that for at most about `seconds`."""
        if self._next() is not None:
            return True
        waits = [(tier, parts) for loading in self._open for tier, parts in loading.by_tier().items()]
        return any(tier.ready(parts, seconds / len(waits)) for tier, parts in waits)

    def _next(self) -> tuple[Loading, Tier, list[PartName]] | None:
        """Some parts that are ready, for the oldest sequence that has any."""
        for loading in self._open:
            for tier, parts in loading.by_tier().items():
                if ready := list(tier.ready(parts)):
                    return loading, tier, ready[:AT_ONCE]
        return None

    def read(self, seconds: float) -> list[Loading]:
        """Read what is ready of what sequences lack, the oldest first, for about `seconds`; gives those that ended,
        stopped.
        """
        self._release_kept()
        ended: list[Loading] = []
        deadline = self._now() + seconds
        while (left := deadline - self._now()) > 0 and (following := self._next()) is not None:
            loading, tier, parts = following
            self.read_parts(loading, tier, parts, left)
            if loading.ended:
                self.stop(loading)
                ended.append(loading)
        return ended

    def read_parts(self, loading: Loading, tier: Tier, parts: list[PartName], seconds: float) -> None:
        """Read some of what is left into its place, or into a buffer and from there into the pool."""
        targets: list[Target] = []
        direct = {part for _, part in parts if part != STATES} if shared_memory() else set()
        for group in direct:
            self._blocks[group].look()
        for key, part in parts:
            into: bytearray | Callable[[memoryview], None]
            block = None if part == STATES else loading.left[key, part][1]
            if block is not None and part in direct:
                into = partial(self._blocks[part].write, block)
            else:
                into = bytearray(self._bytes_of(part))
            targets.append(Target(key, part, into, block))
        for target, read in zip(targets, tier.read(targets, seconds), strict=True):
            if read is None:
                continue
            _, block = loading.left.pop((target.key, target.part))
            if not read:
                loading.failed.append(target.key)
            elif isinstance(target.into, bytearray):
                data = memoryview(target.into)
                if target.part == STATES:
                    loading.states = self._memory.make_states(data)
                else:
                    write_block(self._memory.pools[target.part], block, data)

    def _bytes_of(self, part: int) -> int:
        if part == STATES:
            return sum(tensor.nbytes for tensor in self._states)
        return self._memory.pools[part].block_bytes
