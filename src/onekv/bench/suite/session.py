"""One contender in one scenario: a fresh server, and its client."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..clients import Answer, ServerProcess, chat, http
from .contenders import Contender, Needs, Place
from .timeline import SAMPLE_S, Timeline

if TYPE_CHECKING:
    import httpx2

TIMEOUT_S = 1800.0
SHORT = "Name three colours."
Messages = list[dict[str, str]]
Figures = dict[str, float]


@dataclass(frozen=True)
class Sizes:
    """Tokens, about; and how many."""

    context: int = 1500
    new: int = 100
    answer: int = 32
    turns: int = 6
    clients: int = 4

    @property
    def longest(self) -> int:
        """More than any conversation of a scenario has, also where a word is more than one token."""
        return 2 * (2 * self.context + self.turns * (2 * self.new + self.answer)) + 1024


class Session:
    def __init__(self, contender: Contender, needs: Needs, place: Place, sizes: Sizes, seed: str) -> None:
        self.sizes, self.text, self.timeline = sizes, random.Random(seed), Timeline()
        self._contender, self._needs, self._place = contender, needs, replace(place, started=self.timeline.started)
        self._stack = ExitStack()
        self._client: httpx2.AsyncClient
        self._server: ServerProcess

    def measure(self, run: Callable[["Session"], Awaitable[Figures]]) -> tuple[Figures, str]:
        """What `run` gives, and the answer to a short prompt."""
        with self._stack:
            # Outside of the event loop, where Ctrl-C ends a wait.
            self._start()
            return asyncio.run(self._measure(run))

    async def _measure(self, run: Callable[["Session"], Awaitable[Figures]]) -> tuple[Figures, str]:
        async with http().AsyncClient(timeout=TIMEOUT_S) as self._client:
            with self.phase("load"):
                answer = await self.ask([{"role": "user", "content": SHORT}], 16)
            self._read()
            self.timeline.ready()
            return await run(self), answer.text

    def _start(self) -> None:
        self._stack.enter_context(self.timeline.watching(self._place.written))
        with self.phase("load"):
            self._server = self._stack.enter_context(self._contender.serve(self._needs, self._place))

    def _read(self) -> None:
        self.timeline.read(self._place.written)

    # What scenarios do

    async def ask(self, messages: Messages, max_tokens: int, model: int = 0) -> Answer:
        """Of the model with that number."""
        name = self._server.model
        if self._needs.models > 1:
            name = self._contender.models(self._place)[model]
        return await chat(self._client, self._server, messages, max_tokens, name)

    async def restart(self) -> None:
        """Stop the server, and start it again with what it has kept on disk."""
        await asyncio.to_thread(self._stack.close)
        await asyncio.to_thread(self._start)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Peaks of memory are known for each phase."""
        with self.timeline.phase(name):
            yield

    def peak(self, phase: str | None = None) -> float | None:
        self._read()
        return self.timeline.peak(phase)

    async def mlx_peak(self, phase: str) -> float | None:
        """Known when there is a sample after the end of the phase; None for a server that does not tell."""
        end = max(each.end for each in self.timeline.phases if each.name == phase)
        process = self._server.process
        while process is not None and process.poll() is None:
            self._read()
            if self.timeline.mlx and self.timeline.mlx[-1][0] >= end:
                break
            await asyncio.sleep(SAMPLE_S)
        return self.timeline.mlx_peak(phase)

    def growth(self) -> float | None:
        """The peak of the process, less what it took after a first, short request."""
        self._read()
        return self.timeline.growth()
