"""Continuing a cached conversation: no second copy, however long it is, and the same words as from scratch."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

from onekv import LLM
from onekv.config import Settings
from onekv.engine import Engine, Request
from onekv.memory.plan import make_plan
from stock import small_llama

MB = 10**6


@pytest.fixture(scope="module")
def model():
    """Little to compute, much to keep: 64 KiB of KV for each token."""
    return small_llama(2, num_hidden_layers=16, intermediate_size=64, num_key_value_heads=8, head_dim=64)


def random_tokens(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 128, length).tolist()


def generate(engine: Engine, prompt: list[int]) -> Request:
    request = Request(prompt, 2)
    engine.submit(request)
    while not engine.idle:
        engine.step()
    return request


@pytest.mark.parametrize("size", [50 * MB, 100 * MB, 200 * MB])
def test_continuing_raises_the_peak_by_less_than_a_block_and_a_layer(model, size):
    settings = Settings(kv_memory=size + 20 * MB, max_batch=1)
    engine = Engine(model, make_plan(model, settings, None), set())
    pool = engine.memory.pools[0]
    length = size // (pool.block_bytes // pool.block_size)
    prompt = random_tokens(length, 1)
    first = generate(engine, prompt)
    level = mx.get_active_memory()
    mx.reset_peak_memory()
    second = generate(engine, [*first.all_tokens, *random_tokens(20, 2)])
    assert second.cached_tokens >= length
    one_layer = size // len(pool.layers)
    assert mx.get_peak_memory() - level < pool.block_bytes + one_layer
    assert mx.get_active_memory() <= level + MB
    engine.check_integrity()


def test_branching_off_raises_the_peak_by_no_more_than_a_block_and_a_layer(model):
    """Its own blocks lie elsewhere than the prefix it shares, so each layer reads a copy: one at a time."""
    engine = Engine(model, make_plan(model, Settings(kv_memory=80 * MB, max_batch=1), None), set())
    pool = engine.memory.pools[0]
    length = 50 * MB // (pool.block_bytes // pool.block_size)
    prompt = random_tokens(length, 1)
    generate(engine, [*prompt, *random_tokens(100, 2)])
    level = mx.get_active_memory()
    mx.reset_peak_memory()
    branch = generate(engine, [*prompt, *random_tokens(20, 3)])
    assert branch.cached_tokens >= length
    # The copy, and what is computed of it.
    one_layer = 50 * MB // len(pool.layers)
    assert mx.get_peak_memory() - level < pool.block_bytes + 2 * one_layer
    engine.check_integrity()


def test_mlx_lm_copies_the_whole_conversation(model):
    """The fault this project started from, so that the test above is known to measure it."""
    prompt, cache = random_tokens(800, 1), make_prompt_cache(model)
    mx.eval(model(mx.array([prompt]), cache=cache), [c.state[:2] for c in cache])
    entries = LRUPromptCache()
    entries.insert_cache("model", prompt, cache)
    size = entries.nbytes
    del cache
    level = mx.get_active_memory()
    mx.reset_peak_memory()
    fetched, rest = entries.fetch_nearest_cache("model", [*prompt, 5])
    mx.eval(model(mx.array([rest]), cache=fetched), [c.state[:2] for c in fetched])
    assert mx.get_peak_memory() - level > 0.9 * size


def test_twenty_turns_equal_cold_runs(smollm2_path):
    """SmolLM2, greedy: every answer is that of a model that never cached anything."""
    words = ["tree", "river", "stone", "cloud", "bird", "road", "song", "lamp", "ship", "field"]
    with LLM(kv_memory="96MiB", max_batch=1, progress=False) as warm:
        cold = LLM(warm.model, tokenizer=warm.tokenizer, kv_memory="96MiB", max_batch=1, prefix_cache=False)
        messages = [{"role": "system", "content": "Answer in a few words."}]
        before = 0
        for turn in range(20):
            messages.append({"role": "user", "content": f"Say something about a {words[turn % 10]}."})
            answer = warm.chat(messages, max_tokens=8)
            assert answer.tokens == cold.chat(messages, max_tokens=8).tokens
            assert answer.cached_tokens >= before - warm.settings.block_size
            before = answer.prompt_tokens
            messages.append({"role": "assistant", "content": answer.text})
        stats = warm.stats()
        assert stats.prefix.hits == 19
        assert stats.prefix.tokens_reused > 0.8 * stats.prefix.hits * before / 2
        warm.check_integrity()
        cold.close()
