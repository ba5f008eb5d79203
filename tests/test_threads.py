"""How many threads loops have is what was faster, seen by a clock that is set here."""

import itertools

import pytest

from onekv.loops import threads
from onekv.loops.threads import LATE, SOON, Choice


@pytest.fixture
def clock(monkeypatch):
    """Steps take what `clock` says for their number of threads."""
    now = [0.0]
    monkeypatch.setattr(threads.time, "perf_counter", lambda: now[0])
    return now


def run(choice, clock, seconds, steps):
    """The numbers of threads of some steps."""
    used = []
    for _ in range(steps):
        with choice.step():
            used.append(threads.threads())
            clock[0] += seconds[used[-1]]
    return used


def test_all_threads_on_a_quiet_machine(clock):
    choice = Choice(4)
    used = run(choice, clock, {4: 1.0, 1: 3.0}, 5000)
    # One is tried at the second step, then ever less often.
    assert used[:3] == [4, 1, 4] and choice.number == 4
    tried = [step for step, number in enumerate(used) if number == 1]
    gaps = [b - a for a, b in itertools.pairwise(tried)]
    assert gaps == sorted(gaps) and gaps[0] < 2 * SOON and gaps[-1] > LATE / 2
    assert threads.threads() == threads.most()


def test_one_thread_where_the_others_must_wait_and_back(clock):
    choice = Choice(2)
    used = run(choice, clock, {2: 30.0, 1: 1.0}, 100)
    assert used[:3] == [2, 1, 1] and used.count(2) < 8
    # The machine is quiet again.
    used = run(choice, clock, {2: 0.5, 1: 1.0}, 2 * LATE)
    assert choice.number == 2 and used[-1] == 2


def test_a_little_faster_is_not_enough(clock):
    choice = Choice(2)
    run(choice, clock, {2: 1.0, 1: 0.95}, 200)
    assert choice.number == 2


def test_there_is_nothing_to_choose_with_one_core(clock):
    assert set(run(Choice(1), clock, {1: 1.0}, 50)) == {1}


def test_a_step_that_fails_leaves_the_number_as_it_was(clock):
    choice = Choice(2)
    with pytest.raises(ValueError), choice.step():
        raise ValueError
    assert threads.threads() == threads.most()
    assert run(choice, clock, {2: 1.0, 1: 2.0}, 2) == [2, 1]
