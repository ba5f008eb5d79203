"""Copies of the prefix index that are built only from its events, as in routers.

One is notified of every change at once. The other takes the changes from time to time (`Unsent`), as the thread that
publishes events does: it never sees blocks that were added and removed in between.
"""

from collections import Counter

from ..prefix.cache import PrefixCache
from ..prefix.events import Cleared, Event, Removed, Stored, Unsent
from .model import Violation


class Copies:
    def __init__(self, prefix: PrefixCache) -> None:
        self._prefix = prefix
        self._unsent = Unsent()
        self._now, self._late = _Copy(), _Copy()
        # How many events of each kind there were.
        self.told: Counter[str] = Counter()
        prefix.listen(self._hear)

    def _hear(self, event: Event) -> None:
        self.told[type(event).__name__] += 1
        self._now.apply(event)
        self._unsent.add(event)

    def check(self, late: bool) -> None:
        """What was reported is what there is; with `late`, also for a subscriber that reads now and then."""
        self._now.check(self._prefix)
        if late:
            self._take()
            self._late.check(self._prefix)

    def check_ended(self) -> None:
        """The engine is closed: listeners have been notified that nothing is left."""
        self._take()
        for copy in (self._now, self._late):
            if copy.blocks:
                raise Violation(f"{len(copy.blocks)} blocks were never reported as removed")

    def _take(self) -> None:
        for event in self._unsent.take():
            self._late.apply(event)
        if left := self._unsent.take():
            raise Violation(f"{len(left)} events are given twice")


class _Copy:
    def __init__(self) -> None:
        self.blocks: dict[bytes, Stored] = {}
        # How many blocks follow each.
        self._following: Counter[bytes] = Counter()

    def apply(self, event: Event) -> None:
        if isinstance(event, Cleared):
            if self.blocks:
                raise Violation(f"everything is reported as cleared, but {len(self.blocks)} blocks remain")
        elif isinstance(event, Stored):
            if event.key in self.blocks:
                raise Violation("a block is stored that is there")
            if event.parent is not None and event.parent not in self.blocks:
                raise Violation("a block is stored after one that is not there")
            self.blocks[event.key] = event
            if event.parent is not None:
                self._following[event.parent] += 1
        else:
            self._remove(event)

    def _remove(self, event: Removed) -> None:
        block = self.blocks.pop(event.key, None)
        if block is None:
            raise Violation("a block is removed that is not there")
        if self._following[event.key]:
            raise Violation("a block is removed before what follows it")
        if block.parent is not None:
            self._following[block.parent] -= 1

    def check(self, prefix: PrefixCache) -> None:
        """Found from the roots on, not by the index's own list."""
        found: dict[bytes, tuple[bytes | None, bytes]] = {}
        open_nodes = list(prefix.index.roots.values())
        while open_nodes:
            node = open_nodes.pop()
            open_nodes += node.children.values()
            if node.parent is not None and prefix.index.full(node):
                found[node.key] = (node.parent.key if node.parent.parent is not None else None, node.tokens)
        told = {key: (block.parent, block.tokens) for key, block in self.blocks.items()}
        if told != found:
            missing, left = len(found.keys() - told.keys()), len(told.keys() - found.keys())
            raise Violation(f"{missing} blocks were not reported as stored, {left} not as removed, of {len(found)}")
