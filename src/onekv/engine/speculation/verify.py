"""Samples the tokens of requests whose next ones were guessed, from the logits after each guess.

A request with the proposal p1, p2 has three rows of logits: after its last token, after p1 and after p2. The first
sampled token is its next one, whatever was proposed; if that is p1, the token sampled from the second row is the one
after it, and so on. Each token is sampled with the request's own key for its place in the answer, so the answer does
not depend on the proposal.

    rows      last      p1       p2
    sampled   p1        x        -          two tokens: p1 and x. What is stored of p2 is rolled back

If a row's token could have been another one if computed alone (`Drawn.sure`), nothing is sampled from it: what follows
is rolled back, and the request's next step is of one token. If a step gives exactly the logits of one token at a time,
there is no tolerance, and no doubt.

Rows of requests whose rules depend on earlier tokens are sampled in waves, one token of each, because a constraint or a
penalty must be given a token before the next one is sampled. So are rows that are drawn at random where that takes as
long as computing them (`costly`): behind a wrong guess, nothing is drawn. Those of all others are sampled at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ...memory.device import settle
from ..request import Logprob, Request
from ..sampling import Drawn

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Row:
    """What a step gave one request: its next tokens, and for each its log probabilities, if they were asked for."""

    request: Request
    tokens: list[int]
    logprobs: list[Logprob]
    # Whether the model's output is a number; if not, there are no tokens.
    sound: bool
    # Whether these are all the tokens that it gets from this step.
    last: bool = True
    # Tokens that were stored for it and are to be taken back.
    back: int = 0
    # Whether the next one has to be computed alone.
    doubtful: bool = False


class Outcome(NamedTuple):
    """What was drawn from some rows, as numbers."""

    drawn: Drawn
    tokens: Numbers
    sound: Numbers
    # None: all are.
    sure: Numbers | None


# Requests, one per row of logits, and the number of tokens that each has before: what is drawn, with its tolerance.
Draw = Callable[[list[Request], mx.array, list[int], float | None], Drawn]


class Verification:
    def __init__(
        self,
        draw: Draw,
        tolerance: float | None,
        requests: list[Request],
        proposals: list[list[int]],
        logits: mx.array,
        costly: bool = False,
    ) -> None:
        """`logits` [rows, vocabulary] are those of each request after each other, one row more than its proposal.

        They may be so far from those of one token at a time as `tolerance` says; None: they are the same. `costly`: to
        draw from a row at random takes about as long as to compute it.
        """
        self._draw, self._tolerance = draw, tolerance
        self._requests, self._proposals, self._logits = requests, proposals, logits
        self._in_turn = [r.looks_back or (costly and r.sampling.temperature > 0) for r in requests]
        self._before = [len(request.tokens) for request in requests]
        # How many tokens of each proposal were what was drawn.
        self._right = [0] * len(requests)
        self._first = [0]
        for proposal in proposals:
            self._first.append(self._first[-1] + 1 + len(proposal))

    @property
    def accepted(self) -> list[int]:
        """How many tokens of each proposal are in the answer: of one that ended, those up to its end."""
        return [
            min(right, len(request.tokens) - before)
            for request, right, before in zip(self._requests, self._right, self._before, strict=True)
        ]

    def waves(self) -> Iterator[list[Row]]:
        """What the requests get, some tokens at a time; each is to be told of its own before the next wave."""
        some, at = list(range(len(self._requests))), 0
        while some:
            spans = [self._span(index, at) for index in some]
            drawn = self._take(some, spans)
            sure = np.array(drawn.sure) if drawn.sure is not None else None
            outcome = Outcome(drawn, np.array(drawn.tokens), np.array(drawn.sound), sure)
            rows = []
            position = 0
            for index, span in zip(some, spans, strict=True):
                rows.append(self._row(index, span, outcome, position))
                position += len(span)
            yield rows
            left = zip(some, rows, strict=True)
            some, at = [index for index, row in left if not row.last and not row.request.finished], at + 1

    def _span(self, index: int, at: int) -> range:
        """Which of a request's rows are drawn now."""
        end = at + 1 if self._in_turn[index] else 1 + len(self._proposals[index])
        return range(at, end)

    def _take(self, some: list[int], spans: list[range]) -> Drawn:
        pairs = [(index, at) for index, span in zip(some, spans, strict=True) for at in span]
        logits = self._logits
        if len(pairs) < len(logits):
            logits = logits[mx.array([self._first[index] + at for index, at in pairs])]
        requests = [self._requests[index] for index, _ in pairs]
        drawn = self._draw(requests, logits, [self._before[index] + at for index, at in pairs], self._tolerance)
        settle(drawn.arrays())
        return drawn

    def _row(self, index: int, span: range, outcome: "Outcome", position: int) -> Row:
        request, proposal = self._requests[index], self._proposals[index]
        top = request.sampling.logprobs
        tokens: list[int] = []
        logprobs: list[Logprob] = []
        for at in span:
            row = position + at - span.start
            if not outcome.sound[row]:
                # A later one is not known to be wrong before it is computed alone, unless its request's rules failed.
                sound = at > 0 and request.error is None
                return Row(request, tokens, logprobs, sound, back=1 + len(proposal) - at, doubtful=True)
            # What was not guessed at was computed alone.
            if proposal and outcome.sure is not None and not outcome.sure[row]:
                return Row(request, tokens, logprobs, sound=True, back=1 + len(proposal) - at, doubtful=True)
            tokens.append(int(outcome.tokens[row]))
            if top is not None:
                logprobs.append(outcome.drawn.logprobs(row, top))
            if at == len(proposal) or tokens[-1] != proposal[at]:
                return Row(request, tokens, logprobs, sound=True, back=len(proposal) - at)
            self._right[index] += 1
        return Row(request, tokens, logprobs, sound=True, last=False)
