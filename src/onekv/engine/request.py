"""One request through its life.

    waiting -> loading -> prefilling -> running -> finished
       \\_________\\___________\\___________\\____-> finished ("cancelled", or "error" with `error` set)

`state` says where it is; the scheduler alone changes it (scheduler.py). While it loads, prefills or runs it has a
`Lease` on memory, which the engine ends when the request finishes.
"""

import math
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from ..errors import OneKVError, SettingError
from ..memory.pool.sequence import Sequence
from ..prefix.lease import Lease

FinishReason = Literal["stop", "length", "cancelled", "error"]
RequestState = Literal["new", "waiting", "looking", "loading", "prefilling", "running", "finished"]


# A temperature below this would divide logits to infinity: it is as good as 0.
COLD = 1e-4


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0 takes the likeliest; a seed makes the choice repeatable."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    # Above 1: tokens of the prompt and the answer become less likely.
    repetition_penalty: float = 1.0
    # Taken off the logits of tokens of the answer: once, and for every time they occur.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # (token id, added to its logit) pairs.
    logit_bias: tuple[tuple[int, float], ...] = ()

    def of_answer(self, index: int) -> "Sampling":
        """For one of several answers to a prompt: they differ, also when there is a seed."""
        return self if self.seed is None else replace(self, seed=self.seed + index)

    @property
    def looks_back(self) -> bool:
        """Whether the choice depends on the tokens before it."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise SettingError(f"temperature is {self.temperature}; it must be at least 0")
        if self.temperature < COLD:
            object.__setattr__(self, "temperature", 0.0)
        if not 0 < self.top_p <= 1:
            raise SettingError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise SettingError(f"min_p is {self.min_p}; it must be from 0 to 1")
        if self.top_k < 0:
            raise SettingError(f"top_k is {self.top_k}; it must be at least 0 (0: no limit)")
        if not 0 < self.repetition_penalty < math.inf:
            raise SettingError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0 (1: none)")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise SettingError(f"{name} is {getattr(self, name)}; it must be a number")


class Constraint(Protocol):
    """Which tokens may come next. Belongs to one request; called by the engine only, in turn."""

    def allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """One flag per token of the vocabulary; at least one is set."""

    def advance(self, token: int) -> None:
        """`token` was chosen. Raises OneKVError if it cannot be followed."""


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a chosen token's probability, and the likeliest tokens with theirs, likeliest first."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Timings:
    """Seconds: until the first token (waiting included), for the prompt, for the tokens after the first."""

    first_token: float
    prefill: float
    decode: float


@dataclass(eq=False)
class Request:
    prompt: list[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    # Requests of different salts never share cached blocks.
    salt: str = ""
    # Keep the prompt's blocks cached until they are unpinned.
    pin: bool = False
    # How many of the likeliest tokens to report with each token; None: no log probabilities at all.
    top_logprobs: int | None = None
    constraint: Constraint | None = None
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: OneKVError | None = None

    def __post_init__(self) -> None:
        self.state: RequestState = "new"
        self.lease: Lease | None = None
        # One for each of `tokens`, if they were asked for.
        self.logprobs: list[Logprob] = []
        self.cached_tokens = 0
        seed = self.sampling.seed
        self.seed = secrets.randbits(32) if seed is None else seed
        self.arrived(time.perf_counter())

    def arrived(self, now: float) -> None:
        """Its time starts now."""
        self.created = self.started = self.first = self.ended = now

    @property
    def sequence(self) -> Sequence:
        assert self.lease is not None, f"a request that is {self.state} has no sequence"
        return self.lease.sequence

    @property
    def max_length(self) -> int:
        """Tokens stored at most: the last one generated is never fed back."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def all_tokens(self) -> list[int]:
        return self.prompt + self.tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def looks_back(self) -> bool:
        """Whether a token can only be chosen when the one before it is known."""
        return self.constraint is not None or self.sampling.looks_back

    @property
    def next_input(self) -> int:
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def timings(self) -> Timings:
        return Timings(self.first - self.created, self.first - self.started, self.ended - self.first)
