"""Decides step by step whether and what to speculate on; the engine's interface to speculation.

    propose(requests)       before a step: proposals for some of them, or none at all
    verified(...)           after a step with proposals: how many were right, how long it took
    plain(...)              after a step without: how long it took
    ended(request)          a later request may repeat its tokens

The controller owns the proposer and the measurements (`pace`). A request's part of these is in its `Guess`, from its
first proposal to its end. Nothing here touches the memory: the engine makes room for proposals and rolls wrong ones
back.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..request import Request
from .log import Match
from .pace import DRAFTED, FADES_ALL, OWN, Costs, Rates, allot, classes_of

log = logging.getLogger("onekv.engine")


class Proposer(Protocol):
    """None of these should raise. One that does is not asked again (`Speculation.failed`); answers do not change."""

    def propose(self, request: Request, limit: int) -> Match | None:
        """At most `limit` tokens that may follow those of `request`."""

    def learn(self, request: Request) -> None:
        """`request` has ended, and is cached."""

    def forget(self, request: Request) -> None:
        """`request` has ended: nothing of it is to be kept but what was learned."""

    def clear(self) -> None:
        """What is cached was cleared."""


@dataclass(frozen=True)
class SpeculationStats:
    """Tokens that were proposed, those of them that were right, and steps with proposals."""

    proposed: int = 0
    accepted: int = 0
    steps: int = 0
    # Rows that were computed again alone, because another token was too close.
    doubtful: int = 0


@dataclass
class Guess:
    """What is known of one request."""

    rates: Rates = field(default_factory=Rates)
    # Of the tokens proposed last: the class of each; and the classes of all before.
    classes: list[int] = field(default_factory=list)
    tried: set[int] = field(default_factory=set)
    # Its next token is computed alone.
    alone: bool = False


# How many tokens to verify of each request's proposal (how likely each is right with all before it), where a step
# without any has so many rows.
Allot = Callable[[Iterable[Sequence[float]], int, Costs], list[int]]


class Proposals(NamedTuple):
    """For each request, tokens that may be next, and how many the draft model should guess instead."""

    tokens: list[list[int]]
    drafts: list[int]


class Speculation:
    def __init__(self, proposer: Proposer | None, most: int, drafts: bool = False, allot: Allot = allot) -> None:
        """At most `most` tokens are proposed to a request at a time; `allot` decides how many of them are verified.

        `drafts`: there is a draft model, too.
        """
        self.proposer, self.most, self._drafts, self.allot = proposer, most, drafts, allot
        self._rates = Rates()
        # Of steps with tokens that were found, and with drafts.
        self._found, self._drafted = Costs(), Costs()
        self._guesses: dict[Request, Guess] = {}
        self._proposed = self._accepted = self._steps = self._doubtful = 0
        # Why the proposer is not asked any more.
        self.failed: str | None = None

    def propose(self, requests: list[Request]) -> Proposals | None:
        """What to verify for each of `requests` in their next step; None: nothing for anybody.

        What is found is taken before what a draft model would have to compute.
        """
        limits = [self._limit(request) for request in requests]
        found = [self._find(request, limit) for request, limit in zip(requests, limits, strict=True)]
        classes = [classes_of(some.length, len(some.tokens)) if some else [] for some in found]
        counts = self._allot(requests, classes, self._found)
        if any(counts):
            tokens = [some.tokens[:count] if some else [] for some, count in zip(found, counts, strict=True)]
            return Proposals(tokens, [0] * len(requests))
        if self._drafts:
            counts = self._allot(requests, [[DRAFTED] * limit for limit in limits], self._drafted)
            if any(counts):
                return Proposals([[] for _ in requests], counts)
        return None

    def _limit(self, request: Request) -> int:
        """How many tokens may be proposed: the last one is never fed back, so nothing is proposed behind it."""
        guess = self._guesses.get(request)
        # A function of a caller's own may make another token of the smallest difference.
        if (guess is not None and guess.alone) or request.sampling.logits_processors:
            return 0
        return max(0, min(self.most, request.max_tokens - len(request.tokens) - 1))

    def _find(self, request: Request, limit: int) -> Match | None:
        found = None
        if self.proposer is not None and limit:
            with self._asking():
                found = self.proposer.propose(request, limit)
        return found

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """A proposer that raises is not asked again: `failed` says why."""
        try:
            yield
        except Exception as error:
            log.exception("the proposer failed and is no longer used; answers continue without its guesses")
            self.proposer, self.failed = None, f"the proposer failed: {error!r}"

    def _allot(self, requests: list[Request], classes: list[list[int]], costs: Costs) -> list[int]:
        """How many tokens of each proposal to verify, where they are of these classes."""
        if not any(classes):
            return [0] * len(requests)
        likely = []
        for request, some in zip(requests, classes, strict=True):
            guess = self._guess(request)
            guess.classes = some
            likely.append(guess.rates.chances(some))
        return self.allot(likely, len(requests), costs)

    def _guess(self, request: Request) -> Guess:
        if request not in self._guesses:
            self._guesses[request] = Guess(Rates(list(self._rates.rates)))
        return self._guesses[request]

    def verified(
        self,
        requests: list[Request],
        proposals: list[list[int]],
        drafted: bool,
        accepted: list[int],
        seconds: float,
    ) -> None:
        """A step with `proposals` took so long, their drafting included; so many tokens of each were right."""
        (self._drafted if drafted else self._found).add(len(requests) + sum(map(len, proposals)), seconds)
        self._steps += 1
        for request, proposal, right in zip(requests, proposals, accepted, strict=True):
            request.proposed += len(proposal)
            request.accepted += right
            self._proposed += len(proposal)
            self._accepted += right
            # Who has ended has none.
            guess = self._guesses.get(request)
            if guess is not None and not proposal:
                guess.alone = False
            elif guess is not None:
                # What was in doubt is not known to be wrong.
                self._learn(guess, right, right < len(proposal) and not guess.alone)

    def _learn(self, guess: Guess, right: int, wrong: bool) -> None:
        """So many tokens of a request's proposal were right, and then one `wrong`, if any."""
        known = guess.classes[: right + wrong]
        for index in dict.fromkeys(known):
            count, missed = known.count(index), int(wrong and index == known[-1])
            guess.rates.learn(index, count - missed, missed, OWN)
            if index not in guess.tried:
                guess.tried.add(index)
                self._rates.began(index, 1 - missed / count)

    def doubt(self, request: Request) -> None:
        """Its next token could not be told for sure: it is computed alone."""
        self._doubtful += 1
        self._guess(request).alone = True

    def plain(self, requests: list[Request], seconds: float) -> None:
        """A step without proposals gave each of `requests` a token."""
        rows = len(requests)
        for costs in (self._found, self._drafted):
            costs.add(rows, seconds)
            costs.fade(rows)
        self._rates.fade(Rates(), FADES_ALL)
        for request in requests:
            if (guess := self._guesses.get(request)) is not None:
                guess.alone = False
                guess.rates.fade(self._rates)

    def ended(self, request: Request, kept: bool) -> None:
        """`kept`: what it has computed is cached, and its tokens may be proposed to others."""
        self._guesses.pop(request, None)
        if self.proposer is not None:
            with self._asking():
                if kept:
                    self.proposer.learn(request)
                self.proposer.forget(request)

    def clear(self) -> None:
        if self.proposer is not None:
            with self._asking():
                self.proposer.clear()

    def stats(self) -> SpeculationStats:
        return SpeculationStats(self._proposed, self._accepted, self._steps, self._doubtful)
