"""Who is next: decisions about requests, without a model, a pool or a clock of its own."""

import itertools

import pytest

from onekv.engine.request import Request
from onekv.engine.scheduler import TURNS, Scheduler


def make(count: int, scheduler: Scheduler) -> list[Request]:
    requests = []
    for number in range(count):
        request = Request([1, 2, 3], 4)
        request.arrived(float(number))
        scheduler.add(request)
        requests.append(request)
    return requests


def test_requests_are_admitted_in_the_order_in_which_they_came():
    scheduler = Scheduler(max_batch=2, decode_steps=1)
    first, second, third = make(3, scheduler)
    assert scheduler.to_admit() is first
    scheduler.move(first, "running")
    assert scheduler.to_admit() is second
    scheduler.move(second, "loading")
    # The batch is full: one runs, one is loading.
    assert scheduler.to_admit() is None
    scheduler.move(first, "finished")
    assert scheduler.to_admit() is third


def test_who_was_refused_is_tried_again_when_something_has_changed_and_not_before():
    scheduler = Scheduler(max_batch=4, decode_steps=1)
    first, second, third = make(3, scheduler)
    scheduler.move(first, "running")
    scheduler.refused(second)
    # None overtakes another.
    assert scheduler.to_admit() is None
    scheduler.move(first, "finished")
    assert scheduler.to_admit() is second
    scheduler.refused(second)
    scheduler.move(second, "finished")
    assert scheduler.to_admit() is third


def test_who_is_looking_stays_the_oldest_and_is_asked_again_in_every_step():
    scheduler = Scheduler(max_batch=4, decode_steps=1)
    first, second = make(2, scheduler)
    scheduler.move(first, "looking")
    assert [scheduler.to_admit() for _ in range(3)] == [first] * 3
    assert list(scheduler.waiting) == [first, second]
    assert not scheduler.in_work and not scheduler.idle
    scheduler.move(first, "loading")
    assert list(scheduler.waiting) == [second] and scheduler.in_work
    # What it waited for could not be read: it is the oldest again.
    scheduler.move(first, "waiting")
    assert list(scheduler.waiting) == [first, second]


@pytest.mark.parametrize("decode_steps", [1, 2, 5])
def test_a_prompt_gets_a_chunk_after_so_many_tokens_of_the_others(decode_steps):
    scheduler = Scheduler(max_batch=4, decode_steps=decode_steps)
    talker, newcomer = make(2, scheduler)
    scheduler.move(talker, "running")
    scheduler.move(newcomer, "prefilling")
    steps = []
    for _ in range(20):
        chunk = scheduler.to_prefill()
        steps.append(chunk is newcomer)
        if chunk is not None:
            scheduler.chunk_stored(chunk)
        scheduler.tokens_decoded()
    chunks = [step for step, chunk in enumerate(steps) if chunk]
    assert {b - a for a, b in itertools.pairwise(chunks)} == {decode_steps}
    # With nobody to wait for it gets one in every step.
    scheduler.move(talker, "finished")
    assert scheduler.to_prefill() is newcomer


def test_of_prompts_as_long_as_each_other_the_oldest_gets_the_next_chunk_also_when_it_was_loading():
    scheduler = Scheduler(max_batch=4, decode_steps=1)
    first, second = make(2, scheduler)
    scheduler.move(first, "loading")
    scheduler.move(second, "prefilling")
    assert scheduler.to_prefill() is second
    scheduler.move(first, "prefilling")
    assert scheduler.to_prefill() is first


def test_the_oldest_has_had_its_turn_when_its_chunk_joined_that_of_another():
    scheduler = Scheduler(max_batch=4, decode_steps=1)
    old, *short = make(3, scheduler)
    old.prompt = [1] * 9
    for request in (old, *short):
        scheduler.move(request, "prefilling")
    assert scheduler.after(short[1]) == [short[0], old]
    for _ in range(10 * TURNS):
        assert scheduler.to_prefill() is short[0]
        scheduler.chunk_stored(short[0], old)
    # By others alone it is passed a few times, not for ever.
    for _ in range(TURNS - 1):
        assert scheduler.to_prefill() is short[0]
        scheduler.chunk_stored(*short)
    assert scheduler.to_prefill() is old


def test_a_request_is_in_one_place_whatever_it_went_through():
    ways = [
        ["running", "finished"],
        ["looking", "finished"],
        ["looking", "waiting", "prefilling", "finished"],
        ["loading", "waiting", "looking", "loading", "prefilling", "running", "finished"],
        ["finished"],
    ]
    for way in ways:
        scheduler = Scheduler(max_batch=4, decode_steps=1)
        request, other = make(2, scheduler)
        for state in way:
            scheduler.move(request, state)
            assert request.state == state
            assert list(scheduler).count(request) == (state != "finished")
        assert list(scheduler) == [other]
