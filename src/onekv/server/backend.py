"""The model behind the server, as the event loop sees it.

`Backend` owns an `AsyncLLM` and adds what a server needs: the model's name, the longest answer, metrics. `generate`
starts generations, whose events come into one `Inbox`; those that have not ended when the block is left (the client
went away) are cancelled:

    with backend.generate([...]) as inbox: ...
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ..async_llm import AsyncLLM
from ..engine import Constraint, Request, Sampling
from ..errors import OneKVError, TooLongError
from ..inbox import Inbox
from ..llm import LLM
from ..models import DEFAULT_MODEL
from .errors import BadRequestError, NotFoundError
from .metrics import Metrics

Result = TypeVar("Result")


@dataclass(frozen=True)
class Generation:
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
        default_max_tokens: int = 4096,
        **settings: Any,
    ) -> None:
        """The rest are the arguments of `AsyncLLM`."""
        self.engine = AsyncLLM(model, **settings)
        self.thread = self.engine.thread
        self.default_max_tokens = default_max_tokens
        self.metrics = Metrics()
        self.llm: LLM

    def start(self) -> None:
        """Load the model; blocks until it is ready."""
        self.engine.start()
        self.llm = self.engine.llm
        self.name = self.llm.name
        self.tokenizer = self.llm.tokenizer

    def stop(self, grace: float) -> None:
        self.engine.stop(grace)

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
    def generate(self, generations: list[Generation]) -> Iterator[Inbox]:
        """Start all `generations` or none; whatever has not ended when the block is left is cancelled."""
        try:
            requests = [self._request(generation) for generation in generations]
            inbox, jobs = self.engine.submit(requests, [self.metrics.observe(request) for request in requests])
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
        return Request(wanted.tokens, count, sampling, salt=wanted.salt, constraint=wanted.constraint)

    async def call(self, function: Callable[[LLM], Result]) -> Result:
        """Run `function` in the engine's thread, between two steps. Raises OverloadedError where that has ended."""
        self.thread.check_open()
        return await self.engine.call(function)
