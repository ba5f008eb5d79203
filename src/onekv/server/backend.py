"""The model behind the server, as the event loop sees it.

`Backend` owns the engine thread. `generate` starts generations, whose events come into one `Inbox`; those that have not
ended when the block is left (the client went away) are cancelled:

    with backend.generate([...]) as inbox: ...
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ..engine import Constraint, Engine, EngineThread, Event, Job, Request, Sampling, TextOutput
from ..errors import OneKVError, TooLongError
from ..llm import LLM
from ..models import DEFAULT_MODEL
from .errors import BadRequestError, NotFoundError
from .inbox import Inbox
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

    @contextmanager
    def generate(self, prompts: list[Prompt]) -> Iterator[Inbox]:
        """Start all `prompts` or none; whatever has not ended when the block is left is cancelled."""
        inbox = Inbox(len(prompts))
        try:
            jobs = [self._job(prompt, partial(inbox.put, index)) for index, prompt in enumerate(prompts)]
            self.thread.submit(jobs)
        except OneKVError as error:
            self.metrics.refused(error)
            raise
        try:
            yield inbox
        finally:
            left = [job for index, job in enumerate(jobs) if index in inbox.open]
            if left:
                self.thread.cancel(left)

    def _job(self, prompt: Prompt, put: Callable[[Event], None]) -> Job:
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
            put(event)

        return Job(request, output, emit)

    async def call(self, function: Callable[[LLM], Result]) -> Result:
        """Run `function` in the engine's thread, between two steps."""
        return await asyncio.wrap_future(self.thread.call(lambda engine: function(self.llm)))
