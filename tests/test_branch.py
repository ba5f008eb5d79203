"""Where a prompt leaves what is cached, in the tree of its salt alone, and how much is the same again after it."""

import random

import pytest

from onekv.prefix.branch import RUN, SHOWN, WINDOW, Branch, branch_of
from onekv.prefix.index import TOKEN_BYTES, Index, as_bytes, as_tokens

BLOCK = 8


def tokens_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=count)


def cache(index: Index, tokens: list[int], salt: str = "") -> None:
    """Keep `tokens` as the prefix cache does: whole blocks, and an end."""
    data, size = as_bytes(tokens), BLOCK * TOKEN_BYTES
    node = index.root(salt)
    for start in range(0, len(data), size):
        block = data[start : start + size]
        node = index.nodes.get(index.child_key(node, block)) or index.add(node, block, [])


def leave(index: Index, tokens: list[int], salt: str = "") -> Branch | None:
    return branch_of(index.match(as_bytes(tokens), salt, len(tokens) - 1), tokens)


@pytest.fixture
def index() -> Index:
    return Index("tests", BLOCK)


def test_tokens_and_bytes() -> None:
    assert as_tokens(as_bytes([5, 0, 49_999])) == [5, 0, 49_999]


def test_a_conversation_that_goes_on_leaves_nothing(index: Index) -> None:
    said = tokens_of(1, 45)
    cache(index, said)
    assert leave(index, [*said, *tokens_of(2, 30)]) is None
    assert leave(index, said) is None
    assert leave(index, said[:20]) is None
    assert leave(Index("tests", BLOCK), said) is None


@pytest.mark.parametrize("at", [0, 3, 8, 21, 24])
@pytest.mark.parametrize("instead", [1, 3, 9])
def test_other_words_and_then_the_same_again(index: Index, at: int, instead: int) -> None:
    """However many words came instead: what follows is found at its new place, and counted to its end."""
    said = tokens_of(1, 300)
    cache(index, said)
    prompt = [*said[:at], *[60_000] * instead, *said[at + 3 :], *tokens_of(3, 40)]
    assert leave(index, prompt) == Branch(at, said[at : at + SHOWN], prompt[at : at + SHOWN], 300 - at - 3)


def test_another_conversation_has_nothing_again(index: Index) -> None:
    shared = tokens_of(1, 100)
    cache(index, [*shared, *tokens_of(2, 200)])
    found = leave(index, [*shared, *tokens_of(3, 200)])
    assert found is not None
    assert (found.position, found.again) == (100, 0)


def test_what_goes_on_is_shown_and_not_an_end_with_the_same_tokens(index: Index) -> None:
    """Whichever of the two sorts first."""
    said = tokens_of(1, 20)
    cache(index, said)
    for seed in range(2, 8):
        cache(index, [*said, *tokens_of(seed, 40)])
    assert leave(index, [*said, 0, 0, 0]) is not None
    assert leave(index, [*said, 49_999, 0, 0]) is not None


def test_among_several_the_one_used_last_is_shown(index: Index) -> None:
    said = tokens_of(1, 16)
    for seed in (2, 3, 4):
        cache(index, [*said, *tokens_of(seed, 40)])
    index.match(as_bytes([*said, *tokens_of(3, 40)]), "", 56)
    found = leave(index, [*said, 60_000, 60_000])
    assert found is not None
    assert found.cached == tokens_of(3, 40)[:SHOWN]


def test_other_salts_are_not_looked_at(index: Index) -> None:
    said = tokens_of(1, 200)
    cache(index, said, "theirs")
    assert leave(index, [60_000, *said[1:]], "mine") is None
    cache(index, tokens_of(2, 200), "mine")
    found = leave(index, [60_000, *said[1:]], "mine")
    assert found is not None
    assert (found.cached, found.again) == (tokens_of(2, 200)[:SHOWN], 0)


def test_it_looks_no_further_than_a_window(index: Index) -> None:
    said = tokens_of(1, WINDOW + 200)
    cache(index, said)
    near = [60_000] * (WINDOW - RUN)
    assert (found := leave(index, [*near, *said])) is not None and found.again == len(said)
    assert (found := leave(index, [60_000, *near, *said])) is not None and found.again == 0
