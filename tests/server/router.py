"""A router's side of KV events, written from docs/events.md alone: an index of its own, made of what it reads.

It is strict: whatever a careful router could stumble over fails.
"""

import time
from dataclasses import dataclass
from typing import Any

import msgpack
import zmq

END = b"\xff" * 8
# A block as (number of the parent or None, tokens).
Block = tuple[int | None, tuple[int, ...]]


@dataclass
class Router:
    live: str
    replay: str | None = None
    # Messages that may wait here before ZeroMQ drops them.
    waiting: int = 0

    def __post_init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        # Every event, as it came, and the topics.
        self.events: list[list[Any]] = []
        self.topics: set[str] = set()
        # What it had after each message.
        self.history: list[dict[int, Block]] = []
        self.last = -1
        self.gaps: list[tuple[int, int]] = []
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.RCVHWM, self.waiting)
        self._live.connect(self.live)
        self._live.subscribe("")
        self._replay = self._context.socket(zmq.DEALER)
        if self.replay is not None:
            self._replay.connect(self.replay)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def catch_up(self) -> int:
        """Ask for what is missing; how many messages came."""
        self._replay.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
        count = 0
        while True:
            assert self._replay.poll(30_000), "no answer from the replay endpoint"
            empty, topic, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if number == END:
                assert (topic, payload) == (b"", b"")
                return count
            self._apply(topic, number, payload)
            count += 1

    def read(self, seconds: float = 0.0) -> bool:
        """Apply the next live message; False if none came."""
        if not self._live.poll(int(seconds * 1000)):
            return False
        topic, number, payload = self._live.recv_multipart()
        at = int.from_bytes(number, "big")
        if at > self.last + 1:
            self.gaps.append((self.last + 1, at))
            assert self.replay is not None, f"message {at} came after {self.last}"
            self.catch_up()
        if at > self.last:
            self._apply(topic, number, payload)
        return True

    def settle(self, expected: dict[int, Block], seconds: float = 30.0) -> None:
        """Read until it has what is expected; fails if that does not come."""
        until = time.monotonic() + seconds
        while self.blocks != expected and time.monotonic() < until:
            self.read(0.05)
        missing, left = expected.keys() - self.blocks.keys(), self.blocks.keys() - expected.keys()
        assert self.blocks == expected, f"{len(missing)} blocks are missing, {len(left)} are left, of {len(expected)}"

    def _apply(self, topic: bytes, number: bytes, payload: bytes) -> None:
        assert len(number) == 8
        self.topics.add(topic.decode())
        self.last = int.from_bytes(number, "big")
        seconds, events, rank = msgpack.unpackb(payload)
        assert abs(seconds - time.time()) < 3600 and rank == 0 and events
        for event in events:
            self.events.append(event)
            getattr(self, event[0])(*event[1:])
        self.history.append(dict(self.blocks))

    def BlockStored(self, hashes, parent, tokens, size, lora, medium, adapter) -> None:
        assert (lora, medium, adapter) == (None, "GPU", None)
        assert len(tokens) in (0, size * len(hashes))
        assert parent is None or parent in self.blocks, "a block after one that is not known"
        for index, block in enumerate(hashes):
            assert 0 <= block < 2**64 and block not in self.blocks, "stored twice"
            self.blocks[block] = (parent, tuple(tokens[index * size : (index + 1) * size]))
            parent = block

    def BlockRemoved(self, hashes, medium) -> None:
        assert medium == "GPU"
        for block in hashes:
            assert block not in {parent for parent, _ in self.blocks.values()}, "removed before what follows it"
            del self.blocks[block]

    def AllBlocksCleared(self) -> None:
        self.blocks.clear()
