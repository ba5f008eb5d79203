"""Delivers events from the engine's thread to the event loop: one inbox for all requests of a call.

    engine's thread   Job.emit -> Inbox.put -> Post: at most one pending wake-up of the loop, for all inboxes
    event loop        Post -> the waiting readers -> Inbox.take: everything that has arrived

The engine adds events and never waits for the reader; at most max_tokens of them per request can accumulate. The reader
takes all of them at once, so it wakes up only once if it was slow or if several sequences advanced in one step.
"""

import asyncio
from collections import deque

from .engine import End, Event
from .errors import OneKVError

# More are taken in several turns of the event loop: others want it, too.
MOST_AT_ONCE = 128


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


class Post:
    """Wakes readers on one event loop from another thread: the loop once, however many there are before it wakes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[Inbox] = deque()
        self._called = False

    def wake(self, inbox: "Inbox") -> None:
        self._waiting.append(inbox)
        # A closed loop has no readers left.
        if not self._called and not self.loop.is_closed():
            self._called = True
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # First: who comes from now on has the loop woken again.
        self._called = False
        while self._waiting:
            self._waiting.popleft().wake()


class Inbox:
    def __init__(self, size: int, post: Post | None = None) -> None:
        """For `size` requests; made, read and closed in the thread of the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._post = post if post is not None else Post(self._loop)
        # The numbers of its requests in views of the engine, if they are wanted.
        self.numbers: list[int] = []
        self._events: deque[tuple[int, Event]] = deque()
        # Requests that have not ended; the engine's thread alone changes it.
        self.open = set(range(size))
        self._closed = self._expired = False
        # Whether the event loop has been asked to wake the reader and has not done so.
        self._waking = False
        self._reader: asyncio.Future[None] | None = None

    def put(self, index: int, event: Event) -> None:
        """Called by the engine's thread, in the order in which things happened to request `index`."""
        if isinstance(event, End | OneKVError):
            self.open.discard(index)
        self._events.append((index, event))
        # One that is under way sees this event, too.
        if not self._waking:
            self._waking = True
            self._post.wake(self)

    def close(self) -> None:
        """Nobody wants the rest: `take` raises ClientGoneError."""
        self._closed = True
        self.wake()

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

    def wake(self) -> None:
        """In the event loop: wakes up the waiting reader."""
        self._waking = False
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _expire(self) -> None:
        self._expired = True
        self.wake()
