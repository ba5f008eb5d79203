"""The disk tiers of all ranks, as one tier for rank 0's engine.

Each rank has its own folder with its own heads of every block. Rank 0 decides what is offered, read, touched and
dropped; followers do the same with theirs, at the same point between passes.

    find, tails    what rank 0 has, minus what any other rank lacks
    offer          fire and forget: if a rank has no buffer left, its part is lost, and `find` does not return the node
    read           all ranks read concurrently. If any of them fails, the part counts as unreadable, and all drop it

Contents may differ between ranks, after a crash or because folders evict independently; `find` accounts for that.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from mlx.nn.layers.base import Module

from ..config import Settings
from ..memory.plan import Plan
from ..memory.pool.blocks import BlockContent, StatesContent
from ..tiers.base import Address, Entry, Target, TierStats
from ..tiers.disk import DiskTier
from ..tiers.folder import rank_folder
from ..tiers.opening import open_tier, stored_as
from ..tiers.turns import TurnsFile
from .leading import NumberedStates
from .links import Links

# Parts per read: between two reads the engine checks whether its time for loading is up.
AT_ONCE = 8


def open_rank_tier(settings: Settings, plan: Plan, model: Module, name: str, rank: int, ranks: int) -> DiskTier | None:
    """The disk tier of one rank, in a folder of its own; None if `settings` say that there is none."""
    stored = stored_as(model, plan) if settings.disk_cache is not None else ""
    return open_tier(settings, plan, stored, name, inner=rank_folder(rank, ranks))


class RankedTier:
    def __init__(self, tier: DiskTier, links: Links) -> None:
        """`tier` is rank 0's own."""
        self._tier, self._links = tier, links

    @property
    def turns(self) -> TurnsFile:
        return self._tier.turns

    # Looking up

    def find(self, keys: Sequence[bytes], seconds: float = 0.0) -> dict[bytes, Entry]:
        found = self._tier.find(keys, seconds)
        return {entry.address.key: entry for entry in self._common(list(found.values()))}

    def tails(self, parent: bytes, seconds: float = 0.0) -> list[Entry]:
        return self._common(self._tier.tails(parent, seconds))

    def _common(self, entries: list[Entry]) -> list[Entry]:
        """Reduced to the parts that all ranks have."""
        if not entries:
            return []
        with self._links.guard.busy("a lookup in all disk caches"):
            self._links.tell("has", keys=[entry.address.key.hex() for entry in entries])
            others = self._links.answers()
        common = []
        for index, entry in enumerate(entries):
            if parts := entry.parts.intersection(*(parts[index] for parts in others)):
                common.append(Entry(entry.address, parts))
        return common

    def has(self, key: bytes, part: int) -> bool:
        return self._tier.has(key, part)

    def recent(self, count: int) -> list[Address]:
        return self._tier.recent(count)

    # Out

    def offer(self, address: Address, part: int, fill: Callable[[memoryview], None], wait: bool = False) -> bool:
        where = {"key": address.key.hex(), "parent": address.parent.hex(), "start": address.start}
        place = {"tokens": address.tokens.hex(), "part": part, "place": _place(fill)}
        self._links.tell("offer", **where, **place, wait=wait)
        return self._tier.offer(address, part, fill, wait)

    def wants(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        return self._tier.wants(keys)

    # In

    def expect(self, parts: Sequence[tuple[bytes, int]]) -> None:
        self._links.tell("expect", parts=_named(parts))
        self._tier.expect(parts)

    def unexpect(self, parts: Sequence[tuple[bytes, int]]) -> None:
        self._links.tell("unexpect", parts=_named(parts))
        self._tier.unexpect(parts)

    def ready(self, parts: Sequence[tuple[bytes, int]], seconds: float = 0.0) -> Sequence[tuple[bytes, int]]:
        return self._tier.ready(parts, seconds)[:AT_ONCE]

    def read(self, targets: Sequence[Target], seconds: float = math.inf) -> list[bool | None]:
        """Reads all of `targets`, regardless of `seconds`: there are only a few (`ready`)."""
        with self._links.guard.busy("reading from all disk caches"):
            self._links.tell("read", parts=[[target.key.hex(), target.part, target.block] for target in targets])
            answers = [self._tier.read(targets), *self._links.answers()]
        whole = [all(some) for some in zip(*answers, strict=True)]
        if broken := [target.key for target, read in zip(targets, whole, strict=True) if not read]:
            self.drop(broken)
        return [*whole]

    # What is there

    def touch(self, keys: Sequence[bytes]) -> None:
        self._links.tell("touch", keys=[key.hex() for key in keys])
        self._tier.touch(keys)

    def computed(self, tokens: int, seconds: float) -> None:
        self._tier.computed(tokens, seconds)

    def drop(self, keys: Sequence[bytes], wrong: bool = False) -> None:
        self._links.tell("forget", keys=[key.hex() for key in keys])
        self._tier.drop(keys)

    def clear(self) -> None:
        self._links.tell("clear")
        self._tier.clear()

    def flush(self) -> None:
        self._links.tell("flush")
        self._tier.flush()
        self._links.answers()

    def stats(self) -> TierStats:
        return self._tier.stats()

    def close(self) -> None:
        """Followers close theirs when the ranks shut down."""
        self._tier.close()


def _named(parts: Sequence[tuple[bytes, int]]) -> list[list[Any]]:
    return [[key.hex(), part] for key, part in parts]


def _place(fill: Callable[[memoryview], None]) -> int:
    """What `fill` copies, as followers know it: a block id, or the number of recurrent states."""
    if isinstance(fill, StatesContent):
        assert isinstance(fill.states, NumberedStates), "followers have no such states"
        return fill.states.number
    assert isinstance(fill, BlockContent), "followers cannot find this content"
    return fill.block
