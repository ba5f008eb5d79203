"""The model behind the server, as the event loop sees it.

`Backend` owns an `AsyncLLM` and adds what a server needs: the model's names, sampling defaults, the longest answer,
metrics. `generate` starts generations, whose events arrive in one `Inbox`; those that have not ended when the block is
left (the client disconnected) are cancelled:

    with backend.generate([...]) as inbox: ...
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ..async_llm import AsyncLLM
from ..engine import Constraint, Engine, Request, Sampling
from ..engine.contents import Slices
from ..errors import OneKVError, SettingError
from ..inbox import Inbox
from ..llm import LLM, Probe
from ..models import DEFAULT_MODEL, LoadedModel
from ..prefix.events import Listener
from . import journal
from .errors import BadRequestError, ContextLengthError, NotFoundError
from .hygiene import Hygiene
from .metrics import Metrics
from .model_settings import ModelSettings
from .sampling_defaults import SamplingDefaults
from .turns import Turns

Result = TypeVar("Result")
# As a request's `max_tokens`.
AS_MANY_AS_FIT = -1


@dataclass(frozen=True)
class Generation:
    """One generation to start. Without `max_tokens` it may continue to the backend's default, or as far as fits."""

    tokens: list[int]
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stops: Sequence[str] = ()
    top_logprobs: int | None = None
    constraint: Constraint | None = None
    salt: str = ""
    # Where there is room for less than `max_tokens`, take what there is.
    clamp: bool = False
    # Log probabilities of the prompt's tokens, too; nothing of it is then taken from the cache.
    scored: bool = False
    # What the answer may mostly be.
    prediction: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Progress:
    """How far a prompt is: tokens in total, found in the cache, and stored so far; and seconds since it came."""

    total: int
    cached: int
    stored: int
    seconds: float


class Backend:
    def __init__(
        self,
        model: str | LoadedModel = DEFAULT_MODEL,
        *,
        default_max_tokens: int = 4096,
        turn_memory: int = 16 << 20,
        hygiene: Hygiene | None = None,
        log_words: bool = True,
        served: ModelSettings | None = None,
        name: str | None = None,
        metrics: Metrics | None = None,
        listener: Listener | None = None,
        **settings: Any,
    ) -> None:
        """Turns that were generated are remembered in `turn_memory` bytes. Without `hygiene`, OneKV's own rules as they
        are by default; without `name`, the model's own. `metrics` continue from a backend of the same model before.
        `listener` hears which blocks are cached. The rest are the arguments of `AsyncLLM`.
        """
        self.served = served or ModelSettings()
        self.engine = AsyncLLM(model, chat_template=self.served.template(), **settings)
        self.thread = self.engine.thread
        self.default_max_tokens = default_max_tokens
        self.hygiene = hygiene or Hygiene()
        # Whether the log may quote prompts.
        self.log_words = log_words
        self.metrics = metrics or Metrics(self.hygiene.names)
        self._name = name
        self._turn_memory, self._listener = turn_memory, listener
        # Values for the chat template, where a request does not give them.
        self.template_args = self.served.chat_template_args or {}
        # Whether the rest is known: before that, only the thread and the metrics are.
        self.loaded = False
        self.llm: LLM
        self.turns: Turns

    def start(self) -> None:
        """Load the model; blocks until it is ready."""
        self.engine.start()
        if (listener := self._listener) is not None:
            self.thread.call(lambda engine: engine.prefix.listen(listener)).result()
        self.llm = self.engine.llm
        self.name = self._name or self.llm.name
        # Its own, then what else it may be called.
        self.names = tuple(dict.fromkeys((self.name, *self.served.alias)))
        try:
            self.defaults = SamplingDefaults.of(self.served, self.llm.path)
        except SettingError:
            self.engine.stop()
            raise
        self.tokenizer = self.llm.tokenizer
        self.turns = Turns(self._turn_memory, self.llm.turns_file)
        self.loaded = True

    def stop(self, grace: float, step_limit: float = math.inf) -> None:
        """Like `AsyncLLM.stop`; a model that is being loaded, which may take long, is left for the process to end."""
        if self.loaded:
            self.engine.stop(grace, step_limit)

    def check_model(self, name: str) -> None:
        """Raises NotFoundError if `name` is not the model there is."""
        if name not in (*self.names, "default") and not self.served.any_model:
            known = " or ".join(map(repr, self.names))
            raise NotFoundError(
                f"there is no model {name!r}; this server has {known} (--alias adds names, --any-model on accepts any)"
            )

    def encode(self, prompt: str | list[int]) -> list[int]:
        """The tokens of a plain prompt. Raises BadRequestError for what the model does not know."""
        if isinstance(prompt, str):
            try:
                return [int(token) for token in self.tokenizer.encode(prompt)]
            except UnicodeEncodeError:
                raise BadRequestError("it contains a lone surrogate", "prompt") from None
        vocabulary = self.llm.vocabulary
        wrong = next((token for token in prompt if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise BadRequestError(f"token id {wrong} is out of range; the model knows 0 to {vocabulary - 1}", "prompt")
        return prompt

    @property
    def longest(self) -> int:
        """The most tokens a request may have, prompt and answer together."""
        return self.llm.longest

    def max_tokens(self, prompt: int, wanted: int | None, clamp: bool = False) -> int:
        """Tokens to generate at most after `prompt` tokens. Raises ContextLengthError with the numbers."""
        room = self.longest - prompt + 1
        default = self.default_max_tokens
        if wanted == AS_MANY_AS_FIT:
            wanted, default = None, room
        if room < 1 or (wanted is not None and wanted > room and not clamp):
            hint = (
                f"The model's own limit is {self.llm.context or 'not known'} tokens, "
                f"the KV pool holds {self.llm.plan.longest} tokens (--kv-memory)."
            )
            raise ContextLengthError(prompt, wanted, self.longest, hint)
        return min(room, default if wanted is None else wanted)

    @contextmanager
    def generate(self, generations: list[Generation]) -> Iterator[Inbox]:
        """Start all `generations` or none; whatever has not ended when the block is left is cancelled."""
        try:
            requests = [self._request(generation) for generation in generations]
            observed = [self.metrics.observe(request) for request in requests]
            if (entry := journal.current.get()) is not None:
                entry.model, entry.generations = self.name, observed
            inbox, jobs = self.engine.submit(requests, observed)
            inbox.numbers = [id(request) for request in requests]
        except OneKVError as error:
            self.metrics.refused(error)
            raise
        try:
            yield inbox
        finally:
            left = [job for index, job in enumerate(jobs) if index in inbox.open]
            if left:
                self.thread.cancel(left)

    def _request(self, wanted: Generation) -> Request:
        count = self.max_tokens(len(wanted.tokens), wanted.max_tokens, wanted.clamp)
        sampling = replace(wanted.sampling, stop=wanted.stops, logprobs=wanted.top_logprobs)
        return Request(
            wanted.tokens,
            count,
            sampling,
            salt=wanted.salt,
            constraint=wanted.constraint,
            scored=wanted.scored,
            prediction=wanted.prediction,
        )

    def progress(self, inbox: Inbox) -> Progress | None:
        """Of the first request of `inbox`, as it was not long ago; None where it is not known, or has tokens."""
        views = self.thread.look().requests
        view = next((view for view in views if view.number == inbox.numbers[0] and not view.generated_tokens), None)
        if view is None:
            return None
        stored = min(view.stored_tokens, view.prompt_tokens)
        return Progress(view.prompt_tokens, view.cached_tokens, stored, view.age)

    def probe(self, tokens: list[int], salt: str) -> "asyncio.Future[Probe]":
        """What a request that is started after this will find cached; it is in the queue when this returns."""
        return asyncio.wrap_future(self.thread.call(lambda _: self.llm.probe(tokens, salt)))

    async def in_slices(self, begin: Callable[[Engine], Slices[Result]]) -> Result:
        """Run a generator in the engine's thread, one yield at a time between steps; returns what it returns."""
        begun: list[Slices[Result]] = []

        def go_on(engine: Engine) -> StopIteration | None:
            if not begun:
                begun.append(begin(engine))
            try:
                next(begun[0])
            except StopIteration as end:
                return end
            return None

        while (end := await asyncio.wrap_future(self.thread.call(go_on))) is None:
            pass
        result: Result = end.value
        return result

    async def call(self, function: Callable[[LLM], Result]) -> Result:
        """Run `function` in the engine's thread, between two steps. Raises OverloadedError where that has ended."""
        self.thread.check_open()
        return await self.engine.call(function)
