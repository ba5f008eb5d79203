"""From the engine's thread to the event loop: one inbox for all generations of a request.

The engine puts events in and never waits for the reader; they pile up, at most max_tokens of each generation. The
reader takes all that are there at once: if it was slow, or several sequences moved on in one step, it wakes up once.
"""

import asyncio
from collections import deque

from ..engine import End, Event
from ..errors import OneKVError

# More are taken in several turns of the event loop: others want it, too.
MOST_AT_ONCE = 128


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


class Inbox:
    def __init__(self, size: int) -> None:
        """For `size` generations; made, read and closed in the thread of the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[int, Event]] = deque()
        # Generations that have not ended; the engine's thread alone changes it.
        self.open = set(range(size))
        self._closed = self._expired = False
        # Whether the event loop has been asked to wake the reader and has not done so.
        self._waking = False
        self._reader: asyncio.Future[None] | None = None

    def put(self, index: int, event: Event) -> None:
        """Called by the engine's thread, in the order in which things happened to generation `index`."""
        if isinstance(event, End | OneKVError):
            self.open.discard(index)
        self._events.append((index, event))
        # One that is under way sees this event, too. A loop that was closed has nobody left to read.
        if not self._waking and not self._loop.is_closed():
            self._waking = True
            self._loop.call_soon_threadsafe(self._wake)

    def close(self) -> None:
        """Nobody wants the rest: `take` raises ClientGoneError."""
        self._closed = True
        self._wake()

    async def take(self, timeout: float | None = None) -> list[tuple[int, Event]]:
        """What has come, at least one event; nothing if none comes within `timeout` seconds."""
        if self._events:
            await asyncio.sleep(0)
        elif not self._closed:
            await self._wait(timeout)
        if self._closed:
            raise ClientGoneError
        return [self._events.popleft() for _ in range(min(len(self._events), MOST_AT_ONCE))]

    async def _wait(self, timeout: float | None) -> None:
        self._expired = False
        timer = self._loop.call_later(timeout, self._expire) if timeout is not None else None
        try:
            # What woke it may have been taken already.
            while not (self._events or self._closed or self._expired):
                self._reader = self._loop.create_future()
                await self._reader
        finally:
            self._reader = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        self._waking = False
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _expire(self) -> None:
        self._expired = True
        self._wake()
