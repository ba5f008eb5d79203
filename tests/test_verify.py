"""How many rows are drawn from to verify a proposal."""

import mlx.core as mx
import numpy as np
import pytest

from onekv.engine import Request, Sampling
from onekv.engine.sampling import Drawn, sample
from onekv.engine.speculation.verify import Verification

RIGHT, PROPOSED = 2, 5


def verified(rule: Sampling, costly: bool) -> tuple[list[int], list[int]]:
    """The tokens of a request of whose proposal the first ones are right, and the rows of each draw."""
    request, drawn = Request([1], 20, rule, tokens=[7]), []
    logits = mx.array((3 * np.random.default_rng(4).standard_normal((1 + PROPOSED, 64))).astype(np.float32))
    truth = [int(token) for token in sample(logits, [request] * 6, list(range(1, 7))).tokens.tolist()]
    proposal = [*truth[:RIGHT], *((token + 1) % 64 for token in truth[RIGHT:PROPOSED])]

    def draw(requests: list[Request], rows: mx.array, before: list[int], tolerance: float | None) -> Drawn:
        drawn.append(len(rows))
        return sample(rows, requests, before, tolerance)

    verification = Verification(draw, 1e-6, [request], [proposal], logits, costly)
    for (row,) in verification.waves():
        request.tokens += row.tokens
        assert row.sound and not row.doubtful
    assert row.last and row.back == PROPOSED - RIGHT and verification.accepted == [RIGHT]
    assert request.tokens == [7, *truth[: RIGHT + 1]]
    return request.tokens, drawn


@pytest.mark.parametrize("rule", [{}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.01}])
def test_behind_a_wrong_guess_nothing_is_drawn_where_that_is_costly(rule):
    sampling = Sampling(temperature=1.0, seed=3, **rule)
    at_once, in_turn = verified(sampling, False), verified(sampling, True)
    assert at_once[1] == [1 + PROPOSED] and in_turn[1] == [1] * (RIGHT + 1)
    assert at_once[0] == in_turn[0]


def test_what_is_not_drawn_at_random_is_taken_at_once():
    assert verified(Sampling(), True)[1] == [1 + PROPOSED]
