"""Recent cache lookups: how much of each prompt was found, and where and why the match ended.

The engine's thread adds an entry at a request's first token; any thread may read. Entries hold a few token ids, which
are turned into words when someone who may read them asks.
"""

import itertools
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from ..engine import Request
from ..prefix.branch import SHOWN

KEPT = 512
# Shared by all models, so that a client can ask for what is newer than the last one it saw.
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Lookup:
    """`cached` of `prompt` tokens were found; `missed` is the reason why not more."""

    number: int
    # Seconds since 1970.
    time: float
    salt: str
    prompt: int
    cached: int
    missed: str | None
    # Tokens before and from the first one that had to be computed, and what is cached in its place.
    before: tuple[int, ...]
    came: tuple[int, ...]
    had: tuple[int, ...]
    # Later tokens that are cached but had to be recomputed.
    again: int


class Lookups:
    """Lookups of one model."""

    def __init__(self) -> None:
        # Fields of a `Lookup`, in plain tuples: the garbage collector does not have to look at those.
        self._kept: deque[tuple[Any, ...]] = deque(maxlen=KEPT)

    @property
    def last(self) -> int:
        """The number of the newest one, 0 if there is none."""
        return self._kept[-1][0] if self._kept else 0

    def after(self, number: int) -> list[Lookup]:
        """Lookups newer than `number`, oldest first."""
        return [Lookup(*each) for each in self._kept.copy() if each[0] > number]

    def add(self, request: Request) -> None:
        """Called in the engine's thread: must take microseconds only."""
        at, branch = request.cached_tokens, request.branch
        if branch is not None:
            at = branch.position
        self._kept.append(
            (
                next(_numbers),
                time.time(),
                request.salt,
                len(request.prompt),
                request.cached_tokens,
                request.missed,
                tuple(request.prompt[max(0, at - SHOWN) : at]),
                tuple(request.prompt[at : at + SHOWN]),
                tuple(branch.cached) if branch is not None else (),
                branch.again if branch is not None else 0,
            )
        )
