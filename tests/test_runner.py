"""Steps of decoding: one is in the air while the next is built, whatever rules the requests of a batch have."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from onekv.engine import Request
from onekv.engine.params import Sampling
from onekv.memory import layers
from stock import engine_of, small_llama

PROMPTS = [[7 * i % 61 + 1 for i in range(n)] for n in (40, 23, 31)]
COUNT = 24


class Even:
    """Allows even tokens alone, and ends after so many: then it may not be asked any more."""

    def __init__(self, count: int) -> None:
        self.left = count

    def allowed(self):
        assert self.left > 0, "it was asked for one more"
        return np.arange(128) % 2 == 0

    def advance(self, token: int) -> None:
        assert token % 2 == 0
        self.left -= 1


@pytest.fixture(scope="module")
def model():
    return small_llama(11, num_hidden_layers=2, intermediate_size=64, num_key_value_heads=2, head_dim=32)


def engine(model):
    return engine_of(model, kv_memory="4MB", block_size=16, max_batch=3, prefill_chunk=64, prefix_cache=False)


def requests() -> list[Request]:
    """One by its likeliest tokens, one with penalties, one under a constraint, which ends first."""
    made = [
        Request(PROMPTS[0], COUNT),
        Request(PROMPTS[1], COUNT, sampling=Sampling(repetition_penalty=1.3, presence_penalty=0.4)),
        Request(PROMPTS[2], COUNT // 2),
    ]
    made[2].constraint = Even(COUNT // 2)
    return made


def run(runs, *some: Request) -> None:
    for request in some:
        runs.submit(request)
    while not runs.idle:
        runs.step()
    runs.check_integrity()


def test_rules_do_not_end_the_run_ahead(model, monkeypatch):
    alone = requests()
    for request in alone:
        run(engine(model), request)
    runs, together = engine(model), requests()
    landed = []
    stock_land = runs.runner.land
    monkeypatch.setattr(runs.runner, "land", lambda: landed.append(len(together[0].tokens)) or stock_land())
    run(runs, *together)
    assert [request.tokens for request in together] == [request.tokens for request in alone]
    assert not any(request.error for request in together)
    # Landed while the prompts were stored, and where a request is about to end; nowhere between.
    middle = [count for count in landed if 4 < count < COUNT // 2 - 4]
    assert middle == []


def test_what_a_rule_says_is_what_it_says_of_all_tokens_before(model):
    """The token that a penalty is about has been read before the next one is drawn."""
    request = Request(PROMPTS[0], 12, sampling=Sampling(frequency_penalty=2.0, presence_penalty=2.0))
    run(engine(model), request)
    tokens, seen = list(PROMPTS[0]), []
    for _ in range(12):
        logits = np.array(model(mx.array([tokens]))[0, -1])
        for token in seen:
            logits[token] -= 2.0
        for token in set(seen):
            logits[token] -= 2.0
        seen.append(int(logits.argmax()))
        tokens.append(seen[-1])
    assert request.tokens == seen


def test_memory_that_computes_at_once_is_not_run_ahead(model):
    runs = engine_of(model, kv_memory="4MB", block_size=16, max_batch=3, prefill_chunk=64, kv_format="q8")
    request = Request(PROMPTS[0], 5)
    runs.submit(request)
    while not request.tokens:
        runs.step()
    if runs.memory.eager:
        assert runs.runner.flight is None and len(request.tokens) == 1
    run(runs)
    assert len(request.tokens) == 5


@pytest.mark.parametrize("chunk", [16, 64])
def test_layers_of_a_prompt_are_waited_for_on_a_gpu(monkeypatch, chunk):
    """Few of them are in flight, so that their activations are not all there at a time; nothing else changes.

    On CPU, where MLX itself is never far ahead, as it would be on a GPU.
    """
    model = small_llama(1, num_hidden_layers=6, intermediate_size=64, num_key_value_heads=2, head_dim=32)
    engines = [engine_of(model, kv_memory="4MB", block_size=16, prefill_chunk=chunk, max_batch=2) for _ in range(2)]
    paced = engines[1]
    paced.memory._holder.pace = layers.Pace(chunk)
    flying, most, started = [], [], []
    start, wait, end = mx.async_eval, mx.eval, layers.Pace.end

    def watched_start(new, stored):
        start(new, stored)
        flying.append(new)
        started.append(new.shape)

    def watched_wait(*arrays):
        if len(arrays) == 1 and any(arrays[0] is new for new in flying):
            most.append(len(flying))
            assert arrays[0] is flying.pop(0)
        wait(*arrays)

    monkeypatch.setattr(layers.Pace, "end", lambda pace: flying.clear() or end(pace))
    answers = []
    for engine in engines:
        with monkeypatch.context() as patched:
            if engine is paced:
                patched.setattr(layers, "mx", SimpleNamespace(async_eval=watched_start, eval=watched_wait))
            request = Request(PROMPTS[0] + PROMPTS[1], 5)
            engine.submit(request)
            while not engine.idle:
                engine.step()
        answers.append(request.tokens)
    assert answers[1] == answers[0]
    # Of a prompt of 63 tokens, 62 are stored in passes: three of 16 tokens and one of 14, or one. In passes that are
    # smaller than a chunk, every second of the six layers is started by itself.
    assert len(started) == {16: 3 * 6 + 3, 64: 3}[chunk]
    assert most and set(most) == {layers.AHEAD + 1}


def test_only_a_gpu_waits_for_layers():
    engine = engine_of(small_llama(1, num_hidden_layers=2, intermediate_size=64, num_key_value_heads=2, head_dim=32))
    assert (engine.memory._holder.pace is None) == (mx.default_device() == mx.cpu)
    assert engine.runner.together == (mx.default_device() != mx.cpu)
