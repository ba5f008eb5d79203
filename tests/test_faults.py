"""A failure ends the request it belongs to and no other; every job has exactly one end."""

import queue

import numpy as np
import pytest

from architectures import VOCAB, build
from onekv.engine import End, Request, Sampling
from onekv.engine.view import read_stats
from onekv.errors import OneKVError, RequestFailedError
from onekv.prefix.lease import Lease
from test_prefix_exact import make_engine, run, tokens
from test_thread import Broken, Collected, Running

SECRET = "/home/someone/model.py: a detail of the inside"


def raises(*_, **__):
    raise ValueError(SECRET)


def failing_prefill(engine, length: int) -> None:
    """From now on the model raises on prompts of `length` tokens."""
    model = engine.runner.model

    def fails(inputs, cache):
        if inputs.shape[1] == length:
            raise ValueError(SECRET)
        return model(inputs, cache=cache)

    engine.runner.model = fails


def test_who_ended_before_another_ones_prompt_fails_gets_its_last_token_and_its_end():
    """Both happen in one step: the talker's last token is read, then the newcomer's prompt raises."""
    for answer in (1, 2, 3):
        engine = make_engine(build("llama"))
        expected = run(engine, [tokens(9, 1)], answer)[0].tokens
        with Running() as running:
            running.thread.call(lambda engine: failing_prefill(engine, 29)).result(60)
            jobs = [Collected(tokens(9, 1), answer), Collected(tokens(30, 2), 5)]
            running.start(*jobs)
            ends = [job.result() for job in jobs]
            assert isinstance(ends[0], End)
            assert ends[0].generated == answer
            assert jobs[0].request.tokens == expected
            assert len(jobs[0].text) == answer
            assert isinstance(ends[1], RequestFailedError)
            assert running.thread.open_jobs == 0


def test_an_exception_during_admission_ends_that_request_alone():
    expected = run(make_engine(build("llama")), [tokens(9, 1)], 40)[0].tokens
    with Running() as running:
        talker = Collected(tokens(9, 1), 40)
        running.start(talker)
        talker.events.get(timeout=60)
        original = running.engine.prefix.open
        running.thread.call(lambda engine: setattr(engine.prefix, "open", raises)).result(60)
        refused = Collected(tokens(30, 2), 5)
        running.start(refused)
        assert isinstance(refused.result(), RequestFailedError)
        running.thread.call(lambda engine: setattr(engine.prefix, "open", original)).result(60)
        assert isinstance(talker.result(), End)
        assert talker.request.tokens == expected
        later = Collected(tokens(30, 2), 5)
        running.start(later)
        assert isinstance(later.result(), End)


def test_an_exception_during_admission_with_nothing_running_is_told_at_once():
    with Running(max_wait=600) as running:
        running.thread.call(lambda engine: setattr(engine.prefix, "open", raises)).result(60)
        job = Collected(tokens(30, 2), 5)
        running.start(job)
        assert isinstance(job.result(), RequestFailedError)


def test_a_consumer_that_raises_loses_its_own_request_alone():
    expected = run(make_engine(build("llama")), [tokens(30, 1)], 30)[0].tokens
    with Running() as running:
        good, deaf = Collected(tokens(30, 1), 30), Collected(tokens(20, 2), 200)
        deaf.job.emit = raises
        running.start(deaf, good)
        assert isinstance(good.result(), End)
        assert good.request.tokens == expected
        running.thread.call(lambda engine: engine.check_integrity()).result(60)
        assert deaf.request.finish_reason == "cancelled"
        assert running.thread.open_jobs == 0


class BadConstraint:
    def __init__(self, error: Exception) -> None:
        self.error, self.left = error, 3

    def allowed(self):
        return np.ones(VOCAB, np.bool_)

    def advance(self, token: int) -> None:
        self.left -= 1
        if not self.left:
            raise self.error


@pytest.mark.parametrize("error", [ValueError(SECRET), OneKVError("that cannot be followed")])
def test_a_constraint_that_raises_ends_its_own_request_alone(error):
    expected = run(make_engine(build("llama")), [tokens(30, 1)], 12)[0].tokens
    with Running() as running:
        good, bad = Collected(tokens(30, 1), 12), Collected(tokens(40, 2), 12, constraint=BadConstraint(error))
        running.start(bad, good)
        assert isinstance(bad.result(), OneKVError)
        assert isinstance(good.result(), End)
        assert good.request.tokens == expected


class Unsure(BadConstraint):
    def allowed(self):
        self.left -= 1
        if not self.left:
            raise self.error
        return np.ones(VOCAB, np.bool_)

    def advance(self, token: int) -> None:
        pass


@pytest.mark.parametrize("speculate", ["off", "auto"])
def test_a_constraint_that_cannot_say_what_is_allowed_ends_its_own_request_alone(speculate):
    expected = run(make_engine(build("llama")), [tokens(30, 1)], 12)[0].tokens
    engine = make_engine(build("llama"), speculate=speculate)
    good = Request(tokens(30, 1), 12)
    # Guesses are made for one that repeats itself.
    bad = Request(tokens(10, 2) * 4, 12, constraint=Unsure(ValueError(SECRET)))
    for request in (bad, good):
        engine.submit(request)
    while not engine.idle:
        engine.step()
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert isinstance(bad.error, RequestFailedError)
    assert SECRET not in str(bad.error)
    assert good.tokens == expected
    engine.check_integrity()


def test_a_stop_token_that_the_model_has_no_logit_for_fails_nobody():
    engine = make_engine(build("llama"))
    engine.stop_tokens = {VOCAB + 5}
    requests = [Request(tokens(30, 1), 6, Sampling(min_tokens=4)), Request(tokens(30, 2), 6)]
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()
    assert [request.finish_reason for request in requests] == ["length", "length"]


class BadProposer:
    """Raises in one of its methods, and proposes nothing."""

    def __init__(self, method: str) -> None:
        self.method, self.calls = method, 0

    def _call(self, name: str) -> None:
        if name == self.method:
            self.calls += 1
            raise ValueError(SECRET)

    def propose(self, request, limit):
        self._call("propose")

    def learn(self, request):
        self._call("learn")

    def forget(self, request):
        self._call("forget")

    def clear(self):
        self._call("clear")


@pytest.mark.parametrize("method", ["propose", "learn", "forget", "clear"])
def test_a_proposer_that_raises_is_not_asked_again_and_changes_no_answer(method):
    expected = run(make_engine(build("llama")), [tokens(30, 1)], 8)[0].tokens
    proposer = BadProposer(method)
    engine = make_engine(build("llama"))
    assert engine.speculation is not None
    engine.speculation.proposer = proposer
    for _ in range(2):
        answered, cancelled = Request(tokens(30, 1), 8), Request(tokens(20, 2), 50)
        engine.submit(answered)
        engine.submit(cancelled)
        while not answered.finished:
            engine.step()
        engine.cancel([cancelled])
        engine.clear_cache()
        assert answered.tokens == expected
    assert proposer.calls == 1
    assert "the proposer failed" in read_stats(engine).unspeculated
    assert all(pool.held == 0 for pool in read_stats(engine).pools)
    engine.check_integrity()


def test_the_text_of_an_internal_error_does_not_reach_the_client():
    with Running() as running:
        running.thread.call(lambda engine: failing_prefill(engine, 29)).result(60)
        jobs = [Collected(tokens(30, 2), 5), Collected(tokens(40, 2), 12, detokenizer=Broken())]
        running.start(*jobs)
        for job in jobs:
            error = job.result()
            assert isinstance(error, RequestFailedError)
            assert "inside" not in str(error)
            assert "nobody knows" not in str(error)
            assert error.__cause__ is not None


def test_what_a_request_cannot_leave_behind_ends_it_with_an_error(monkeypatch):
    engine = make_engine(build("llama"))
    monkeypatch.setattr(Lease, "finish", raises)
    requests = [Request(tokens(30, 1), 4), Request(tokens(40, 2), 4)]
    for request in requests:
        engine.submit(request)
    for _ in range(20):
        engine.step()
    assert [request.finish_reason for request in requests] == ["error", "error"]
    monkeypatch.undo()
    engine.check_integrity()
    assert run(engine, [tokens(30, 1)], 4)[0].finish_reason == "length"


def test_a_wrong_count_ends_the_engine_where_counts_are_checked():
    """Better no answer than one from blocks that may be another's."""
    running = Running()
    running.thread.check_integrity = True
    first = Collected(tokens(9, 1), 3)
    running.start(first)
    assert isinstance(first.result(), End)
    running.thread.call(lambda engine: engine.memory.pools[0].reserve(1)).result(60)
    second = Collected(tokens(9, 2), 3)
    running.start(second)
    assert isinstance(second.result(), End)
    running.thread._thread.join(60)
    assert not running.thread.alive


@pytest.mark.parametrize("closes", [True, False])
def test_an_engine_that_cannot_go_on_ends_every_job(closes):
    """Nobody waits for an engine whose thread has ended, whatever ended it, or is told that trying again helps."""
    running = Running()
    talker = Collected(tokens(9, 1), 300, held=True)
    running.start(talker)
    talker.events.get(timeout=60)
    if not closes:
        running.thread.call(lambda engine: setattr(engine, "close", raises))
    running.thread.call(lambda engine: setattr(engine, "step", raises))
    late = Collected(tokens(9, 1), 300)
    running.start(late)
    talker.go.set()
    for job in (talker, late):
        error = job.result()
        assert isinstance(error, RequestFailedError)
        assert "the engine could not continue" in str(error)
    running.thread._thread.join(60)
    assert not running.thread.alive
    assert running.thread.open_jobs == 0
    with pytest.raises(RequestFailedError, match="the engine could not continue"):
        running.start(Collected(tokens(9, 1), 3))
    with pytest.raises(queue.Empty):
        talker.events.get_nowait()


@pytest.mark.parametrize("after", [1, 2, 5])
def test_who_gets_no_room_for_its_next_token_ends_alone(after, monkeypatch):
    """While a step is in the air: the others get its tokens and go on."""
    expected = run(make_engine(build("llama"), max_batch=3), [tokens(9, 1)], 40)[0].tokens
    engine = make_engine(build("llama"), max_batch=3)
    requests = [Request(tokens(9, 1), 40), Request(tokens(20, 2), 40), Request(tokens(12, 3), 40)]
    for request in requests:
        engine.submit(request)
    while min(len(request.tokens) for request in requests) < after:
        engine.step()
    grow = Lease.grow
    monkeypatch.setattr(
        Lease, "grow", lambda lease, count: raises() if lease is requests[1].lease else grow(lease, count)
    )
    failed = []
    while not engine.idle:
        failed += engine.step().failed
    assert failed == requests[1:2]
    assert [request.finish_reason for request in requests] == ["length", "error", "length"]
    assert requests[0].tokens == expected
    engine.check_integrity()
