"""One request through its life.

    waiting -> prefilling -> running -> finished
       \\____________\\___________\\____-> finished ("cancelled", or "error" with `error` set)

While it prefills or runs it owns an open `Sequence`; the engine closes it when the request finishes.
"""

import secrets
import time
from dataclasses import dataclass, field
from typing import Literal

from ..errors import OneKVError, SettingError
from ..memory.sequence import Sequence

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0 takes the likeliest; a seed makes the choice repeatable."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise SettingError(f"temperature is {self.temperature}; it must be at least 0")
        if not 0 < self.top_p <= 1:
            raise SettingError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise SettingError(f"min_p is {self.min_p}; it must be from 0 to 1")
        if self.top_k < 0:
            raise SettingError(f"top_k is {self.top_k}; it must be at least 0 (0: no limit)")


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
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: OneKVError | None = None

    def __post_init__(self) -> None:
        self.sequence: Sequence | None = None
        self.cached_tokens = 0
        seed = self.sampling.seed
        self.seed = secrets.randbits(32) if seed is None else seed
        self.created = time.perf_counter()
        self.started = self.first = self.ended = self.created

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
    def next_input(self) -> int:
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def timings(self) -> Timings:
        return Timings(self.first - self.created, self.first - self.started, self.ended - self.first)
