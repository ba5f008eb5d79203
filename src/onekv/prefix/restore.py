"""How much of a match a sequence can continue from."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..memory.layout import Rule


@dataclass(frozen=True)
class Piece:
    """The matched part [start, end) of one node: which groups still have it, and whether a snapshot is tagged `end`."""

    start: int
    end: int
    held: tuple[bool, ...]
    snapshot: bool = False


def restore_point(pieces: Sequence[Piece], rules: Sequence[Rule], recurrent: bool) -> int:
    """The largest length n <= the match at which every group has what a query at n reads, and the states of n exist.

    A smaller n inside a piece never helps where its end does not: it reads the same piece and older ones. So only the
    ends of pieces are tried, the last first.
    """
    for index in range(len(pieces) - 1, -1, -1):
        n = pieces[index].end
        if recurrent and not pieces[index].snapshot:
            continue
        if all(_readable(pieces[: index + 1], group, rule, n) for group, rule in enumerate(rules)):
            return n
    return 0


def _readable(pieces: Sequence[Piece], group: int, rule: Rule, n: int) -> bool:
    """Whether `group` has positions [first, n) and the kept ones, as a query at n reads them."""
    if rule.span is None:
        # Full attention keeps a block as long as the index knows it.
        return True
    first = rule.first(n)
    return all(
        piece.held[group] for piece in reversed(pieces) if piece.end > first or piece.start < min(rule.keep, first)
    )


def blocks_read(rule: Rule, length: int, size: int) -> list[int]:
    """Which blocks of `size` tokens a sequence that continues at `length` refers to, the last perhaps in part."""
    end = -(-length // size)
    first = min(rule.first(length) // size, end)
    kept = min(-(-min(rule.keep, length) // size), first)
    return [*range(kept), *range(first, end)]
