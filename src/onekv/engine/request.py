"""One request through its life.

    waiting -> loading -> prefilling -> running -> finished
       \\_________\\___________\\___________\\____-> finished ("cancelled", or "error" with `error` set)

Only the scheduler changes `state` (scheduler.py). While a request loads, prefills or runs, it has a `Lease` on memory,
which the engine ends when the request finishes.
"""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from ..errors import OneKVError
from ..memory.pool.sequence import Sequence
from ..prefix.branch import Branch
from ..prefix.lease import Lease
from .params import Sampling

FinishReason = Literal["stop", "length", "cancelled", "error"]
RequestState = Literal["new", "waiting", "looking", "loading", "prefilling", "running", "finished"]


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
    constraint: Constraint | None = None
    # Compute all of the prompt, with log probabilities of its tokens; it starts from nothing and leaves nothing cached.
    scored: bool = False
    # What the answer will mostly be: a source of guesses that changes nothing else.
    prediction: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: OneKVError | None = None

    def __post_init__(self) -> None:
        self.state: RequestState = "new"
        self.lease: Lease | None = None
        # While it waits: the request that is about to store most of its prompt, and up to which length.
        self.leader: tuple[Request, int] | None = None
        # One for each of `tokens`, if they were requested.
        self.logprobs: list[Logprob] = []
        # One for each token of the prompt but the first, if it is scored.
        self.prompt_logprobs: list[Logprob] = []
        self.cached_tokens = 0
        # Proposed tokens, and how many of them were accepted.
        self.proposed = self.accepted = 0
        # Where its prompt diverged from the cache, and why no more was cached; set when it starts.
        self.branch: Branch | None = None
        self.missed: str | None = None
        # Tokens that end the answer; the engine adds its model's own.
        self.stop_tokens = frozenset(self.sampling.stop_token_ids)
        seed = self.sampling.seed
        self.seed = secrets.randbits(32) if seed is None else seed
        self.arrived(time.perf_counter())

    def arrived(self, now: float) -> None:
        """Its time starts now."""
        self.created = self.started = self.first = self.ended = now

    def stop_at(self, stop_tokens: set[int]) -> None:
        """The model's own stop tokens also end the answer, unless they are ignored."""
        if not self.sampling.ignore_eos:
            self.stop_tokens |= stop_tokens

    @property
    def sequence(self) -> Sequence:
        assert self.lease is not None, f"a request that is {self.state} has no sequence"
        return self.lease.sequence

    @property
    def stored(self) -> int:
        """Tokens whose KV is stored."""
        return self.lease.sequence.length if self.lease is not None else 0

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


@dataclass(frozen=True)
class Progress:
    """What a step did: requests that got tokens or ended, each once, in that order; and those that failed."""

    changed: list[Request]

    @property
    def failed(self) -> list[Request]:
        return [request for request in self.changed if request.finish_reason == "error"]
