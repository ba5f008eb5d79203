"""The engine's thread: who waits for whom, who is refused, and what one failure does to the others."""

import itertools
import queue
import threading
import time

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from architectures import VOCAB, build
from onekv.engine import Delta, End, Engine, EngineThread, Job, Request, Sampling, TextOutput
from onekv.errors import OneKVError, OverloadedError, RequestFailedError, TooLongError
from test_prefix_exact import make_engine, run, tokens


class Letters:
    """A detokenizer that makes a letter of every token."""

    def __init__(self) -> None:
        self.text, self.read = "", 0

    def add_token(self, token: int) -> None:
        self.text += chr(ord("a") + token % 26)

    def finalize(self) -> None:
        pass

    @property
    def last_segment(self) -> str:
        new, self.read = self.text[self.read :], len(self.text)
        return new


class Collected:
    """A job whose events are kept in a queue. If it is `held`, the engine waits at its first one until `go` is set."""

    def __init__(self, prompt, max_tokens=8, stops=(), detokenizer=None, held=False, **options) -> None:
        self.request = Request(prompt, max_tokens, **options)
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.job = Job(self.request, TextOutput(detokenizer or Letters(), set(), stops), self._take)
        self.text = ""
        self.go = threading.Event()
        if not held:
            self.go.set()

    def _take(self, event) -> None:
        self.events.put(event)
        assert self.go.wait(60)

    def result(self) -> End | OneKVError:
        while True:
            event = self.events.get(timeout=60)
            if not isinstance(event, Delta):
                return event
            self.text += event.text


class Running:
    """A thread around a small model, closed at the end of the test."""

    def __init__(self, max_waiting=64, max_wait=60.0, model=None, now=time.perf_counter, **settings) -> None:
        self.engine: Engine

        def make() -> Engine:
            self.engine = make_engine(model or build("llama"), **settings)
            return self.engine

        self.thread = EngineThread(make, max_waiting, max_wait, now)
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.thread.alive:
            self.thread.call(lambda engine: engine.check_integrity()).result(60)
        self.thread.stop(0)

    def start(self, *jobs: Collected) -> None:
        self.thread.submit([each.job for each in jobs])


def test_requests_together_get_what_each_gets_alone():
    alone = []
    for seed in range(16):
        engine = make_engine(build("llama"))
        alone.append(run(engine, [tokens(5 + 7 * seed, seed)], 3 + seed % 5)[0].tokens)
    with Running(max_batch=5) as running:
        jobs = [Collected(tokens(5 + 7 * seed, seed), 3 + seed % 5) for seed in range(16)]
        running.start(*jobs)
        ends = [job.result() for job in jobs]
    assert [job.request.tokens for job in jobs] == alone
    assert all(isinstance(end, End) and end.finish_reason == "length" for end in ends)
    assert [len(job.text) for job in jobs] == [3 + seed % 5 for seed in range(16)]


@pytest.mark.parametrize("decode_steps", [1, 3])
def test_decoding_waits_for_one_chunk_and_a_prompt_for_so_many_tokens(decode_steps):
    engine = make_engine(build("llama"), max_batch=2, decode_steps=decode_steps)
    talker, newcomer = Request(tokens(10, 1), 100), Request(tokens(48 * 6, 2), 4)
    engine.submit(talker)
    while len(talker.tokens) < 3:
        engine.step()
    engine.submit(newcomer)
    trace = []
    while not newcomer.tokens:
        before = newcomer.sequence.length if newcomer.lease is not None else 0
        engine.step()
        trace.append(newcomer.sequence.length > before)
        assert engine.runner.eager or engine.runner.flight is not None
    chunks = [index for index, chunk in enumerate(trace) if chunk][:6]
    assert len(chunks) == 6
    assert {b - a for a, b in itertools.pairwise(chunks)} == {decode_steps}
    # Every step gave the talker a token, chunk or not; one may still be in the air.
    assert len(talker.tokens) >= 3 + len(trace) - 2


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    with Running() as running:
        job = Collected(tokens(20, 1), 100_000)
        running.start(job)
        error = job.result()
        assert isinstance(error, TooLongError)
        assert "100019 tokens to keep" in str(error)
        assert "--kv-memory" in str(error)


def test_too_many_are_refused_at_once_and_all_or_none():
    with Running(max_waiting=1, max_batch=2) as running:
        first = [Collected(tokens(9, seed), 60, held=seed == 0) for seed in range(2)]
        running.start(*first)
        with pytest.raises(OverloadedError, match="--max-waiting") as refused:
            running.start(Collected(tokens(9, 7)), Collected(tokens(9, 8)))
        assert refused.value.retry_after > 0
        last = Collected(tokens(9, 9), 2)
        running.start(last)
        first[0].go.set()
        assert all(isinstance(job.result(), End) for job in [*first, last])


def test_one_that_waits_too_long_is_told():
    with Running(max_wait=600, max_batch=1) as running:
        long, short = Collected(tokens(9, 1), 400, held=True), Collected(tokens(9, 2), 2)
        running.start(long)
        long.events.get(timeout=60)
        short.request.arrived(time.perf_counter() - 601)
        running.start(short)
        long.go.set()
        error = short.result()
        assert isinstance(error, OverloadedError)
        assert "--max-wait" in str(error)
        running.thread.cancel([long.job])
        assert isinstance(long.result(), End)


def test_first_come_first_served_although_another_prefix_is_hot():
    with Running(max_batch=1) as running:
        hot = tokens(200, 1)
        warm = Collected(hot, 2)
        running.start(warm)
        warm.result()
        order = []
        jobs = [Collected(tokens(150, 2), 2)] + [Collected([*hot, seed], 2) for seed in range(1, 5)]
        for job in jobs:
            job.job.emit = lambda event, job=job: (order.append(job), job.events.put(event))
        running.start(*jobs)
        for job in jobs:
            job.result()
    assert list(dict.fromkeys(order)) == jobs


@pytest.mark.parametrize("when", ["waiting", "prefilling", "running"])
def test_cancelling_releases_everything_within_a_step(when):
    with Running(max_batch=1) as running:
        other = Collected(tokens(9, 1), 300, held=True)
        job = Collected(tokens(900, 2), 300, held=when == "running")
        if when == "waiting":
            running.start(other)
            other.events.get(timeout=60)
        running.start(job)
        if when == "running":
            job.events.get(timeout=60)
        running.thread.cancel([job.job, other.job])
        for each in (job, other):
            each.go.set()
        end = job.result()
        assert end.finish_reason == "cancelled"

        def held(engine: Engine) -> int:
            return sum(pool.held + pool.reserved for pool in engine.memory.pools)

        assert running.thread.call(held).result(60) == 0


def test_cancelling_one_leaves_the_others_their_tokens():
    expected = run(make_engine(build("llama")), [tokens(30, 1)], 40)[0].tokens
    for after in range(1, 6):
        engine = make_engine(build("llama"))
        kept, dropped = Request(tokens(30, 1), 40), Request(tokens(20, 2), 40)
        engine.submit(dropped)
        engine.submit(kept)
        while len(kept.tokens) < after:
            engine.step()
        engine.cancel([dropped])
        while not engine.idle:
            engine.step()
        assert kept.tokens == expected


class Broken(Letters):
    def add_token(self, token: int) -> None:
        raise KeyError("a token nobody knows")


def test_a_tokenizer_that_fails_ends_its_own_request_alone():
    expected = run(make_engine(build("llama")), [tokens(30, 1)], 12)[0].tokens
    with Running() as running:
        good, bad = Collected(tokens(30, 1), 12), Collected(tokens(40, 2), 12, detokenizer=Broken())
        running.start(bad, good)
        error = bad.result()
        assert isinstance(error, RequestFailedError)
        assert "a token nobody knows" in str(error.__cause__)
        assert good.result().finish_reason == "length"
        assert good.request.tokens == expected


def poisoned(token: int):
    """A model that makes NaN of one token."""
    model = build("llama")
    model.model.embed_tokens.weight[token] = mx.nan
    mx.eval(model.parameters())
    # The head must not know it too.
    assert not model.args.tie_word_embeddings
    return model


def test_bad_logits_end_their_own_request_alone_and_leave_nothing_behind():
    bad_token = VOCAB - 1

    def clean(length, seed):
        return [token % bad_token for token in tokens(length, seed)]

    expected = run(make_engine(build("llama")), [clean(70, 1)], 20)[0].tokens
    with Running(model=poisoned(bad_token), kv_memory="128KB", prefill_chunk=32) as running:
        good = Collected(clean(70, 1), 20)
        bad = [Collected([*clean(20 + 30 * seed, seed), bad_token, *clean(3, seed)], 20) for seed in (2, 3)]
        running.start(bad[0], good, bad[1])
        for job in bad:
            error = job.result()
            assert isinstance(error, RequestFailedError)
            assert "NaN" in str(error)
        assert good.result().finish_reason == "length"
        assert good.request.tokens == expected
        # All blocks that the failed ones had are used again by others.
        for seed in range(4, 12):
            later = Collected(clean(60, seed), 20, sampling=Sampling(logit_bias=((bad_token, -1000.0),)))
            running.start(later)
            assert later.result().finish_reason == "length"


def test_a_model_that_raises_fails_the_requests_of_that_step_alone():
    with Running(max_batch=3) as running:
        talker = Collected(tokens(9, 1), 200)
        running.start(talker)
        talker.events.get(timeout=60)
        engine, model = running.engine, running.engine.runner.model

        def fails(inputs, cache):
            if inputs.shape[1] > 20:
                raise ValueError("no room in this model")
            return model(inputs, cache=cache)

        running.thread.call(lambda engine: setattr(engine.runner, "model", fails)).result(60)
        victim = Collected(tokens(60, 2), 5)
        running.start(victim)
        error = victim.result()
        assert isinstance(error, RequestFailedError)
        assert "no room in this model" in str(error.__cause__)
        assert engine is running.engine
        assert talker.result().finish_reason == "length"


def test_stopping_lets_short_requests_finish_and_cancels_long_ones():
    # No time passes until the short one has ended; then all of it.
    clock = [0.0]
    running = Running(now=lambda: clock[-1])
    short, long = Collected(tokens(9, 1), 5), Collected(tokens(9, 2), 3000, held=True)
    short.job.emit = lambda event: (short.events.put(event), isinstance(event, End) and clock.append(100.0))
    running.start(short, long)
    long.events.get(timeout=60)
    stopping = threading.Thread(target=running.thread.stop, args=(1.0,))
    stopping.start()
    while not running.thread.stopping:
        time.sleep(0.001)
    long.go.set()
    stopping.join(60)
    assert not stopping.is_alive()
    assert short.result().finish_reason == "length"
    assert long.result().finish_reason == "cancelled"
    with pytest.raises(OverloadedError, match="shutting down"):
        running.start(Collected(tokens(9, 3)))
    with pytest.raises(OverloadedError):
        running.thread.call(lambda engine: None)


def test_only_its_own_thread_touches_the_engine():
    with Running() as running:
        name = running.thread.call(lambda engine: threading.current_thread().name).result(60)
        assert name == "onekv-engine"
        with pytest.raises(ZeroDivisionError):
            running.thread.call(lambda engine: 1 // 0).result(60)


def test_a_stop_string_ends_the_request():
    with Running() as running:
        free = Collected(tokens(30, 1), 20)
        running.start(free)
        free.result()
        stop = free.text[7:10]
        job = Collected(tokens(30, 1), 20, stops=[stop])
        running.start(job)
        end = job.result()
    assert (end.finish_reason, end.stopped_by) == ("stop", stop)
    assert job.text == free.text[: free.text.index(stop)]
    assert end.generated < 20


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_text_ends_before_the_first_stop_string_however_it_is_cut(text, stops, data):
    output = TextOutput(Letters(), set(), stops)
    request = Request([0], 30)
    given_out = ""
    codes = [ord(letter) - ord("a") for letter in text]
    while codes and output.stopped_by is None:
        count = data.draw(st.integers(1, 5))
        request.tokens.extend(codes[:count])
        codes = codes[count:]
        request.finish_reason = None if codes else "length"
        given_out += output.take(request).text
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    assert given_out == text[: min(ends)[1] if ends else len(text)]
    assert (output.stopped_by is not None) == bool(ends)


def test_logprobs_are_the_models_own():
    model = build("llama")
    engine = make_engine(model)
    prompt = tokens(20, 1)
    request = run(engine, [prompt], 5, sampling=Sampling(temperature=1.5, seed=3, logprobs=3))[0]
    logits = model(mx.array([prompt + request.tokens]))[0, len(prompt) - 1 : -1].astype(mx.float32)
    wanted = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    assert len(request.logprobs) == 5
    for row, (token, got) in enumerate(zip(request.tokens, request.logprobs, strict=True)):
        assert got.logprob == pytest.approx(wanted[row, token], abs=1e-4)
        best = np.argsort(-wanted[row])[:3]
        assert [token for token, _ in got.top] == best.tolist()
        assert [value for _, value in got.top] == pytest.approx(wanted[row, best].tolist(), abs=1e-4)


def test_penalties_and_biases_change_what_is_chosen():
    def greedy(**rules):
        return run(make_engine(build("llama")), [tokens(20, 1)], 12, sampling=Sampling(**rules))[0].tokens

    plain = greedy()
    assert plain[0] not in greedy(logit_bias=((plain[0], -100.0),))
    assert greedy(logit_bias=((7, 1000.0),)) == [7] * 12
    assert len(set(greedy(presence_penalty=1000.0))) == 12
    assert len(set(greedy(frequency_penalty=1000.0))) == 12
    once = greedy(repetition_penalty=1e6)
    assert len(set(once)) == 12
    assert not set(once) & set(tokens(20, 1))


class Alternating:
    """Even tokens, then odd ones, in turn."""

    def __init__(self) -> None:
        self.odd = 0

    def allowed(self):
        return np.arange(VOCAB) % 2 == self.odd

    def advance(self, token: int) -> None:
        self.odd = 1 - self.odd


def test_a_constraint_is_kept_beside_requests_without_one():
    free = tokens(25, 2)
    expected = run(make_engine(build("llama")), [free], 12)[0].tokens
    with Running() as running:
        bound, other = Collected(tokens(30, 1), 12, constraint=Alternating()), Collected(free, 12)
        running.start(bound, other)
        bound.result()
        other.result()
    assert [token % 2 for token in bound.request.tokens] == [0, 1] * 6
    assert other.request.tokens == expected
