"""Proposers of which a test knows how right they are, and a pace that verifies all that they say."""

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from onekv.engine import Engine, Request
from onekv.engine.speculation.control import Proposer, Speculation
from onekv.engine.speculation.log import Match


class Told:
    """A proposer that is told nothing."""

    def learn(self, request: Request) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass

    def clear(self) -> None:
        pass


class Adversary(Told):
    """Says anything, of any length."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._random, self._vocabulary = np.random.default_rng(seed), vocabulary

    def propose(self, request: Request, limit: int) -> Match | None:
        count = int(self._random.integers(0, limit + 1))
        return Match(count, self._random.integers(0, self._vocabulary, count).tolist()) if count else None


class Oracle(Told):
    """Knows the answers, and says a token of them with this probability, else another."""

    def __init__(self, share: float, vocabulary: int, seed: int = 0) -> None:
        self._share, self._vocabulary = share, vocabulary
        self._random = np.random.default_rng(seed)
        self._answers: WeakKeyDictionary[Request, list[int]] = WeakKeyDictionary()

    def know(self, request: Request, answer: list[int]) -> None:
        self._answers[request] = answer

    def propose(self, request: Request, limit: int) -> Match | None:
        after = self._answers[request][len(request.tokens) :][:limit]
        wrong = self._random.random(len(after)) >= self._share
        guess = [(token + spoilt) % self._vocabulary for token, spoilt in zip(after, wrong.tolist(), strict=True)]
        return Match(len(guess), guess) if guess else None


def everything(likely: Iterable[Sequence[float]], rows: int, costs: Any) -> list[int]:
    """All that is proposed is verified."""
    return [len(chances) for chances in likely]


def speculate(engine: Engine, proposer: Proposer | None, always: bool = True) -> Engine:
    """`engine` with this proposer, or its own; `always`: all that it says is verified, whether that pays or not."""
    assert engine.speculation is not None
    if proposer is not None:
        engine.speculation = Speculation(proposer, engine.speculation.most)
    if always:
        engine.speculation.allot = everything
    return engine
