"""A log of tokens finds what a search of all of it finds, within the bounds that it states."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onekv.engine.speculation.log import BREAK, CANDIDATES, GRAM, WINDOW, Match, TokenLog

ALPHABET = 3


def as_bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()


def log_of(tokens: Sequence[int], capacity: int = 1 << 14) -> TokenLog:
    log = TokenLog(capacity)
    log.extend(tokens)
    return log


def held(log: TokenLog) -> list[int]:
    return np.frombuffer(log.tail(len(log)), np.int32).tolist()


def common_end(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(reversed(first), reversed(second), strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def reference(tokens: list[int], suffix: list[int], limit: int) -> Match | None:
    """The same by comparing everywhere."""
    suffix = suffix[len(suffix) - suffix[::-1].index(BREAK) :] if BREAK in suffix else suffix
    suffix = suffix[-WINDOW:]
    if len(suffix) < GRAM:
        return None
    ends = [end for end in range(len(tokens), GRAM - 1, -1) if tokens[end - GRAM : end] == suffix[-GRAM:]]
    followed = [end for end in ends[:CANDIDATES] if end < len(tokens) and tokens[end] != BREAK]
    if not followed:
        return None
    best = max(followed, key=lambda end: (common_end(tokens[:end], suffix), end))
    after = tokens[best : best + limit]
    if BREAK in after:
        after = after[: after.index(BREAK)]
    elif tokens[-len(suffix) :] == suffix:
        after = (after * limit)[:limit]
    return Match(common_end(tokens[:best], suffix), after)


some = st.lists(st.integers(BREAK, ALPHABET - 1), max_size=40)
# Much of it repeated, and far more occurrences than are looked at.
texts = st.lists(st.tuples(some, st.integers(1, 30)), max_size=8).map(
    lambda pieces: [token for piece, times in pieces for token in piece * times]
)


def test_grams_of_the_alphabet_have_a_bucket_each():
    """So that positions of a bucket are occurrences in the tests that compare with the reference."""
    log = TokenLog(1)
    letters = range(ALPHABET)
    assert len({log._bucket(a, b, c) for a in letters for b in letters for c in letters}) == ALPHABET**3


@given(texts, st.integers(1, 20))
def test_the_logs_own_end_is_found_as_by_comparing_everywhere(tokens, limit):
    assert log_of(tokens).find(as_bytes(tokens[-WINDOW:]), limit) == reference(tokens, tokens[-WINDOW:], limit)


@given(texts, some, st.integers(1, 20))
def test_any_suffix_is_found_as_by_comparing_everywhere(tokens, suffix, limit):
    assert log_of(tokens).find(as_bytes(suffix), limit) == reference(tokens, suffix, limit)


@given(st.integers(0, 2**32), st.integers(1, 4000), st.sampled_from([ALPHABET, 50, 50_000]))
def test_what_is_found_occurred(seed, count, alphabet):
    """Whatever shares a bucket."""
    tokens = np.random.default_rng(seed).integers(0, alphabet, count).tolist()
    found = log_of(tokens).find(as_bytes(tokens[-WINDOW:]), 4)
    if found is not None:
        occurrences = [
            end
            for end in range(found.length, count)
            if tokens[end - found.length : end] == tokens[-found.length :]
            and (tokens[end : end + 4] * 4)[:4] == found.tokens
        ]
        assert found.length >= GRAM and occurrences


@given(texts, st.integers(1, 50), st.integers(6, 400))
def test_how_many_tokens_are_added_at_a_time_makes_no_difference(tokens, step, capacity):
    one_by_one, in_steps = TokenLog(capacity), TokenLog(capacity)
    for token in tokens:
        one_by_one.append(token)
    for start in range(0, len(tokens), step):
        in_steps.extend(tokens[start : start + step])
    at_once = log_of(tokens, capacity)
    assert held(one_by_one) == held(in_steps) == held(at_once)
    assert one_by_one.total == in_steps.total == at_once.total == len(tokens)
    suffix = as_bytes(tokens[-WINDOW:])
    found = [log.find(suffix, 8) for log in (one_by_one, in_steps, at_once)]
    assert found == [reference(held(at_once), tokens[-WINDOW:], 8)] * 3


def check_links(log: TokenLog) -> None:
    """Every gram without a border is in its bucket once, the latest first, and nothing else is in any bucket."""
    tokens, linked = held(log), []
    for bucket, position in enumerate(log._heads.tolist()):
        latest = len(tokens)
        while position >= 0:
            assert position < latest and log._bucket(*tokens[position - GRAM + 1 : position + 1]) == bucket
            linked.append(position)
            latest, position = position, int(log._previous[position])
    grams = [tokens[end - GRAM + 1 : end + 1] for end in range(GRAM - 1, len(tokens))]
    assert sorted(linked) == [end for end, gram in enumerate(grams, GRAM - 1) if BREAK not in gram]


@pytest.mark.parametrize("capacity", [6, 500, 3000, 1 << 14])
@pytest.mark.parametrize("step", [1, 9, 40, 1500])
def test_all_that_is_held_is_linked_while_a_log_grows_and_forgets(capacity, step):
    generator = np.random.default_rng(1)
    log = TokenLog(capacity)
    for number in range(4):
        for tokens in generator.integers(BREAK, 12, 1800)[: 1800 // step * step].reshape(-1, step):
            log.extend(tokens.astype(np.int32))
        check_links(log)
        assert log.total == (number + 1) * (1800 // step * step)


@given(texts, st.integers(6, 400))
def test_a_full_log_knows_the_last_half_of_its_capacity_at_least(tokens, capacity):
    log = log_of(tokens, capacity)
    assert min(len(tokens), capacity // 2) <= len(log) <= capacity
    assert held(log) == tokens[len(tokens) - len(log) :]


def test_what_was_forgotten_is_not_found():
    log = log_of([1, 2, 3, 4, 5], 100)
    assert log.find(as_bytes([1, 2, 3]), 2) == Match(3, [4, 5])
    log.extend(range(1000, 1099))
    assert log.find(as_bytes([1, 2, 3]), 2) is None
    assert log.find(as_bytes([1090, 1091, 1092]), 2) == Match(3, [1093, 1094])


@pytest.mark.parametrize("period", [1, 2, 3, 5, 11])
def test_text_with_a_period_goes_on(period):
    tokens = (list(range(period)) * 100)[:100]
    expected = (list(range(period)) * 130)[100:130]
    assert log_of(tokens).find(as_bytes(tokens[-WINDOW:]), 30) == Match(WINDOW, expected)


def test_what_follows_another_suffix_ends_with_the_log():
    assert log_of([1, 2, 3, 4, 5]).find(as_bytes([9, 1, 2, 3]), 10) == Match(3, [4, 5])


def test_a_border_is_neither_matched_nor_proposed():
    log = log_of([7, 8, BREAK, 1, 2, 3, 4, BREAK, 5, 6])
    assert log.find(as_bytes([7, 8, BREAK, 1, 2, 3]), 10) == Match(3, [4])
    assert log.find(as_bytes([8, BREAK, 1, 2]), 10) is None
    assert log.find(as_bytes([8, BREAK, 1]), 10) is None
    # Nothing follows it but a border.
    assert log.find(as_bytes([2, 3, 4]), 10) is None


def test_the_longest_wins_and_of_equals_the_latest():
    log = log_of([9, 1, 2, 3, 10, 8, 1, 2, 3, 11, 7, 1, 2, 3, 12])
    assert log.find(as_bytes([9, 1, 2, 3]), 1) == Match(4, [10])
    assert log.find(as_bytes([6, 1, 2, 3]), 1) == Match(3, [12])


def test_of_many_occurrences_only_the_latest_are_looked_at():
    log = log_of([9, 1, 2, 3, 10] + [8, 1, 2, 3, 11] * (CANDIDATES - 1))
    assert log.find(as_bytes([9, 1, 2, 3]), 1) == Match(4, [10])
    log.extend([8, 1, 2, 3, 11])
    assert log.find(as_bytes([9, 1, 2, 3]), 1) == Match(3, [11])


def test_tokens_that_share_a_bucket_are_not_taken_for_each_other():
    log = TokenLog(1024)
    bucket = log._bucket(1, 2, 3)
    other = next(token for token in range(4, 100_000) if log._bucket(1, 2, token) == bucket)
    log.extend([1, 2, 3, 7, *[1, 2, other, 9] * 5])
    assert log.find(as_bytes([1, 2, 3]), 1) == Match(3, [7])
    assert log.find(as_bytes([5, 1, 2, other]), 1) == Match(3, [9])


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4]])
def test_short_logs_and_suffixes_find_nothing(tokens):
    log = log_of(tokens)
    for count in range(len(tokens) + 1):
        assert log.find(as_bytes(tokens[len(tokens) - count :]), 4) is None
    assert log.find(as_bytes([5, 6, 7, 8]), 4) is None


def test_nothing_is_proposed_where_nothing_may_be():
    assert log_of([1, 2, 3, 4, 1, 2, 3]).find(as_bytes([1, 2, 3]), 0) is None


@pytest.mark.parametrize("capacity", [6, 1000, 1024, 5000, 1 << 14])
def test_memory_is_bounded_by_the_capacity(capacity):
    log, sizes = TokenLog(capacity), set()
    for start in range(0, 5 * capacity, 777):
        log.extend(range(start, start + 777))
        sizes.add(log.nbytes)
    assert max(sizes) <= TokenLog.most_bytes(capacity) <= 16 * max(capacity, 1024)
    # It grows with what it holds.
    assert TokenLog(capacity).nbytes <= min(TokenLog.most_bytes(1024), TokenLog.most_bytes(capacity))
