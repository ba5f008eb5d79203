"""Several prompts are stored in turn: how long each waits, counted in chunks by a clock that only they move."""

import random
from functools import partial

import pytest

from onekv.engine import Request
from onekv.engine.runner import Runner
from onekv.engine.scheduler import TURNS
from stock import engine_of, small_llama

CHUNK = 32


class Ticking(Runner):
    """A chunk takes one second, all else nothing."""

    seconds = 0.0

    def store(self, sequences, tokens):
        super().store(sequences, tokens)
        self.seconds += 1.0
        self.stored = [*getattr(self, "stored", []), [len(row) for row in tokens]]


@pytest.fixture(scope="module")
def model():
    return small_llama(5, num_hidden_layers=1, intermediate_size=32, num_key_value_heads=1, head_dim=16)


def make(model, together=False, **settings):
    settings = {"kv_memory": "4MB", "block_size": 16, "max_batch": 16, "prefill_chunk": CHUNK} | settings
    engine = engine_of(model, make_runner=partial(Ticking, together=together), **settings)
    engine.now = lambda: engine.runner.seconds
    return engine


def ask(engine, length, seed, max_tokens=1, start=()):
    """A prompt of so many tokens that nobody else has, after those of `start`."""
    draw = random.Random(seed)
    request = Request([*start, *(draw.randrange(3, 128) for _ in range(length - len(start)))], max_tokens)
    request.arrived(engine.now())
    engine.submit(request)
    return request


def run(engine):
    while not engine.idle:
        engine.step()
    engine.check_integrity()


def waited(request):
    return request.timings.first_token


def test_a_short_prompt_that_meets_a_long_one_waits_for_one_chunk_of_it(model):
    engine = make(model)
    long = ask(engine, 40 * CHUNK, 1)
    for _ in range(5):
        engine.step()
    # One of the long prompt's is in flight when it comes, at the worst: that is the first of the two.
    short = ask(engine, CHUNK, 2)
    short.arrived(engine.now() - 1)
    run(engine)
    assert waited(short) == 2.0
    assert waited(long) == 41.0


@pytest.mark.parametrize("others", range(1, 2 * TURNS))
def test_a_short_prompt_waits_for_one_chunk_more_where_the_oldest_is_next(model, others):
    engine = make(model)
    long = ask(engine, 40 * CHUNK, 1)
    engine.step()
    for number in range(others):
        ask(engine, CHUNK, 2 + number)
    # Between theirs the oldest has its own.
    while len(engine.runner.stored) < 1 + others + (others - 1) // (TURNS - 1):
        engine.step()
    # The last one's chunk is in flight when it comes, at the worst.
    short = ask(engine, CHUNK, 99)
    short.arrived(engine.now() - 1)
    run(engine)
    assert waited(short) == (3.0 if others % (TURNS - 1) == 0 else 2.0)
    assert waited(long) == 40.0 + others + 1


def test_the_closest_to_its_first_token_goes_first_and_the_oldest_gets_its_share(model):
    engine = make(model)
    long = ask(engine, 12 * CHUNK, 1)
    engine.step()
    others = [ask(engine, 3 * CHUNK, 2), ask(engine, 2 * CHUNK, 3), ask(engine, CHUNK, 4)]
    run(engine)
    # Chunks of the long prompt, which is the oldest, after each three of others: L c b b L a a a L L ...
    assert [request.first for request in (*others, long)] == [8.0, 4.0, 2.0, 18.0]


@pytest.mark.parametrize("together", [False, True])
def test_a_stream_of_short_prompts_does_not_starve_a_long_one(model, together):
    engine = make(model, together)
    chunks = 10
    long = ask(engine, chunks * CHUNK, 1)
    # Before the others, if only just.
    long.arrived(-0.001)
    seed = 2
    while not long.finished:
        # Always two that are closer to their first token.
        while sum(request is not long for request in engine.scheduler) < 2:
            ask(engine, CHUNK // 2 if together else CHUNK, seed)
            seed += 1
        engine.step()
    assert chunks * 2 < round(waited(long)) <= TURNS * chunks
    assert together == any(len(rows) > 1 for rows in engine.runner.stored)
    run(engine)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_prompt_is_stored_within_the_bound_whatever_comes(model, seed, together):
    draw = random.Random(seed)
    engine = make(model, together)
    asked = []
    for number in range(40):
        lengths = [8, 9, CHUNK, 3 * CHUNK, 9 * CHUNK]
        asked.append(ask(engine, draw.choice(lengths), 100 * seed + number))
        for _ in range(draw.choice([0, 0, 0, 1, 2, 6])):
            engine.step()
    run(engine)
    assert together == any(len(rows) > 1 for rows in engine.runner.stored)
    for number, request in enumerate(asked):
        # Work that was there before it, from when it came: each chunk of it, and of its own, costs TURNS at most.
        before = [older for older in asked[:number] if older.first > request.created]
        chunks = sum(-(-len(older.prompt) // CHUNK) for older in (*before, request))
        assert waited(request) <= TURNS * chunks


def test_who_has_most_in_common_with_a_prompt_that_is_being_stored_waits_for_that(model):
    engine = make(model)
    system = [random.Random(9).randrange(3, 128) for _ in range(8 * CHUNK)]
    first = ask(engine, 10 * CHUNK, 1, start=system)
    engine.step()
    second = ask(engine, 9 * CHUNK, 2, start=system)
    other = ask(engine, CHUNK, 3)
    engine.step()
    # It is passed by who has nothing to wait for.
    assert second.state == "waiting" and second.leader == (first, 8 * CHUNK)
    assert other.state in ("running", "finished")
    while first.stored < 8 * CHUNK:
        engine.step()
    assert first.state == "prefilling"
    run(engine)
    # Admitted when the common part was there, not when all of the first was; nothing was stored twice.
    assert second.cached_tokens == 8 * CHUNK and second.first < first.first
    assert sum(map(sum, engine.runner.stored)) == 10 * CHUNK - 1 + CHUNK - 1 + CHUNK - 1
    assert second.leader is None


def test_the_leader_is_as_close_as_who_waits_for_it(model):
    engine = make(model)
    system = [random.Random(9).randrange(3, 128) for _ in range(4 * CHUNK)]
    leader = ask(engine, 20 * CHUNK, 1, start=system)
    engine.step()
    follower = ask(engine, 5 * CHUNK, 2, start=system)
    longer = ask(engine, 8 * CHUNK, 3)
    run(engine)
    assert leader.created <= follower.created
    assert follower.first < longer.first < leader.first


def test_another_key_or_no_cache_follows_nobody(model):
    for settings, salt in (({}, "other"), ({"prefix_cache": False}, "")):
        engine = make(model, **settings)
        first = ask(engine, 6 * CHUNK, 1)
        engine.step()
        second = Request(list(first.prompt), 1, salt=salt)
        engine.submit(second)
        engine.step()
        assert first.state == second.state == "prefilling"
        run(engine)
        assert second.cached_tokens == 0 and second.tokens == first.tokens


def test_a_leader_that_goes_away_is_waited_for_no_longer(model):
    engine = make(model)
    first = ask(engine, 6 * CHUNK, 1)
    engine.step()
    second = Request(list(first.prompt), 1)
    engine.submit(second)
    engine.step()
    assert second.leader is not None
    engine.cancel([first])
    engine.step()
    assert second.state == "prefilling" and second.leader is None
    run(engine)
    assert len(second.tokens) == 1
