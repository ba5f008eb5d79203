"""Buffers for parts on their way out of RAM, within a budget of bytes. Any tier can use it, from any thread.

    taken  ->  filled by the engine's thread, then the tier's until it is stored elsewhere  ->  given back, to be reused

All buffers together, taken or not, use at most `limit` bytes. Its lock is held only briefly; nothing else is locked
meanwhile, so it may be called with a tier's own lock held, unless it has to wait.
"""

from threading import Condition

import numpy as np


class Staging:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        # Bytes of all buffers, and of those that are taken.
        self.total = self.taken = 0
        self.closed = False
        self._free: dict[int, list[memoryview]] = {}
        self._room = Condition()

    def take(self, size: int, wait: bool = False) -> memoryview | None:
        """A buffer of that size, not set to zero. None if there is no room, with `wait` only if there will be none."""
        with self._room:
            while not self.closed and size <= self.limit:
                if (buffer := self._find(size)) is not None:
                    self.taken += size
                    return buffer
                if not wait:
                    break
                self._room.wait()
        return None

    def give(self, buffer: memoryview) -> None:
        with self._room:
            self.taken -= len(buffer)
            self._free.setdefault(len(buffer), []).append(buffer)
            self._room.notify_all()

    def close(self) -> None:
        """Nobody gets a buffer any more, nor waits for one. Those that are taken may still be given back."""
        with self._room:
            self.closed = True
            self._room.notify_all()

    def _find(self, size: int) -> memoryview | None:
        if free := self._free.get(size):
            return free.pop()
        for others in self._free.values():
            while others and self.total + size > self.limit:
                self.total -= len(others.pop())
        if self.total + size > self.limit:
            return None
        self.total += size
        return np.empty(size, np.uint8).data
