"""Responses that run in the background: the client may disconnect, and come back for the result.

    in_progress -> completed | incomplete | failed
              \\_ cancelled: by POST .../cancel, by DELETE, and when the server stops

A `Background` is the task that reads the engine's output. With several models, the task owns the hold on its model:
nothing that is kept afterwards holds a model. It is in the store before it begins; the store never drops one that is
running. The engine limits how many may run: requests it has no room for, and invalid prompts, are rejected before the
client gets its response.

If the client wants a stream, the frames are kept with the response, and several clients can follow it from any of them,
while it runs and later. A frame's index is its `sequence_number`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack, suppress

from .. import journal
from ..answer import KEEP_ALIVE_S, Answer, Prepared, Rendering, note_lost, prepared_for
from ..backend import Backend
from ..errors import for_client
from .response_answer import ResponseAnswer


class Background:
    def __init__(
        self,
        answer: ResponseAnswer,
        backend: Backend,
        prepare: Callable[[], Prepared],
        held: ExitStack,
        stream: bool,
        ended: Callable[[], None],
    ) -> None:
        """Starts it; `held` is closed and `ended` is called at its end. Frames are kept if it is a `stream`."""
        self.frames: list[str] = []
        self.stream = stream
        # Set when there are more frames, and replaced.
        self._news = asyncio.Event()
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(answer, backend, prepare, held, ended))

    async def begun(self) -> None:
        """Returns when the engine has taken it. Raises what is wrong with the prompt, and OverloadedError."""
        await self._begun

    @property
    def running(self) -> bool:
        return not self._task.done()

    async def cancel(self) -> None:
        """End it, if it has not ended. One that has not begun does so first: others wait for that."""
        await asyncio.wait([self._begun])
        self._task.cancel()
        await asyncio.wait([self._task])

    async def follow(self, begin: int) -> AsyncIterator[str]:
        """The frames from the one at `begin` on, until the response has ended."""
        while True:
            news = self._news
            if frames := self.frames[begin:]:
                begin += len(frames)
                yield "".join(frames)
            elif not self.running:
                return
            else:
                try:
                    await asyncio.wait_for(news.wait(), KEEP_ALIVE_S)
                except TimeoutError:
                    # A comment: an event would need a sequence number that no other reader has.
                    yield Answer.keep_alive

    async def _run(
        self,
        answer: ResponseAnswer,
        backend: Backend,
        prepare: Callable[[], Prepared],
        held: ExitStack,
        ended: Callable[[], None],
    ) -> None:
        with held:
            try:
                prepared = await prepared_for(answer, prepare)
                await self._generate(answer, backend, prepared)
            except Exception as error:  # noqa: BLE001  it is reported to the client, and logged if it is ours
                if self._begun.done():
                    self._add(answer.fail(for_client(error)))
                else:
                    self._begun.set_exception(error)
            ended()
        self._add(())

    async def _generate(self, answer: ResponseAnswer, backend: Backend, prepared: Prepared) -> None:
        path = f"/v1/responses/{answer.response['id']}"
        with journal.background(path) as entry, backend.generate(prepared.generations) as inbox:
            if not self._begun.done():
                self._begun.set_result(None)
            self._add(answer.begin(len(prepared.generations[0].tokens)))
            rendering = Rendering(answer, prepared.choices)
            try:
                while rendering.open:
                    self._add(rendering.frames(await inbox.take()))
            except asyncio.CancelledError:
                entry.error = "cancelled"
                self._add(answer.cancel())
            if rendering.first is not None:
                # Whoever cancels it now is too late.
                with suppress(asyncio.CancelledError):
                    await note_lost(backend, prepared, rendering.first)

    def _add(self, frames: Iterable[str]) -> None:
        """Whoever follows looks again, even if there are none."""
        made = list(frames)
        self.frames += made if self.stream else []
        self._news.set()
        self._news = asyncio.Event()
