"""The feed: one snapshot, encoded once, for all watchers.

    no watchers: nothing runs  ->  the first arrives: a task takes snapshots, and publishes one when something changed
    ->  the last leaves: the task ends

A slow reader gets the newest snapshot when it is ready for it, and never those in between: nothing is queued. All
streams end when the server is told to stop.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from .snapshot import Snapshots

# How often to check for changes, and how long a stream may be silent.
LOOK_S, KEEP_ALIVE_S = 0.25, 5.0
# How long the first snapshot may wait for a view that is not from the past.
FIRST_S = 1.0
# Large, fragmented pools take longer to encode and are published less often: at most 1/200 of the time goes into it.
PATIENCE = 200
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Feed:
    """Belongs to the event loop: only called from there."""

    def __init__(self, snapshots: Snapshots) -> None:
        self.snapshots = snapshots
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._published = asyncio.Event()
        # The newest, as it is sent, and how many there were.
        self._frame, self._number = b"", 0
        self._last: dict[str, Any] | None = None

    async def watch(self) -> AsyncIterator[bytes]:
        """Server-sent events, the newest snapshot first. Ends with the server."""
        self._watchers += 1
        try:
            if self._task is None or self._task.done():
                # What was published last may be old.
                self._frame, self._last = b"", None
                self._task = asyncio.create_task(self._run())
            seen = -1
            while not self._task.done():
                if self._frame and seen != self._number:
                    seen = self._number
                    yield self._frame
                    continue
                try:
                    await asyncio.wait_for(self._published.wait(), KEEP_ALIVE_S)
                except TimeoutError:
                    yield b": keep-alive\n\n"
            # Raises what ended it, if that was an error.
            self._task.result()
        finally:
            self._watchers -= 1

    async def _run(self) -> None:
        try:
            # An idle engine's view is from its last step. During a long step there is none that is newer.
            asked = time.monotonic()
            while not self.snapshots.newer_than(asked) and time.monotonic() < asked + FIRST_S:
                await asyncio.sleep(0.01)
            self._publish()
            took = 0.0
            while self._watchers and not self.snapshots.stopping:
                await asyncio.sleep(max(LOOK_S, PATIENCE * took))
                began = time.thread_time()
                self._publish()
                took = time.thread_time() - began
        finally:
            self._wake()

    def _publish(self) -> None:
        """Make a snapshot, and tell everyone if it is another one."""
        snapshot = {**self.snapshots.take(), "watchers": self._watchers}
        if snapshot == self._last:
            return
        self._last = snapshot
        self._frame = f"data: {_encode({'time': round(time.time(), 3), **snapshot})}\n\n".encode()
        self._number += 1
        self._wake()

    def _wake(self) -> None:
        """All who wait now; who waits later waits for the next."""
        self._published.set()
        self._published = asyncio.Event()
