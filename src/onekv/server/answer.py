"""One answer, from the engine's events to the client: the base of all endpoints that generate.

    prepare -> events -> typed deltas -> Answer: frames of a stream, or one object

An endpoint says what is to be generated (`Prepared`, made in another thread: tokenizers and grammars take time) and
subclasses `Answer`, which writes deltas in the format of its API. `AnswerResponse` does the rest: it starts the
generations when the response is sent, reads them, and cancels what has not ended when the client goes away. Frames
that are ready together go out in one write. While there is nothing to send (a long prefill), a stream sends a comment
every few seconds, so that neither the client nor a proxy gives up.

sse-starlette does the last part, too, and is not used: it ends all streams at once when the server is told to stop,
where ours may go on for `--grace` seconds; it pings by the clock and not in silence; and it takes more time per write.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from fastapi import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..engine import Delta, End, Event
from ..errors import OneKVError, OverloadedError
from ..inbox import ClientGoneError, Inbox
from .backend import Backend, Generation
from .deltas import Finish, TypedDelta
from .errors import BadRequestError, for_client

KEEP_ALIVE_S = 5.0
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def frame(data: Mapping[str, Any] | str, name: str | None = None) -> str:
    """One server-sent event, as it is written."""
    text = data if isinstance(data, str) else _encode(data)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


class Choice(Protocol):
    """Makes typed deltas of what the engine emits for one generation; the last is a `Finish`."""

    def read(self, event: Delta | End) -> list[TypedDelta]: ...


@dataclass(frozen=True)
class Prepared:
    """What is to be generated; `choices` are as many."""

    generations: list[Generation]
    choices: list[Choice]


class Answer(ABC):
    """How an API writes an answer; one object for each request. Frames are made one at a time, in order."""

    media_type: ClassVar[str] = "text/event-stream"
    # Sent while nothing comes; no part of the answer.
    keep_alive: ClassVar[str] = ": keep-alive\n\n"
    # What this API calls the fields that preparing may complain about.
    fields: ClassVar[Mapping[str, str]] = {}

    def begin(self, prompt_tokens: int) -> Iterable[str]:
        """What is sent before anything is said; `prompt_tokens` are those of the first prompt."""
        return ()

    @abstractmethod
    def add(self, index: int, delta: TypedDelta) -> Iterator[str]:
        """The choice `index` goes on."""

    @abstractmethod
    def end(self) -> Iterator[str]:
        """All choices have finished."""

    @abstractmethod
    def fail(self, error: OneKVError) -> Iterator[str]:
        """The answer ends here, after it has begun."""

    @abstractmethod
    def whole(self, said: list[list[TypedDelta]]) -> dict[str, Any]:
        """The answer in one piece, from all deltas of each choice."""


class AnswerResponse(Response):
    def __init__(self, request: Request, answer: Answer, prepare: Callable[[], Prepared], stream: bool | None) -> None:
        self._backend: Backend = request.app.state.backend
        self._answer, self._prepare, self._stream = answer, prepare, stream
        self.status_code, self.background = 200, None
        self.media_type = answer.media_type
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            prepared = await asyncio.to_thread(self._prepare)
        except BadRequestError as error:
            error.field = self._answer.fields.get(error.field or "", error.field)
            raise
        with self._backend.generate(prepared.generations) as inbox:
            listening = asyncio.create_task(_listen(receive, inbox))
            try:
                if self._stream:
                    await self._send_frames(prepared, inbox, send)
                    return
                said = await _collect(prepared.choices, inbox)
            finally:
                listening.cancel()
        await JSONResponse(self._answer.whole(said))(scope, receive, send)

    async def _send_frames(self, prepared: Prepared, inbox: Inbox, send: Send) -> None:
        text = "".join(self._answer.begin(len(prepared.generations[0].tokens)))
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        rendering = _Rendering(self._answer, prepared.choices)
        now = asyncio.get_running_loop().time
        due = now() + KEEP_ALIVE_S
        while True:
            if text or not rendering.open:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": rendering.open > 0})
                due = now() + KEEP_ALIVE_S
            if not rendering.open:
                return
            try:
                events = await inbox.take(max(0.0, due - now()))
            except ClientGoneError:
                return
            text = "".join(rendering.frames(events))
            # Also while tokens come that are not shown yet: those of a tool call.
            if not text and rendering.open and now() >= due:
                text = self._answer.keep_alive


class _Rendering:
    """An answer that is being streamed; `open` generations have not ended."""

    def __init__(self, answer: Answer, choices: list[Choice]) -> None:
        self._answer, self._choices = answer, choices
        self.open = len(choices)

    def frames(self, events: list[tuple[int, Event]]) -> Iterator[str]:
        """What `events` become; the last of all, too."""
        try:
            for index, delta in _deltas(self._choices, events):
                yield from self._answer.add(index, delta)
                self.open -= isinstance(delta, Finish)
            if not self.open:
                yield from self._answer.end()
        except Exception as error:  # noqa: BLE001  it is told, or logged and told
            self.open = 0
            yield from self._answer.fail(for_client(error))


async def _collect(choices: list[Choice], inbox: Inbox) -> list[list[TypedDelta]]:
    said: list[list[TypedDelta]] = [[] for _ in choices]
    left = len(choices)
    while left:
        for index, delta in _deltas(choices, await inbox.take()):
            said[index].append(delta)
            left -= isinstance(delta, Finish)
    return said


def _deltas(choices: list[Choice], events: list[tuple[int, Event]]) -> Iterator[tuple[int, TypedDelta]]:
    """Raises the error of a generation that failed."""
    for index, event in events:
        if isinstance(event, OneKVError):
            raise event
        if isinstance(event, End) and event.finish_reason == "cancelled":
            # Whoever cancels by itself does not read on.
            raise OverloadedError("the server is shutting down; the answer was cut off", retry_after=5)
        for delta in choices[index].read(event):
            yield index, delta


async def _listen(receive: Receive, inbox: Inbox) -> None:
    """Until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
    inbox.close()
