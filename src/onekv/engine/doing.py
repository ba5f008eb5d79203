"""What the engine's thread is doing, for every thread to read without a lock: one immutable record.

    loading -> idle -> order | step -> idle ... -> closing -> ended

The engine's thread replaces the record (`EngineThread.doing`) whenever it begins something else. Orders and steps are
short: one that takes longer than a limit is stuck. Loading a model and writing the cache at the end may take any time,
and so may compiling, which is part of the first steps on CPU and does not count.
"""

from dataclasses import dataclass
from typing import Literal

from .. import loops
from ..units import format_size
from .request import RequestState

What = Literal["loading", "idle", "order", "step", "closing", "ended"]

_WORDS: dict[str, str] = {
    "loading": "loading the model",
    "order": "executing a command between two steps",
    "step": "running a step",
    "closing": "storing the cache",
}
# What a step does for a request, by the state that the request is in.
_STEPS: dict[RequestState, str] = {
    "waiting": "admitting",
    "looking": "looking up the cache",
    "loading": "reading from the disk cache",
    "prefilling": "prefilling",
    "running": "decoding",
}


@dataclass(frozen=True)
class Doing:
    what: What
    # By the clock of the engine's thread, in seconds.
    since: float
    # For a step: the state of the requests that it currently works for, and their number.
    state: RequestState | None = None
    requests: int = 0
    # For closing: bytes handed to the disk cache so far, and in total.
    stored: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.stored is not None:
            return f"{_WORDS['closing']}: {format_size(self.stored[0])} of {format_size(self.stored[1])}"
        if self.state is None:
            return _WORDS.get(self.what, self.what)
        counted = "1 request" if self.requests == 1 else f"{self.requests} requests"
        return f"{_STEPS.get(self.state, _WORDS['step'])} for {counted}"

    def age(self, now: float) -> float:
        """How many seconds it has taken so far, not counting the time until the last loop was compiled."""
        return max(0.0, now - max(self.since, loops.compiled.at))

    def stuck(self, now: float, limit: float) -> bool:
        """Whether it is something that takes at most `limit` seconds, and has taken longer."""
        return self.what in ("order", "step") and self.age(now) > limit
