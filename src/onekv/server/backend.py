"""The model behind the server, as the event loop sees it.

`Backend` owns the engine thread. `generate` turns prompts into `Generation`s: async iterators over what the engine
emits. A generation that is dropped (its client went away) is cancelled when it is closed; always use it as

    async with backend.generate([...]) as generations: ...

The engine never waits for a reader: events pile up in the generation's own queue, at most max_tokens of them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..engine import Constraint, End, Engine, EngineThread, Event, Job, Piece, Request, Sampling, TextOutput
from ..errors import OneKVError, OverloadedError, TooLongError
from ..llm import LLM
from ..models import DEFAULT_MODEL
from .errors import BadRequestError, NotFoundError
from .metrics import Metrics

Result = TypeVar("Result")


@dataclass(frozen=True)
class Prompt:
    """One generation to start. Without `max_tokens` it may go on to the backend's default, or as far as fits."""

    tokens: list[int]
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stops: Sequence[str] = ()
    top_logprobs: int | None = None
    constraint: Constraint | None = None
    salt: str = ""
    # Where there is room for less than `max_tokens`, take what there is.
    clamp: bool = False


class Generation(AsyncIterator[Piece]):
    """Pieces of text as they come. Raises the request's OneKVError; `end` is set after the last piece."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.end: End | None = None

    def put(self, event: Event) -> None:
        self._events.put_nowait(event)

    async def __anext__(self) -> Piece:
        if self.end is not None:
            raise StopAsyncIteration
        event = await self._events.get()
        if isinstance(event, OneKVError):
            raise event
        if isinstance(event, End):
            self.end = event
            if event.finish_reason == "cancelled":
                # Whoever cancels by itself does not read on.
                raise OverloadedError("the server is shutting down; the answer was cut off", retry_after=5)
            raise StopAsyncIteration
        return event


class Backend:
    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        max_waiting: int = 256,
        max_wait: float = 600.0,
        default_max_tokens: int = 4096,
        **settings: Any,
    ) -> None:
        self._model, self._settings = model, settings
        self.default_max_tokens = default_max_tokens
        self.thread = EngineThread(self._build, max_waiting, max_wait)
        self.metrics = Metrics()
        self.llm: LLM

    def _build(self) -> Engine:
        self.llm = LLM(self._model, **self._settings)
        self.thread.check_integrity = self.llm.settings.check_integrity
        return self.llm.engine

    def start(self) -> None:
        """Load the model; blocks until it is ready."""
        self.thread.start()
        self.name = self.llm.name
        self.tokenizer = self.llm.tokenizer

    def stop(self, grace: float) -> None:
        self.thread.stop(grace)

    def check_model(self, name: str) -> None:
        """Raises NotFoundError if `name` is not the model there is."""
        if name not in (self.name, "default"):
            raise NotFoundError(f"there is no model {name!r}; this server has {self.name!r}")

    def encode(self, prompt: str | list[int]) -> list[int]:
        """The tokens of a plain prompt. Raises BadRequestError for what the model does not know."""
        if isinstance(prompt, str):
            try:
                return [int(token) for token in self.tokenizer.encode(prompt)]
            except UnicodeEncodeError:
                raise BadRequestError("it has half a character (a lone surrogate)", "prompt") from None
        vocabulary = self.llm.plan.layout.vocabulary
        wrong = next((token for token in prompt if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise BadRequestError(f"token id {wrong} is out of range; the model knows 0 to {vocabulary - 1}", "prompt")
        return prompt

    @property
    def longest(self) -> int:
        """The most tokens a request may have, prompt and answer together."""
        limits = [self.llm.plan.longest]
        if self.llm.context is not None and self.llm.settings.max_kv_size is None:
            limits.append(self.llm.context)
        return min(limits)

    def max_tokens(self, prompt: int, wanted: int | None, clamp: bool = False) -> int:
        """Tokens to generate at most after `prompt` tokens. Raises TooLongError with the numbers."""
        room = self.longest - prompt + 1
        if clamp and wanted is not None:
            wanted = min(wanted, max(1, room))
        if room < 1 or (wanted is not None and wanted > room):
            asked = f" and max_tokens is {wanted}" if wanted is not None else ""
            raise TooLongError(
                f"the prompt has {prompt} tokens{asked}, but prompt and answer together may have {self.longest}: "
                f"the model's context is {self.llm.context or 'not limited'}, "
                f"the KV pool holds {self.llm.plan.longest} (--kv-memory)"
            )
        return wanted if wanted is not None else min(room, self.default_max_tokens)

    @asynccontextmanager
    async def generate(self, prompts: list[Prompt]) -> AsyncIterator[list[Generation]]:
        """Start all `prompts` or none; whatever has not ended when the block is left is cancelled."""
        loop = asyncio.get_running_loop()
        generations = [Generation() for _ in prompts]
        try:
            jobs = [self._job(p, generation, loop) for p, generation in zip(prompts, generations, strict=True)]
            self.thread.submit(jobs)
        except OneKVError as error:
            self.metrics.refused(error)
            raise
        try:
            yield generations
        finally:
            left = [job for job, generation in zip(jobs, generations, strict=True) if generation.end is None]
            if left:
                self.thread.cancel(left)

    def _job(self, prompt: Prompt, generation: Generation, loop: asyncio.AbstractEventLoop) -> Job:
        request = Request(
            prompt.tokens,
            self.max_tokens(len(prompt.tokens), prompt.max_tokens, prompt.clamp),
            prompt.sampling,
            salt=prompt.salt,
            top_logprobs=prompt.top_logprobs,
            constraint=prompt.constraint,
        )
        output = TextOutput(self.tokenizer.detokenizer, self.llm.stop_tokens, prompt.stops)
        observe = self.metrics.observe(request)

        def emit(event: Event) -> None:
            observe(event)
            # A loop that was closed has nobody left to read.
            if not loop.is_closed():
                loop.call_soon_threadsafe(generation.put, event)

        return Job(request, output, emit)

    async def call(self, function: Callable[[LLM], Result]) -> Result:
        """Run `function` in the engine's thread, between two steps."""
        return await asyncio.wrap_future(self.thread.call(lambda engine: function(self.llm)))
