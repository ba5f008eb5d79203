"""Changes to the prefix index, for copies of it elsewhere: a router, a test.

The index reports every whole block of tokens that is added or removed to one listener, at once and in order, in the
engine's thread (`Index.listener`, set by `PrefixCache.listen`). Without a listener no events are created. Partial
blocks, which change with every turn and are only found by comparing tokens, are not reported.

A listener must neither block nor raise. `Unsent` is one that keeps changes until another thread takes them:

    engine's thread    add, add, add ...        O(1) each; never waits for the other thread
    another thread     take                     all of it, in an order that can be applied

It holds the difference between what was taken and the current state, not a queue: a block that is added and removed
before anything is taken leaves no trace. So it is bounded by twice the blocks of the index, however slow the other
thread is, and nothing is ever lost.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stored:
    """A block of `tokens` (int32, as in the index) that follows the block `parent`, if there is one before it."""

    key: bytes
    parent: bytes | None
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Removed:
    """The block `key` is gone. Its continuations were removed before."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """The index is empty. Every block has been reported as removed before."""


Event = Stored | Removed | Cleared
Listener = Callable[[Event], None]


class Unsent:
    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        """It begins with `Cleared`: the taker knows nothing yet. `wake` is called when there is something to take."""
        self._wake = wake
        self._lock = threading.Lock()
        # Before everything was cleared, if it was, and since. At most one event for each block.
        self._before: list[Event] = []
        self._cleared = True
        self._since: dict[bytes, Event] = {}
        # Events that were never taken because a later one undid them.
        self.undone = 0

    def add(self, event: Event) -> None:
        with self._lock:
            empty = not self._cleared and not self._since
            if isinstance(event, Cleared):
                # Only what was removed is left of the blocks that were taken, and nothing of others.
                if self._cleared:
                    assert not self._since, "cleared, but blocks are there"
                else:
                    self._before, self._since, self._cleared = list(self._since.values()), {}, True
            elif self._since.pop(event.key, None) is None:
                self._since[event.key] = event
            else:
                # A block is stored when it is not there and removed when it is, and its key stands for all before it:
                # two in a row change nothing.
                self.undone += 2
        if empty:
            self._wake()

    def take(self) -> list[Event]:
        """Everything that has changed since the last call; a block comes before its continuations."""
        with self._lock:
            taken = [*self._before, *([Cleared()] if self._cleared else []), *self._since.values()]
            self._before, self._cleared, self._since = [], False, {}
        return taken
