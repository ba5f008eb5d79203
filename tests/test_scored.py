"""Prompts whose own log probabilities are asked for: the numbers of the stock model, and nothing is shared or left."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from architectures import VOCAB, build
from onekv.engine import Request, Sampling
from onekv.memory.plan import workspace
from stock import engine_of

TOP = 3


def prompt(length, seed):
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def run(engine, *requests):
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()
    engine.check_integrity()


def scored(tokens):
    return Request(tokens, 1, Sampling(temperature=0, logprobs=TOP), scored=True)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2"])
def test_the_numbers_are_the_stock_models(name, monkeypatch):
    # Chunks of eight tokens, whatever else would be stored at once.
    monkeypatch.setattr(workspace, "SCORED", VOCAB * 4 * 8)
    model = build(name)
    engine = engine_of(model, kv_memory="8MB", block_size=16, max_batch=3, prefill_chunk=48)
    tokens = prompt(61, 1)
    request = scored(tokens)
    run(engine, Request(tokens, 1), request)
    logits = model(mx.array(tokens)[None], cache=make_prompt_cache(model))[0, :-1].astype(mx.float32)
    stock = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    found = [each.logprob for each in request.prompt_logprobs]
    assert len(found) == len(tokens) - 1 and request.cached_tokens == 0
    assert np.allclose(found, stock[np.arange(60), tokens[1:]], atol=1e-4)
    for each, row in zip(request.prompt_logprobs, stock, strict=True):
        assert np.allclose([value for _, value in each.top], np.sort(row)[: -TOP - 1 : -1], atol=1e-4)


def test_nobody_waits_for_a_prompt_that_is_scored_and_it_waits_for_nobody():
    engine = engine_of(build("llama"), kv_memory="8MB", block_size=16, max_batch=4, prefill_chunk=16)
    tokens = prompt(200, 2)
    first, plain, second = scored(tokens), Request(tokens, 1), scored(tokens)
    for request in (first, plain, second):
        engine.submit(request)
    engine.step()
    assert [request.state for request in (first, plain, second)] == ["prefilling"] * 3
    run(engine)
    assert [each.logprob for each in first.prompt_logprobs] == [each.logprob for each in second.prompt_logprobs]
    later = Request(tokens, 1)
    run(engine, later)
    assert later.cached_tokens == len(tokens) - 1, "what the plain one stored"


def test_a_scored_prompt_leaves_nothing():
    engine = engine_of(build("llama"), kv_memory="8MB", block_size=16, max_batch=2, prefill_chunk=16)
    tokens = prompt(100, 3)
    run(engine, scored(tokens))
    assert all(pool.free == pool.blocks for pool in engine.memory.pools)
    plain = Request(tokens, 1)
    run(engine, plain)
    assert plain.cached_tokens == 0
