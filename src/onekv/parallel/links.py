"""Both ends of the connections between rank 0 and the other ranks.

    rank 0       `tell` sends an order to all others, `answers` collects their replies
    followers    `next` returns the orders one by one, `answer` replies

At each end a thread receives. It handles heartbeats, failures and requests to stop itself, and queues the rest for
whoever waits. A connection that breaks ends the process (guard.py), except during an orderly shutdown.
"""

import os
import queue
import signal
import threading
from typing import Any

from ..errors import ParallelError
from ..interrupts import uninterrupted
from .guard import Guard
from .wire import Gone, Message, Wire, encode


class _End:
    """One end of a connection, with the thread that receives."""

    def __init__(self, wire: Wire, guard: Guard, other: int) -> None:
        """`other` is the rank of the peer."""
        self._wire, self._guard, self._other = wire, guard, other
        self._came: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # Set once the peer has closed everything and is about to exit.
        self.parted = threading.Event()
        threading.Thread(target=self._receive, name=f"onekv-rank-{other}", daemon=True).start()

    def send(self, message: Message | bytes) -> None:
        try:
            self._wire.send(message)
        except Gone as error:
            self._lost(error)

    def take(self) -> Message:
        return self._came.get()

    def _receive(self) -> None:
        while True:
            try:
                message = self._wire.receive()
            except (Gone, ParallelError) as error:
                self._lost(error)
                return
            match message["do"]:
                case "beat":
                    pass
                case "failed":
                    self._guard.fail(f"rank {self._other} failed: {message['reason']}")
                case "leave":
                    self._guard.leave()
                case "stop":
                    # As if rank 0 had received the signal: the code that drives the engine handles it.
                    os.kill(os.getpid(), signal.SIGTERM)
                case "parted":
                    self.parted.set()
                case _:
                    self._came.put(message)

    def _lost(self, error: Exception) -> None:
        if not (self.parted.is_set() or self._guard.over):
            self._guard.fail(f"rank {self._other} is gone: {error}")


class Links:
    """Rank 0's connections to all other ranks."""

    def __init__(self, wires: list[Wire], guard: Guard) -> None:
        self.guard = guard
        self._wires = wires
        self._ends = [_End(wire, guard, rank) for rank, wire in enumerate(wires, 1)]

    def tell(self, do: str, **fields: Any) -> None:
        data = encode({"do": do, **fields})
        # Ctrl-C must not cut a message short, or leave out a rank.
        with uninterrupted():
            for end in self._ends:
                end.send(data)

    def answers(self) -> list[Any]:
        """The replies to an order, by rank."""
        return [end.take()["answer"] for end in self._ends]

    def part(self) -> None:
        """Let all other ranks finish their orders and exit; returns when they have."""
        self.tell("end")
        for end in self._ends:
            end.parted.wait()
        self.guard.stop()
        for wire in self._wires:
            wire.close()

    def part_at_exit(self) -> None:
        """The program exits without having closed its LLM."""
        if not self.guard.over:
            self.guard.stop()
            self.tell("end")

    def desert(self) -> None:
        """The engine could not be started, which rank 0 reports: the other ranks exit at once, quietly."""
        self.guard.stop()
        self.tell("leave")


class Link:
    """A follower's connection to rank 0."""

    def __init__(self, wire: Wire, guard: Guard) -> None:
        self.guard = guard
        self._end = _End(wire, guard, 0)

    def next(self) -> Message:
        return self._end.take()

    def answer(self, answer: Any) -> None:
        self._end.send({"do": "answer", "answer": answer})

    def stop(self) -> None:
        """Ask rank 0 to shut down."""
        self._end.send({"do": "stop"})

    def part(self) -> None:
        self.guard.stop()
        self._end.send({"do": "parted"})
