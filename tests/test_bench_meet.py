"""`onekv bench meet`: how it knows what was under way when the short request came, from what /health tells."""

import pytest

from onekv.bench.meet import Begins


def seen(*steps: float, delay: float = 0.0) -> Begins:
    """A server whose steps begin at these moments, asked every 0.3 s; each answer takes 0.1 s, its age is of `delay`
    seconds after the question.
    """
    begins = Begins()
    for tick in range(100):
        asked = tick * 0.3
        moment = asked + delay
        begins.add(asked, asked + 0.1, moment - max(step for step in steps if step <= moment))
    return begins


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.1])
def test_steps_are_told_apart_whenever_the_server_looks(delay: float) -> None:
    begins = seen(-5.0, 2.0, 4.5, 10.0, 11.0, delay=delay)
    steps = begins.between(3.0, 10.7)
    assert steps == pytest.approx([2.5, 5.5, 0.7], abs=0.11)
    assert sum(steps) == pytest.approx(8.7, abs=0.06)


def test_the_step_in_flight_is_the_first_also_where_it_began_before_anyone_asked() -> None:
    assert seen(-5.0, 2.0).between(1.0, 1.5) == pytest.approx([6.5], abs=0.06)
    assert seen(-5.0, 2.0).between(1.0, 2.5) == pytest.approx([7.0, 0.5], abs=0.06)


def test_where_nothing_is_told_there_is_nothing() -> None:
    assert Begins().between(1.0, 3.0) == ()
