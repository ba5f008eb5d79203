"""One answer, from the engine's events to the client: the base of all endpoints that generate.

    prepare -> events -> typed deltas -> Answer: frames of a stream, or one object

An endpoint provides what to generate (`Prepared`, created in another thread: tokenizers and grammars take time) and
subclasses `Answer`, which renders deltas in the format of its API. `AnswerResponse` does the rest: it starts the
generations when the response is sent, reads them, and cancels unfinished ones when the client disconnects. Frames that
are ready together go out in one write. While there is nothing to send (a long prefill), a stream sends an empty event
every few seconds in a form that the API allows, so that neither the client nor a proxy times out: clients that wait for
the next event ignore comments. A client that asks for it gets prefill progress instead. If the request asks why no more
of its prompt is cached, the headers wait for the end of the step in flight; otherwise they are sent at once.

sse-starlette, which also sends such events, is not used: it ends all streams at once when the server is told to stop,
while ours may continue for `--grace` seconds; it pings on a timer, not only during silence; and its writes take longer.
"""

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from fastapi import Request
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..engine import Delta, End, Event
from ..errors import OneKVError, OverloadedError
from ..inbox import ClientGoneError, Inbox
from ..llm import Probe
from . import journal
from .backend import Backend, Generation, Progress
from .call import ChatCall
from .deltas import Finish, TypedDelta
from .errors import BadRequestError, for_client
from .explain import ANSWER, ASK, explained, header, lost

KEEP_ALIVE_S = 5.0
# Seconds between reports of prefill progress, for clients that ask for them.
PROGRESS_S = 0.5
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def frame(data: Mapping[str, Any] | str, name: str | None = None) -> str:
    """One server-sent event, as it is written."""
    text = data if isinstance(data, str) else _encode(data)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


class Choice(Protocol):
    """Turns what the engine emits for one generation into typed deltas; the last is a `Finish`."""

    def read(self, event: Delta | End) -> list[TypedDelta]: ...


@dataclass(frozen=True)
class Prepared:
    """What to generate, with one of `choices` for each."""

    generations: list[Generation]
    choices: list[Choice]
    # The chat that the first was rendered from, if it was one.
    call: ChatCall | None = None


class Answer(ABC):
    """How an API renders an answer; one object per request. Frames are rendered one at a time, in order."""

    media_type: ClassVar[str] = "text/event-stream"
    # Sent while nothing comes, no part of the answer, where the API has no event for that (`waiting`).
    keep_alive: str = ": keep-alive\n\n"
    # What this API calls the fields that preparing may complain about.
    fields: ClassVar[Mapping[str, str]] = {}
    # Whether the client wants prefill progress of its first prompt (`progress`).
    wants_progress: bool = False

    def begin(self, prompt_tokens: int) -> Iterable[str]:
        """What is sent before any text; `prompt_tokens` are those of the first prompt."""
        return ()

    def found(self, cached_tokens: int) -> Iterable[str]:
        """What is sent once it is known how much of the first prompt was cached, before any text."""
        return ()

    def waiting(self) -> str:
        """What is sent while nothing comes."""
        return self.keep_alive

    def progress(self, progress: Progress) -> str:
        """What is sent while the first prompt is being stored, if that is wanted."""
        return self.waiting()

    @abstractmethod
    def add(self, index: int, delta: TypedDelta) -> Iterator[str]:
        """The choice `index` continues."""

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
        # The only one there is, or the one that was chosen (`models/choose.py`).
        self._backend: Backend = request.app.state.backend or request.state.backend
        self._answer, self._prepare, self._stream = answer, prepare, stream
        self.status_code, self.background = 200, None
        self.media_type = answer.media_type
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prepared = await prepared_for(self._answer, self._prepare)
        asked = Headers(scope=scope).get(ASK, "0") != "0"
        first = prepared.generations[0]
        # Before the request starts: what it stores itself does not count.
        looking = self._backend.probe(first.tokens, first.salt) if asked else None
        with self._backend.generate(prepared.generations) as inbox:
            listening = asyncio.create_task(_listen(receive, inbox))
            try:
                explanation = await self._explanation(prepared, await looking) if looking is not None else {}
                if self._stream:
                    self.headers.update(explanation)
                    finish = await self._send_frames(prepared, inbox, send)
                else:
                    answers = await _collect(prepared.choices, inbox)
            finally:
                listening.cancel()
        if not self._stream:
            finish = next(delta for delta in answers[0] if isinstance(delta, Finish))
            await JSONResponse(self._answer.whole(answers), headers=explanation)(scope, receive, send)
        if finish is not None:
            await note_lost(self._backend, prepared, finish)

    async def _explanation(self, prepared: Prepared, found: Probe) -> dict[str, str]:
        """As a header."""
        tokens = prepared.generations[0].tokens
        said = await asyncio.to_thread(explained, self._backend, prepared.call, tokens, found)
        return {ANSWER: header(said)}

    async def _send_frames(self, prepared: Prepared, inbox: Inbox, send: Send) -> Finish | None:
        """Gives how the first choice ended, if it did."""
        text = "".join(self._answer.begin(len(prepared.generations[0].tokens)))
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        rendering = Rendering(self._answer, prepared.choices)
        now = asyncio.get_running_loop().time
        pause = PROGRESS_S if self._answer.wants_progress else KEEP_ALIVE_S
        due = now() + pause
        while True:
            if text or not rendering.open:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": rendering.open > 0})
                due = now() + pause
            if not rendering.open:
                return rendering.first
            try:
                events = await inbox.take(max(0.0, due - now()))
            except ClientGoneError:
                return None
            text = "".join(rendering.frames(events))
            # Even while tokens come that are not shown yet: those of a tool call.
            if not text and rendering.open and now() >= due:
                # What is seen of the engine may be older than the tokens that have come.
                storing = self._answer.wants_progress and not rendering.found
                progress = self._backend.progress(inbox) if storing else None
                text = self._answer.waiting() if progress is None else self._answer.progress(progress)


async def prepared_for(answer: Answer, prepare: Callable[[], Prepared]) -> Prepared:
    """What `prepare` gives, made in another thread; what it refuses is named as the API of `answer` does."""
    try:
        return await asyncio.to_thread(prepare)
    except BadRequestError as error:
        error.field = answer.fields.get(error.field or "", error.field)
        raise


async def note_lost(backend: Backend, prepared: Prepared, finish: Finish) -> None:
    """Log where the first prompt diverges from the nearest cached conversation, if it does."""
    entry, branch = journal.current.get(), finish.branch
    if entry is not None and branch is not None and journal.log.isEnabledFor(logging.INFO):
        tokens = prepared.generations[0].tokens
        entry.lost = await asyncio.to_thread(lost, backend, prepared.call, tokens, branch)


class Rendering:
    """An answer that is being streamed; `open` generations have not ended."""

    def __init__(self, answer: Answer, choices: list[Choice]) -> None:
        self._answer, self._choices = answer, choices
        self.open = len(choices)
        # How the first choice ended.
        self.first: Finish | None = None
        # Whether the first prompt is stored: known from its first token on.
        self.found = False

    def frames(self, events: list[tuple[int, Event]]) -> Iterator[str]:
        """What `events` become; the last of all, too."""
        try:
            yield from self._beginning(events)
            for index, delta in _deltas(self._choices, events):
                yield from self._answer.add(index, delta)
                if isinstance(delta, Finish):
                    self.open -= 1
                    self.first = delta if index == 0 else self.first
            if not self.open:
                yield from self._answer.end()
        except Exception as error:  # noqa: BLE001  it is reported to the client, and logged if it is ours
            self.open = 0
            yield from self._answer.fail(for_client(error))

    def _beginning(self, events: list[tuple[int, Event]]) -> Iterator[str]:
        first = next((event for index, event in events if index == 0), None)
        if not self.found and isinstance(first, Delta | End):
            self.found = True
            yield from self._answer.found(first.cached_tokens)


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
