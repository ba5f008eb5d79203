"""When it pays to verify, and when a token that was drawn is sure: by numbers alone."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from onekv.engine import Request, Sampling
from onekv.engine.sampling import sample
from onekv.engine.speculation.pace import (
    CLASSES,
    DRAFTED,
    FIRST,
    GAIN,
    WIDTHS,
    Costs,
    Rates,
    allot,
    class_of,
    classes_of,
)


def costs(**seconds: float) -> Costs:
    """By rows: r1=1.0 is a step of one row."""
    known = Costs()
    for rows, each in seconds.items():
        for _ in range(2):
            known.add(int(rows[1:]), each)
    return known


def run(rate: float, length: int) -> list[float]:
    """A proposal each of whose tokens is right with the same probability, if those before it are."""
    return [rate**place for place in range(1, length + 1)]


def test_the_first_step_of_a_width_is_not_counted():
    known = Costs()
    known.add(1, 50.0)
    assert known.of(1) == 1.0
    known.add(1, 2.0)
    assert known.of(1) == 2.0


def test_a_step_that_was_interrupted_counts_little():
    known = costs(r1=1.0)
    known.add(1, 100.0)
    assert 1.0 < known.of(1) < 2.0
    for _ in range(40):
        known.add(1, 3.0)
    assert known.of(1) == pytest.approx(3.0, rel=0.01)


def test_what_was_not_measured_is_between_its_neighbours():
    known = costs(r1=1.0, r8=8.0)
    assert known.of(1) <= known.of(4) <= 8.0
    # Beyond all that was measured there is hope.
    assert 8.0 < known.of(16) < 16.0
    # Nothing is cheaper than nothing.
    assert all(Costs().of(rows) > 0 for rows in (1, 7))


def test_costs_of_larger_steps_fade_towards_those_without_proposals():
    known = costs(r1=1.0, r4=9.0)
    known.fade(1)
    assert 8.9 < known.of(4) < 9.0
    for _ in range(25_000):
        known.fade(1)
    assert known.of(4) == pytest.approx(1.0, abs=0.01)


def test_classes_of_matches():
    assert [class_of(length) for length in (3, 5, 6, 11, 12, 64)] == [0, 0, 1, 1, 2, 2]
    # And one for what a draft model guesses.
    assert len(FIRST) == len(CLASSES) + 1 == DRAFTED + 1


def test_a_match_gets_longer_with_every_token_that_is_right():
    assert classes_of(3, 10) == [0, 0, 0, 1, 1, 1, 1, 1, 1, 2]
    assert Rates([0.5, 0.8, 0.9, 0.7]).chances([0, 0, 1, 2]) == pytest.approx([0.5, 0.25, 0.2, 0.18])
    assert Rates().chances([]) == []


def test_the_first_tokens_of_a_request_count_more():
    rates = Rates([0.5] * 4)
    rates.learn(0, 1, 0, 0.2)
    assert rates.rates[0] == pytest.approx(0.5 + 0.5 / 3)
    rates.learn(0, 0, 1, 0.2)
    assert rates.rates[0] == pytest.approx((0.5 + 0.5 / 3) * 3 / 4)


def test_what_wide_steps_cost_is_known_for_many_answers():
    known = costs(r1=1.0, r8=2.1)
    for _ in range(1000):
        known.fade(1)
    assert known.of(8) > 1.8


def test_rates_follow_what_was_right_and_come_back():
    rates = Rates()
    for _ in range(30):
        rates.learn(1, 0, 1, 0.2)
    assert rates.rates[1] < 0.01 and rates.rates[0] == FIRST[0]
    rates.learn(1, 3, 0, 0.2)
    assert rates.rates[1] > 0.4
    low = Rates([0.0, 1.0, 0.0])
    for _ in range(2000):
        low.fade(Rates())
    # What is better than hoped for stays.
    assert low.rates == pytest.approx([FIRST[0], 1.0, FIRST[2]], abs=0.01)


def test_what_cannot_pay_is_not_proposed():
    assert allot([run(0.9, 8)], 1, costs(r1=1.0, r2=2.0, r3=3.0, r4=4.0, r6=6.0, r8=8.0, r9=9.0)) == [0]
    assert allot([run(0.0, 8)], 1, costs(r1=1.0)) == [0]
    assert allot([], 3, Costs()) == []


def test_what_costs_nothing_is_proposed_whole():
    free = costs(r1=1.0, r16=1.0)
    assert allot([run(0.9, 15)], 1, free) == [15]
    # A token that is right once in a hundred times is not worth a row.
    assert allot([run(0.01, 15)], 1, costs(r1=1.0, r2=1.02, r16=1.2)) == [0]


def test_no_step_is_compiled_for_a_number_of_rows_that_is_rare():
    free = costs(r1=1.0, r2=1.0)
    assert allot([run(0.9, 4)], 1, free) == [3]
    free.add(5, 1.0)
    assert allot([run(0.9, 4)], 1, free) == [4]


def test_the_likeliest_tokens_of_all_requests_are_taken():
    counts = allot([run(0.9, 6), run(0.2, 6), []], 3, costs(r3=1.0, r6=1.2, r8=2.5, r12=4.0, r16=6.0))
    assert counts[0] > counts[1]


def test_no_other_number_of_rows_gives_more():
    """Against every choice of how many tokens of each proposal that gives a step of one of the widths."""
    random = np.random.default_rng(1)
    for _ in range(200):
        rows = int(random.integers(1, 4))
        likely = [(float(random.random()), int(random.integers(0, 5))) for _ in range(rows)]
        known = Costs()
        seconds = float(random.random())
        # Steps of widths between were not made, but for some.
        for width in sorted({rows, *WIDTHS[:8], *random.integers(1, 20, 2).tolist()}):
            seconds += float(random.random()) * 0.4
            known.add(width, seconds)
            known.add(width, seconds)
        counts = allot([run(*each) for each in likely], rows, known)

        def speed(taken: tuple[int, ...] | list[int], likely=likely, rows=rows, known=known) -> float:
            gained = sum(rate**place for (rate, _), n in zip(likely, taken, strict=False) for place in range(1, n + 1))
            return (rows + gained) / known.of(rows + sum(taken))

        choices = itertools.product(*(range(length + 1) for _, length in likely))
        allowed = [some for some in choices if rows + sum(some) in WIDTHS or known.made(rows + sum(some))]
        best = max(map(speed, allowed), default=0.0)
        if any(counts):
            assert speed(counts) == pytest.approx(best) and best > GAIN * rows / known.of(rows)
        else:
            assert best <= GAIN * rows / known.of(rows) + 1e-9


# Which tokens are sure

RULES = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.5, top_k=4),
    Sampling(temperature=1.0, top_p=0.6),
    Sampling(temperature=2.0, min_p=0.3),
    Sampling(temperature=1.3, top_p=0.8, top_k=6, min_p=0.05),
    Sampling(repetition_penalty=0.2),
    Sampling(repetition_penalty=3.0),
    Sampling(logit_bias={1: 2.0, 2: -3.0}),
]


def drawn(logits: np.ndarray, rule: Sampling, tolerance: float | None) -> tuple[list[int], list[bool]]:
    """Each row is a request with a seed of its own."""
    requests = [
        Request([1, 2], 4, Sampling(**{**rule.__dict__, "seed": row}), tokens=[3, 5]) for row in range(len(logits))
    ]
    found = sample(mx.array(logits), requests, [2] * len(requests), tolerance)
    sure = found.sure.tolist() if found.sure is not None else []
    return found.tokens.tolist(), sure


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.rule} {rule.repetition_penalty} {rule.logit_bias}")
def test_what_is_sure_is_the_same_within_the_tolerance(rule):
    """Logits that are close to each other, moved by as much as is tolerated: one way at random, and the worst way."""
    random = np.random.default_rng(3)
    tolerance = 0.02
    for spread in (0.1, 0.5, 3.0):
        logits = (spread * random.standard_normal((400, 12))).astype(np.float32)
        tokens, sure = drawn(logits, rule, tolerance)
        assert spread < 3 or sum(sure) > 150
        for number in range(20):
            moved = random.uniform(-tolerance, tolerance, logits.shape)
            if number % 2:
                moved = tolerance * np.sign(moved)
            others, _ = drawn((logits + 0.99 * moved).astype(np.float32), rule, None)
            assert [own for own, is_sure in zip(tokens, sure, strict=True) if is_sure] == [
                other for other, is_sure in zip(others, sure, strict=True) if is_sure
            ]


def test_two_that_are_closer_than_the_tolerance_are_not_sure():
    logits = np.zeros((3, 8), np.float32)
    logits[:, 2] = 1.0
    logits[0, 5], logits[1, 5], logits[2, 5] = 1.0, 0.985, 0.9
    tokens, sure = drawn(logits, Sampling(), 0.01)
    assert tokens == [2, 2, 2] and sure == [False, False, True]
