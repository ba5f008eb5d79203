"""`LLM` for an event loop: the same calls, awaited, over the thread that owns the engine.

`AsyncLLM` owns an `EngineThread` and the `LLM` created in it. A call creates requests in the caller's thread and
submits them as jobs; nothing else of the engine is used from outside, except by `call`, between two steps. Events of
the jobs arrive in the call's `Inbox`; deltas of one request that arrived together are delivered as one. If a reader is
cancelled, closed or dropped, its jobs are cancelled.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, overload
from weakref import WeakValueDictionary

from mlx.nn.layers.base import Module

from .ask import Message, Prompt
from .completion import Answer, Completion
from .engine import Delta, End, Engine, EngineThread, Event, Job, Request, Sampling
from .errors import OneKVError, OverloadedError, SettingError
from .inbox import Inbox, Post
from .llm import LLM
from .models import DEFAULT_MODEL, LoadedModel
from .models.sharing import compute

Result = TypeVar("Result")
AnyReader = TypeVar("AnyReader", bound="_Reader")
# Hears of every event of a request in the engine's thread, before its reader does.
Observer = Callable[[Event], None]


class _Reader:
    """Reads the requests of one call; `AsyncStream` and `AsyncBatchStream` say what of it they give."""

    def __init__(self, llm: "AsyncLLM", requests: list[Request]) -> None:
        self._llm = llm
        self._jobs: list[Job] = []
        self._answers = [Answer(request) for request in requests]
        # Deltas that came and were not given out, by request.
        self._ready: dict[int, Delta] = {}
        self._failed: OneKVError | None = None
        # Those whose end did not come, and whether its reader wants no more.
        self._open = set(range(len(requests)))
        self._aborted = False
        self._inbox, self._jobs = llm.submit(requests)

    async def _next(self) -> tuple[int, str]:
        """The next text and whose it is. Raises StopAsyncIteration at the end of all."""
        try:
            while (item := self._take()) is None:
                if self._failed is not None:
                    raise self._failed
                if not self._open:
                    raise StopAsyncIteration
                for index, event in await self._inbox.take():
                    self._note(index, event)
        except BaseException:
            # Cancelled, or one of several failed.
            self._cancel()
            raise
        return item

    def _take(self) -> tuple[int, str] | None:
        while self._ready:
            index = next(iter(self._ready))
            delta = self._ready.pop(index)
            self._answers[index].add(delta)
            if delta.text or self._jobs[index].output.silent:
                return index, delta.text
        return None

    def _note(self, index: int, event: Event) -> None:
        if isinstance(event, Delta):
            self._ready[index] = self._ready[index] + event if index in self._ready else event
            return
        self._open.discard(index)
        if not isinstance(event, End):
            self._failed = event
        elif event.finish_reason == "cancelled" and not self._aborted:
            self._failed = OverloadedError("the LLM was closed; the answer was cut off", retry_after=5)
        else:
            self._answers[index].end = event

    def _cancel(self) -> None:
        if self._open and self._jobs:
            self._llm.thread.cancel(self._jobs)
            self._open.clear()

    @property
    def ended(self) -> bool:
        return not self._open

    def abort(self) -> None:
        """Stop generating: the reader gets what has come, and then the end."""
        if self._open and not self._aborted:
            self._aborted = True
            self._llm.thread.cancel(self._jobs)

    async def aclose(self) -> None:
        """Stop generating and release everything; what was generated stays in the completion."""
        self.abort()
        while self._open:
            for index, event in await self._inbox.take():
                self._note(index, event)
        while self._take() is not None:
            pass

    def __del__(self) -> None:
        self._cancel()

    async def __aenter__(self: AnyReader) -> AnyReader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncStream(_Reader, AsyncIterator[str]):
    """Deltas of text as they are generated. `completion` has what was read so far; `aclose` ends it early."""

    async def __anext__(self) -> str:
        return (await self._next())[1]

    @property
    def completion(self) -> Completion:
        return self._answers[0].completion


class AsyncBatchStream(_Reader, AsyncIterator[tuple[int, str]]):
    """A stream for several prompts: (index of the prompt, delta), as they are generated. An error of one ends all."""

    async def __anext__(self) -> tuple[int, str]:
        return await self._next()

    @property
    def completions(self) -> list[Completion]:
        return [answer.completion for answer in self._answers]


class AsyncLLM:
    """A language model for an event loop: `async with AsyncLLM("smollm2-135m") as llm: ...`.

    The arguments are those of `LLM`, plus `max_waiting` and `max_wait`: how many requests may wait, and for how many
    seconds; beyond that they fail with OverloadedError. Requests of all tasks are decoded together.
    """

    def __init__(
        self,
        model: str | Module | LoadedModel = DEFAULT_MODEL,
        *,
        tokenizer: Any = None,
        progress: bool = True,
        max_waiting: int = 256,
        max_wait: float = 600.0,
        **settings: Any,
    ) -> None:
        if isinstance(model, Module | LoadedModel):
            compute(model if isinstance(model, Module) else model.model)
        self._make = partial(LLM, model, tokenizer=tokenizer, progress=progress, **settings)
        self._llm: LLM | None = None
        self._stopped = False
        self._post: Post | None = None
        self._named: WeakValueDictionary[str, _Reader] = WeakValueDictionary()
        self.thread = EngineThread(self._build, max_waiting, max_wait)

    def _build(self) -> Engine:
        self._llm = self._make()
        self.thread.check_integrity = self._llm.settings.check_integrity
        return self._llm.engine

    @property
    def llm(self) -> LLM:
        """The `LLM` that runs the model; its engine may only be used through `call`."""
        if self._llm is None:
            raise OneKVError("this LLM is closed" if self._stopped else "this LLM is not open; use `async with`")
        return self._llm

    def start(self) -> None:
        """Load the model; blocks until it is ready."""
        self.thread.start()

    def stop(self, grace: float = 0.0, step_limit: float = math.inf) -> None:
        """Let requests continue for `grace` seconds, cancel the rest, close; blocks until that is done.

        Raises StuckError if a step then takes longer than `step_limit` seconds.
        """
        self.thread.stop(grace, step_limit)
        self._llm, self._stopped = None, True

    async def __aenter__(self) -> "AsyncLLM":
        try:
            await asyncio.to_thread(self.start)
        except asyncio.CancelledError:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel all requests and release the pool; what is cached goes to the disk cache, if there is one."""
        await asyncio.to_thread(self.stop)

    @overload
    async def generate(
        self, prompt: Prompt, max_tokens: int | None = ..., *, sampling: Sampling | None = ..., **options: Any
    ) -> Completion: ...
    @overload
    async def generate(
        self,
        prompt: list[Prompt],
        max_tokens: int | None = ...,
        *,
        sampling: Sampling | Sequence[Sampling] | None = ...,
        **options: Any,
    ) -> list[Completion]: ...

    async def generate(
        self,
        prompt: Prompt | list[Prompt],
        max_tokens: int | None = None,
        *,
        sampling: Sampling | Sequence[Sampling] | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> Completion | list[Completion]:
        """As `LLM.generate`. Cancelling the task aborts it; so does `abort(request_id)`, then the result is partial."""
        requests, many = await asyncio.to_thread(self.llm.requests, prompt, max_tokens, sampling, options)
        batch = self._open(AsyncBatchStream, requests, request_id)
        async for _ in batch:
            pass
        return batch.completions if many else batch.completions[0]

    @overload
    def stream(
        self, prompt: Prompt, max_tokens: int | None = ..., *, sampling: Sampling | None = ..., **options: Any
    ) -> AsyncStream: ...
    @overload
    def stream(
        self,
        prompt: list[Prompt],
        max_tokens: int | None = ...,
        *,
        sampling: Sampling | Sequence[Sampling] | None = ...,
        **options: Any,
    ) -> AsyncBatchStream: ...

    def stream(
        self,
        prompt: Prompt | list[Prompt],
        max_tokens: int | None = None,
        *,
        sampling: Sampling | Sequence[Sampling] | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncStream | AsyncBatchStream:
        """As `LLM.stream`; starts at once. Closing or dropping the stream aborts it; so does `abort(request_id)`."""
        requests, many = self.llm.requests(prompt, max_tokens, sampling, options)
        if many:
            return self._open(AsyncBatchStream, requests, request_id)
        return self._open(AsyncStream, requests, request_id)

    async def chat(
        self,
        messages: list[Message],
        max_tokens: int | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        sampling: Sampling | None = None,
        **options: Any,
    ) -> Completion:
        """As `LLM.chat`."""
        tokens = await asyncio.to_thread(self.llm.chat_tokens, messages, chat_template_kwargs)
        return await self.generate(tokens, max_tokens, sampling=sampling, **options)

    def stream_chat(
        self,
        messages: list[Message],
        max_tokens: int | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        sampling: Sampling | None = None,
        **options: Any,
    ) -> AsyncStream:
        """As `LLM.stream_chat`."""
        tokens = self.llm.chat_tokens(messages, chat_template_kwargs)
        return self.stream(tokens, max_tokens, sampling=sampling, **options)

    def abort(self, request_id: str) -> None:
        """End the request with that `request_id`, if it is still running: its reader gets what has been generated."""
        reader = self._named.get(request_id)
        if reader is not None:
            reader.abort()

    async def call(self, function: Callable[[LLM], Result]) -> Result:
        """Run `function` in the engine's thread, between two steps: `await llm.call(LLM.stats)`."""
        llm = self.llm
        return await asyncio.wrap_future(self.thread.call(lambda engine: function(llm)))

    def __repr__(self) -> str:
        return f"Async{self._llm!r}" if self._llm is not None else "AsyncLLM(not open)"

    def submit(self, requests: list[Request], observers: Sequence[Observer] = ()) -> tuple[Inbox, list[Job]]:
        """Start all of `requests` or none; what they emit comes into the inbox. `observers`: one for each, or none."""
        self.thread.check_open()
        loop = asyncio.get_running_loop()
        if self._post is None or self._post.loop is not loop:
            self._post = Post(loop)
        inbox = Inbox(len(requests), self._post)
        emits: list[Observer] = [partial(inbox.put, index) for index in range(len(requests))]
        if observers:
            emits = [partial(_both, *pair) for pair in zip(observers, emits, strict=True)]
        outputs = [self.llm.output(request) for request in requests]
        jobs = [Job(*each) for each in zip(requests, outputs, emits, strict=True)]
        self.thread.submit(jobs)
        return inbox, jobs

    def _open(self, kind: type[AnyReader], requests: list[Request], request_id: str | None) -> AnyReader:
        other = self._named.get(request_id) if request_id is not None else None
        if other is not None and not other.ended:
            raise SettingError(f"request_id is {request_id!r}, which another call in flight already has")
        reader = kind(self, requests)
        if request_id is not None:
            self._named[request_id] = reader
        return reader


def _both(first: Observer, second: Observer, event: Event) -> None:
    first(event)
    second(event)
