"""How many proposed tokens a step should verify: as many as maximize the tokens per second, according to measurements.

A step with more rows takes longer, and yields more tokens if the proposals are right. Both are measured: `Costs` has
the duration of steps by number of rows, `Rates` the probability that a token of a proposal is right if those before it
are, for one request and by the length of the match in front of that token, which grows with each that is right. Of all
tokens proposed to all requests, the likeliest are
taken, in the number that gives the most tokens per second; none, if that is best, so a request that cannot be guessed
costs nothing.

A request begins with the rates that others had with their first guess of each class, whatever came after it: one that
copies gets hundreds of tokens right, which says nothing of the next request's text. Its own guesses then decide.

Unused measurements decay towards optimistic values, so that speculation is retried from time to time: rates within an
answer, costs only in dozens, because text changes and the device does not.
"""

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

# Rows that steps with proposals have, besides those of steps that there were: few numbers, because a step is compiled
# for each, which takes as long as several steps.
WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Proposals must promise so much more tokens per second than none.
GAIN = 1.05
# What a row more costs at the least, as a share of the step, where it was not measured.
HOPED = 0.02
# Weight of the newest measurement, and of what fades in a step: of one request, of all of them, and of costs. Those
# that begin would try in vain what all before them did.
NEW, FADES, FADES_ALL, FADES_COSTS = 0.25, 0.004, 0.001, 0.0003
# Matches up to these lengths are of one class, and how likely a token is right at first.
CLASSES = (5, 11, 1 << 30)
FIRST = (0.3, 0.55, 0.85, 0.7)
# As likely as the guesses of others make those of a new request, at most: it must show by itself that it copies before
# many tokens are verified behind a short match.
MOST = (0.5, 1.0, 1.0, 1.0)
# The class of what a draft model guesses.
DRAFTED = len(CLASSES)
# Weight of one token that was right or wrong in a request, and of a request's first guess of a class in all of them.
OWN, ALL = 0.2, 0.1


class Costs:
    """Seconds of a decode step by its rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._seen: set[int] = set()

    def add(self, rows: int, seconds: float) -> None:
        """A step of `rows` took so long. The first one of its kind is not counted: it may have been compiled."""
        if rows not in self._seen:
            self._seen.add(rows)
            return
        known = self._seconds.get(rows)
        # One that took much longer was interrupted by something else.
        seconds = seconds if known is None else min(seconds, 4 * known)
        self._seconds[rows] = seconds if known is None else known + NEW * (seconds - known)

    def fade(self, rows: int) -> None:
        """A step of `rows` was made: what is known of larger ones gets older."""
        base = self._seconds.get(rows)
        for width, seconds in self._seconds.items():
            if base is not None and width > rows and seconds > base:
                self._seconds[width] = seconds - FADES_COSTS * (seconds - base)

    def made(self, rows: int) -> bool:
        """Whether there was a step of so many rows."""
        return rows in self._seen

    def of(self, rows: int) -> float:
        """Seconds of a step of so many rows; where none was measured, by those next to it."""
        known = self._seconds
        if rows in known:
            return max(known[rows], 1e-9)
        below = max((width for width in known if width < rows), default=None)
        above = min((width for width in known if width > rows), default=None)
        if below is None:
            return max(known[above], 1e-9) if above is not None else 1.0
        hoped = known[below] * (1 + HOPED * (rows - below))
        if above is not None:
            between = known[below] + (known[above] - known[below]) * (rows - below) / (above - below)
            hoped = min(hoped, between) if between > known[below] else between
        return max(hoped, 1e-9)


def class_of(length: int) -> int:
    return next(index for index, most in enumerate(CLASSES) if length <= most)


def classes_of(length: int, count: int) -> list[int]:
    """The classes of `count` tokens that followed a match: each that is right makes it longer for the next one."""
    return [class_of(length + place) for place in range(count)]


@dataclass
class Rates:
    """How likely a proposed token is right, by class of match."""

    rates: list[float] = field(default_factory=lambda: list(FIRST))
    # Tokens that were right or wrong.
    seen: list[int] = field(default_factory=lambda: [0] * len(FIRST))

    def chances(self, classes: Iterable[int]) -> list[float]:
        """How likely each token of a proposal is right with all before it, by the tokens' classes."""
        return list(itertools.accumulate((self.rates[index] for index in classes), operator.mul))

    def learn(self, index: int, right: int, wrong: int, weight: float) -> None:
        """So many tokens were right, then so many wrong. The first count more: a third, a fourth, and so on."""
        for hit, times in ((1.0, right), (0.0, wrong)):
            for _ in range(times):
                self.seen[index] += 1
                self.rates[index] += max(weight, 1 / (2 + self.seen[index])) * (hit - self.rates[index])

    def began(self, index: int, share: float) -> None:
        """Such a share of another request's first guess was right."""
        self.rates[index] = min(MOST[index], self.rates[index] + ALL * (share - self.rates[index]))

    def fade(self, to: "Rates", weight: float = FADES) -> None:
        for index, rate in enumerate(self.rates):
            if rate < to.rates[index]:
                self.rates[index] += weight * (to.rates[index] - rate)


def allot(likely: Iterable[Sequence[float]], rows: int, costs: Costs) -> list[int]:
    """How many tokens of each proposal to verify, by how likely each of its tokens is right with all before it.

    `rows` are those of a step without proposals.
    """
    likely = list(likely)
    chances = [(chance, index) for index, some in enumerate(likely) for chance in some]
    chances.sort(key=lambda chance: -chance[0])
    best, best_rate, expected = 0, GAIN * rows / costs.of(rows), float(rows)
    for count, (chance, _) in enumerate(chances, 1):
        expected += chance
        width = rows + count
        if (width in WIDTHS or costs.made(width)) and expected / costs.of(width) > best_rate:
            best, best_rate = count, expected / costs.of(width)
    found = [0] * len(likely)
    for _, index in chances[:best]:
        found[index] += 1
    return found
