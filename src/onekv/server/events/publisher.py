"""One model's stream of events, and the thread that sends it.

A live message has three parts: topic, sequence number (8 bytes, big-endian), batch. The first batch of a process begins
with AllBlocksCleared, and its number is the time in milliseconds, which is higher than any earlier process can have
sent: its subscribers see a gap. ZeroMQ drops messages for a subscriber that is too slow or not connected, which also
shows as a gap. The subscriber then asks the replay endpoint for everything from the first missing number on, as vLLM's
subscribers do (an empty part, then 8 bytes), and gets what is still kept, each as (empty, topic, number, batch), and
finally (empty, empty, -1, empty). If some of that is no longer kept, or the number is not one of this process, it gets
a single batch instead, with the number of the last one sent: AllBlocksCleared and the complete contents. Live messages
continue from there.

    starting -> open -> closed         `close` sends what is unsent, waits for it a little, and ends the thread
"""

import logging
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from ...errors import SettingError
from ...prefix.events import Cleared, Event, Removed, Stored, Unsent
from .figures import EventStats
from .wire import batch

log = logging.getLogger("onekv.events")

END = (-1).to_bytes(8, "big", signed=True)
# Changes of this many seconds go together: a step stores blocks one by one.
TOGETHER_S = 0.005
# Messages that ZeroMQ keeps for a subscriber that does not keep up, before it drops them.
WAITING_MESSAGES = 10_000
# How long the last messages may take to leave when all ends, and the thread to end.
LINGER_S, JOIN_S = 1.0, 5.0


class Publisher:
    def __init__(self, endpoint: str, topic: str, replay: str | None, buffer: int, with_tokens: bool = True) -> None:
        """Binds `endpoint`, and `replay` for what subscribers missed, which is kept for about `buffer` events.

        Raises SettingError.
        """
        self.topic = topic
        self._topic, self._with_tokens = topic.encode(), with_tokens
        self._buffer = buffer if replay is not None else 0
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._live = self._bind(zmq.PUB, endpoint, "--kv-events", WAITING_MESSAGES)
            if replay is not None:
                # All that is kept may be asked for at once, and what is too much here would be dropped in its midst.
                self._replay = self._bind(zmq.ROUTER, replay, "--kv-events-replay", 2 * buffer + 1000)
        except SettingError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._live.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = None if self._replay is None else self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        self._awake, self._alarm = socket.socketpair()
        self._alarm.setblocking(False)
        # Changes reported by the engine; its `add` is the listener.
        self.unsent = Unsent(self._wake)
        self._closing = False
        self._encode = msgspec.msgpack.Encoder().encode
        # Of the thread alone: the first and the last number sent, messages that are kept with how many events each has,
        # and what is there after all of them.
        self._first = time.time_ns() // 1_000_000
        self._sent = self._first - 1
        self._kept: deque[tuple[int, bytes, int]] = deque()
        self._kept_events = 0
        self._there: dict[bytes, Stored] = {}
        self._counts = dict.fromkeys(("stored", "removed", "cleared", "replays", "snapshots"), 0)
        self._thread = threading.Thread(target=self._run, name="onekv-events", daemon=True)
        self._thread.start()

    def _bind(self, kind: int, endpoint: str, flag: str, waiting: int) -> "zmq.Socket[bytes]":
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.set_hwm(waiting)
        made.setsockopt(zmq.LINGER, int(LINGER_S * 1000))
        made.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            made.bind(endpoint)
        except zmq.ZMQError as error:
            why = zmq.strerror(error.errno) if error.errno else str(error)
            raise SettingError(
                f"{flag} is {endpoint!r}, which cannot be bound: {why}; use an address of this machine such as "
                "tcp://127.0.0.1:5557, tcp://*:5557 for all of them, or ipc:///run/onekv/events"
            ) from None
        return made

    # From any thread

    def stats(self) -> EventStats:
        return EventStats(
            batches=self._sent + 1 - self._first, undone=self.unsent.undone, blocks=len(self._there), **self._counts
        )

    def close(self) -> None:
        """Send what is unsent and end the thread. Closing twice is allowed."""
        if not self._closing:
            self._closing = True
            self._wake()
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            self._awake.close()
            self._alarm.close()

    def _wake(self) -> None:
        # It may have been woken so often that there is no room for more, or have ended.
        with suppress(OSError):
            self._alarm.send(b"\0")

    # In the thread

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._awake.fileno(), zmq.POLLIN)
            if self._replay is not None:
                poller.register(self._replay, zmq.POLLIN)
            self._send()
            while not self._closing:
                ready = dict(poller.poll())
                if self._awake.fileno() in ready:
                    time.sleep(TOGETHER_S)
                    self._awake.recv(4096)
                    self._send()
                if self._replay is not None and self._replay in ready:
                    self._answer(self._replay)
            self._send()
        except Exception:
            log.critical("events for routers can no longer be sent; requests are still served", exc_info=True)
        finally:
            # Waits for messages that have not left, but not for long.
            self._context.destroy(linger=int(LINGER_S * 1000))

    def _send(self) -> None:
        events = self.unsent.take()
        if not events:
            return
        for event in events:
            self._apply(event)
        message = self._message(events)
        self._sent += 1
        self._live.send_multipart((self._topic, self._number(self._sent), message))
        self._kept.append((self._sent, message, len(events)))
        self._kept_events += len(events)
        while self._kept_events > self._buffer:
            self._kept_events -= self._kept.popleft()[2]

    def _apply(self, event: Event) -> None:
        if isinstance(event, Stored):
            self._there[event.key] = event
            self._counts["stored"] += 1
        elif isinstance(event, Removed):
            del self._there[event.key]
            self._counts["removed"] += 1
        else:
            self._there.clear()
            self._counts["cleared"] += 1

    def _answer(self, replay: "zmq.Socket[bytes]") -> None:
        """Send a subscriber what it asks for."""
        parts: list[Any] = replay.recv_multipart()
        if len(parts) != 3 or parts[1] or len(parts[2]) != 8:
            # Whoever can reach it can send as many of those as they like.
            log.debug("a request for events has %d parts; it must be an empty one and 8 bytes", len(parts) - 1)
            return
        client, first = parts[0], int.from_bytes(parts[2], "big")
        oldest = self._kept[0][0] if self._kept else self._sent + 1
        if not oldest <= first <= self._sent + 1:
            self._counts["snapshots"] += 1
            everything = self._message([Cleared(), *self._there.values()])
            replay.send_multipart((client, b"", self._topic, self._number(self._sent), everything))
        else:
            self._counts["replays"] += 1
            for number, message, _ in self._kept:
                if number >= first:
                    replay.send_multipart((client, b"", self._topic, self._number(number), message))
        replay.send_multipart((client, b"", b"", END, b""))

    def _message(self, events: list[Event]) -> bytes:
        return self._encode(batch(events, time.time(), self._with_tokens))

    @staticmethod
    def _number(number: int) -> bytes:
        return number.to_bytes(8, "big")
