"""Guesses at the next tokens of simulated requests: some right, some not, some right up to a point."""

import xxhash

from ..engine import Request
from ..engine.speculation.log import Match
from .faults import Faults, Injected
from .truth import VOCABULARY, Truth


class Guesses:
    """A proposer that knows the truth and says it now and then. What it says follows from the request alone."""

    def __init__(self, truth: Truth, every: int, faults: Faults) -> None:
        """One for every n-th token of a request."""
        self._truth, self._every, self._faults = truth, every, faults

    def propose(self, request: Request, limit: int) -> Match | None:
        self._may_fail()
        tokens = request.all_tokens
        chance = xxhash.xxh3_64_intdigest(b"%d %d" % (len(tokens), tokens[-1]))
        if chance % self._every:
            return None
        chance //= self._every
        right = chance % (limit + 1)
        guess = self._truth.answer(tokens, right) if right else []
        guess += [(chance >> place) % VOCABULARY for place in range(limit - len(guess))]
        return Match(len(guess), guess)

    def learn(self, request: Request) -> None:
        """It knows all there is."""
        self._may_fail()

    def forget(self, request: Request) -> None:
        """It keeps nothing of a request."""
        self._may_fail()

    def clear(self) -> None:
        """Nor of anything else."""
        self._may_fail()

    def _may_fail(self) -> None:
        if self._faults.strikes("proposer"):
            raise Injected("a proposer failed")
