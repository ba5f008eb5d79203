"""Proposals by lookup: from the request's own tokens and from others of its salt, and from nobody else's."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onekv.engine.request import Request
from onekv.engine.speculation.log import WINDOW, Match, TokenLog
from onekv.engine.speculation.lookup import CONTEXT, SHARED_BYTES, SHARED_TOKENS, Lookup


def ended(prompt: list[int], tokens: list[int], salt: str = "", cached: int = 0) -> Request:
    request = Request(prompt, 100, salt=salt, tokens=tokens)
    request.cached_tokens = cached
    return request


def asked(prompt: list[int], salt: str = "") -> Request:
    return Request(prompt, 100, salt=salt)


def test_a_request_is_proposed_what_its_prompt_says():
    assert Lookup().propose(asked([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]), 2) == Match(3, [4, 5])


def test_nothing_is_proposed_for_what_never_occurred():
    assert Lookup().propose(asked([1]), 4) is None
    assert Lookup().propose(asked([1, 2, 3, 4]), 4) is None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(1, 9), max_size=12), st.randoms())
def test_following_a_request_equals_looking_at_it_anew(prompt, steps, random):
    lookup, request = Lookup(own_tokens=64), asked(prompt)
    for count in steps:
        request.tokens += [random.randrange(4) for _ in range(count)]
        assert lookup.propose(request, 5) == Lookup(own_tokens=64).propose(request, 5)


def test_what_another_request_held_is_proposed_once_it_is_learned():
    lookup, request = Lookup(), asked([9, 2, 3, 4])
    other = ended([1, 2, 3, 4], [5, 6])
    assert lookup.propose(request, 4) is None
    lookup.learn(other)
    assert lookup.propose(request, 4) == Match(3, [5, 6])


def test_the_longer_match_wins_and_its_own_where_they_are_equal():
    lookup = Lookup()
    lookup.learn(ended([7, 1, 2, 3], [20]))
    assert lookup.propose(asked([1, 2, 3, 10, 7, 1, 2, 3]), 1) == Match(4, [20])
    assert lookup.propose(asked([1, 2, 3, 10, 8, 1, 2, 3]), 1) == Match(3, [10])


def test_two_conversations_are_not_read_as_one():
    lookup = Lookup()
    lookup.learn(ended([1, 2, 3], [4]))
    lookup.learn(ended([5, 6, 7], [8]))
    assert lookup.propose(asked([9, 2, 3, 4]), 4) is None
    assert lookup.propose(asked([9, 1, 2, 3]), 4) == Match(3, [4])
    assert lookup.propose(asked([3, 4, 5, 6]), 4) is None


def test_nothing_is_learned_twice():
    lookup = Lookup()
    first = ended(list(range(100)), [100, 101])
    lookup.learn(first)
    known = len(lookup._shared._logs[""])
    lookup.learn(first)
    assert len(lookup._shared._logs[""]) == known
    # The next turn adds what was not cached, a little before it, and a border.
    lookup.learn(ended([*first.all_tokens, 200, 201], [202], cached=102))
    assert len(lookup._shared._logs[""]) == known + CONTEXT + 3 + 1
    assert lookup.propose(asked([99, 100, 101]), 4) == Match(3, [200, 201, 202])
    # All of it was cached.
    lookup.learn(ended([1, 2, 3], [], cached=3))
    assert len(lookup._shared._logs[""]) == known + CONTEXT + 3 + 1


@given(st.data())
def test_a_token_of_another_salt_is_never_proposed(data):
    """Tokens of each salt continue the same beginnings, with numbers of their own."""
    lookup, beginnings = Lookup(shared_tokens=100, salts=3), [1, 2, 3]
    salts = st.integers(1, 4)
    for _ in range(data.draw(st.integers(1, 12))):
        salt = data.draw(salts)
        own = [1000 * salt + data.draw(st.integers(0, 5)) for _ in range(4)]
        if data.draw(st.booleans()):
            lookup.learn(ended(beginnings, own, str(salt)))
        else:
            lookup.learn_tokens(str(salt), beginnings + own)
        request = asked(beginnings, str(data.draw(salts)))
        found = lookup.propose(request, 4)
        assert found is None or {token // 1000 for token in found.tokens} == {int(request.salt)}


def test_the_salts_that_were_not_used_for_longest_are_forgotten():
    lookup = Lookup(salts=2)
    lookup.learn_tokens("a", [1, 2, 3, 4])
    lookup.learn_tokens("b", [1, 2, 3, 5])
    assert lookup.propose(asked([1, 2, 3], "a"), 1) == Match(3, [4])
    lookup.learn_tokens("c", [1, 2, 3, 6])
    found = {salt: lookup.propose(asked([1, 2, 3], salt), 1) for salt in "abc"}
    assert found == {"a": Match(3, [4]), "b": None, "c": Match(3, [6])}


@pytest.mark.parametrize("budget", [TokenLog.most_bytes(1024), 50_000, 200_000])
def test_all_salts_together_stay_within_the_bytes(budget):
    lookup = Lookup(shared_bytes=budget)
    generator = np.random.default_rng(1)
    for number in range(60):
        lookup.learn_tokens(str(number % 7), generator.integers(0, 1000, 3000).astype(np.int32))
        assert lookup.nbytes <= budget
    # The last one is there.
    assert lookup.nbytes > 0


def test_one_salt_may_hold_all_that_it_is_meant_to():
    assert TokenLog.most_bytes(SHARED_TOKENS) <= SHARED_BYTES


def test_a_request_that_is_forgotten_or_gone_leaves_nothing():
    lookup = Lookup()
    requests = [asked([number, 2, 3, 4, number, 2, 3]) for number in range(3)]
    for request in requests:
        assert lookup.propose(request, 2) == Match(3, [4, request.prompt[0]])
    one = lookup.nbytes // 3
    lookup.forget(requests[0])
    lookup.forget(requests[0])
    assert lookup.nbytes == 2 * one
    # Nobody said that these have ended.
    lookup.learn(requests[1])
    learned = lookup.nbytes - 2 * one
    gone = [weakref.ref(request) for request in requests]
    del request, requests
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
    assert lookup.nbytes == learned


def test_clear_forgets_everything_but_what_a_request_itself_says():
    lookup, request = Lookup(), asked([1, 2, 3, 4, 1, 2, 3])
    lookup.learn_tokens("", [1, 2, 3, 9, 8, 7])
    assert lookup.propose(request, 1) == Match(3, [4])
    lookup.clear()
    assert lookup.nbytes == 0
    assert lookup.propose(asked([3, 9, 8]), 1) is None
    assert lookup.propose(request, 1) == Match(3, [4])


def test_a_long_match_of_its_own_is_as_good_as_any():
    lookup = Lookup()
    text = list(range(200))
    lookup.learn_tokens("", [*text, 777])
    assert lookup.propose(asked([*text, 5, *text]), 1) == Match(WINDOW, [5])
