"""Where a prompt diverges from the cached conversation that it has most in common with.

    cached:   [ same .................. ][ other words ][ the same again ......... ]
    prompt:   [ same .................. ][ its words ][ the same again .............. ]
                                         ^ position

A conversation that simply continues does not diverge: what is cached ends there. If a branch matches the prompt again
further on, a client's clock or header has changed in between: all that follows it is recomputed.

This is searched once, when a sequence starts, in the tree of its own salt in RAM, in a single walk: it follows the most
recently used continuations, and both must match again within `WINDOW` tokens. Nothing of the tree is kept but the few
tokens that are shown.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from .index import TOKEN_BYTES, Match, Node, as_bytes, as_tokens, common

# Tokens of each side that are shown.
SHOWN = 12
# Tokens after the position in which both must meet again, and how many have to agree there.
WINDOW, RUN = 1024, 16
# Continuations of a block among which the most recently used one is searched.
BRANCHES = 64


@dataclass(frozen=True)
class Branch:
    """What follows after `position` tokens: `cached` in the conversation, `came` in the prompt; the first few tokens.

    `again`: how many later tokens of the prompt match the conversation again, contiguously.
    """

    position: int
    cached: list[int]
    came: list[int]
    again: int


def branch_of(match: Match, tokens: list[int]) -> Branch | None:
    """Where `tokens` diverge from the tree; None if nothing continues there."""
    # The last token of a prompt is never looked up.
    if match.length + 1 >= len(tokens):
        return None
    rest = as_bytes(tokens[match.length :])
    after = _after(match, rest)
    cached = b""
    while len(cached) < WINDOW * TOKEN_BYTES and (piece := next(after, b"")):
        cached += piece
    if not cached:
        return None
    shown = SHOWN * TOKEN_BYTES
    return Branch(match.length, as_tokens(cached[:shown]), as_tokens(rest[:shown]), _again(cached, after, rest))


def _after(match: Match, rest: bytes) -> Iterator[bytes]:
    """The tokens that follow the end of `match` in the tree, block by block."""
    node = _going_on(match, rest)
    if node is not None:
        yield node.tokens[match.common * TOKEN_BYTES :]
    while node is not None and node.children:
        node = _used_last(node)
        yield node.tokens


def _going_on(match: Match, rest: bytes) -> Node | None:
    """The block in which `match` ends; if it ends on a block boundary, one that follows."""
    parent = match.nodes[-1] if match.nodes else match.root
    if match.tail is None:
        return _used_last(parent) if parent.children else None
    begun = match.tail.tokens[: match.common * TOKEN_BYTES]
    # `match.tail` may end here while another with the same tokens continues. These are neighbours in order.
    at = bisect_left(parent.ordered, begun + rest)
    near = (each for each in parent.ordered[max(0, at - 1) : at + 1] if each.startswith(begun) and each != begun)
    return next((parent.children[each] for each in near), None)


def _used_last(parent: Node) -> Node:
    return max(islice(parent.children.values(), BRANCHES), key=lambda child: child.last_used)


def _again(cached: bytes, after: Iterator[bytes], rest: bytes) -> int:
    """How many tokens of `rest` are in `cached`, and in what follows `after` it, from where both match again."""
    size, run = TOKEN_BYTES, RUN * TOKEN_BYTES
    window = rest[: WINDOW * size]
    places: dict[bytes, int] = {}
    for at in range(0, len(window) - run + 1, size):
        places.setdefault(window[at : at + run], at)
    for at in range(0, min(len(cached), WINDOW * size) - run + 1, size):
        met = places.get(cached[at : at + run])
        if met is not None:
            break
    else:
        return 0
    total, piece = 0, cached[at:]
    while piece:
        same = common(piece, rest[met + total * size : met + total * size + len(piece)])
        total += same
        if same * size < len(piece):
            break
        piece = next(after, b"")
    return total
