"""Answers to what no real model says on demand: the engine's events are given, all that comes after them is real."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from onekv.engine import Event
from onekv.inbox import Inbox
from onekv.server.answer import Answer, AnswerResponse, Prepared
from onekv.server.backend import Generation
from onekv.server.chat import ChatChoice
from onekv.server.segments import Markers, Splitter

HERMES = Markers("<think>", "</think>", "<tool_call>", "</tool_call>")
WANTED = Generation([1, 2, 3, 4, 5])


class Client:
    """Sends an answer's events to itself: `said` by generation, and whatever is put into `inbox` later."""

    def __init__(self, answer: Answer, *said: list[Event], thinking: bool = False, stream: bool = True) -> None:
        self._answer, self._said, self._thinking, self._stream = answer, said, thinking, stream
        self.started: dict[str, Any] = {}
        self.writes: list[str] = []
        self.inbox: Inbox
        # Called after every write.
        self.on_write: Callable[[], None] = lambda: None
        self.gone = asyncio.Event()

    @contextmanager
    def generate(self, generations: list[Generation]) -> Iterator[Inbox]:
        self.inbox = Inbox(len(generations))
        for index, events in enumerate(self._said):
            for event in events:
                self.inbox.put(index, event)
        yield self.inbox

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.started = message
        else:
            self.writes.append(message["body"].decode())
            self.on_write()

    def prepare(self) -> Prepared:
        choices = [ChatChoice(Splitter(HERMES, self._thinking), {0}) for _ in self._said]
        return Prepared([WANTED] * len(self._said), [*choices])

    async def run(self) -> None:
        request: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(backend=self)))
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        response = AnswerResponse(request, self._answer, self.prepare, self._stream)
        await response(scope, self.receive, self.send)


def frames_of(answer: Answer, *said: list[Event], thinking: bool = False) -> list[str]:
    """What is sent of an answer whose generations said all of `said`."""

    async def collect() -> list[str]:
        client = Client(answer, *said, thinking=thinking)
        await client.run()
        return client.writes

    return [frame for frame in "".join(asyncio.run(collect())).split("\n\n") if frame]


def run(client: Callable[[], Client], *steps: Callable[[Client], None]) -> Client:
    """A client in an event loop of its own; each of `steps` is taken after a write."""

    async def answered() -> Client:
        made = client()
        left = list(steps)
        made.on_write = lambda: left.pop(0)(made) if left else None
        await asyncio.wait_for(made.run(), 60)
        return made

    return asyncio.run(answered())
