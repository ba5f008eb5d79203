"""After every kind of hit the tokens are those of a cold run, on every architecture."""

import mlx.core as mx
import numpy as np
import pytest

from architectures import VOCAB, build
from onekv.engine import Engine, Request
from stock import engine_of
from test_exact import SERVED

BLOCK = 16
# Rotates keys by the length of the chunk they come in: what is stored depends on how the prompt was cut.
UNSTABLE = {"llama-dynamic-rope"}


@pytest.fixture(autouse=True)
def _plain_kernels():
    mx.disable_compile()
    yield
    mx.enable_compile()


def make_engine(model, prefix_cache=True, **settings) -> Engine:
    values = {"kv_memory": "8MB", "block_size": BLOCK, "max_batch": 3, "prefill_chunk": 48, **settings}
    return engine_of(model, prefix_cache=prefix_cache, **values)


def run(engine: Engine, prompts: list[list[int]], count: int = 6, **options) -> list[Request]:
    requests = [Request(prompt, count, **options) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()
    engine.check_integrity()
    return requests


def tokens(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def hits(base: list[int], answer: list[int]) -> dict[str, list[int]]:
    """Prompts that share some of `base` and what was generated after it."""
    return {
        "repeat": base,
        "continuation": base + answer + tokens(21, 5),
        "proper prefix": base[:70],
        "branch inside a block": base[:75] + tokens(30, 6),
        "branch at a block": base[:64] + tokens(30, 7),
        "branch in the first block": base[:9] + tokens(40, 8),
    }


@pytest.mark.parametrize("name", [name for name in SERVED if name not in UNSTABLE])
def test_tokens_after_a_hit_equal_a_cold_run(name):
    model = build(name)
    cold = make_engine(model, prefix_cache=False)
    base = tokens(101, seed=4)
    for kind in hits(base, []):
        warm = make_engine(model)
        first = run(warm, [base])[0]
        prompt = hits(base, first.tokens)[kind]
        expected = run(cold, [prompt])[0]
        second = run(warm, [prompt])[0]
        assert second.tokens == expected.tokens, kind
        again = run(warm, [prompt, prompt])
        assert [request.tokens for request in again] == [expected.tokens] * 2, kind
        if kind in ("repeat", "continuation"):
            assert second.cached_tokens >= len(base) - 1 - BLOCK, kind
        assert again[0].cached_tokens >= len(prompt) - 1 - BLOCK, kind


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "falcon_h1", "recurrent_gemma"])
def test_a_state_is_never_used_at_another_length(name):
    """Stored at 16, diverging at 12: a state of 16 tokens must not be the start of anything else."""
    model = build(name)
    cold, warm = make_engine(model, prefix_cache=False), make_engine(model)
    base = tokens(17, seed=1)
    run(warm, [base], count=1)
    snapshots = [snapshot.length for _, snapshot in warm.prefix.snapshots.items()]
    assert sorted(snapshots) == [16, 17]
    other = base[:12] + tokens(9, seed=2)
    request = run(warm, [other])[0]
    assert request.cached_tokens == 0
    assert request.tokens == run(cold, [other])[0].tokens
    assert warm.prefix.stats().misses["no snapshot at that length"] == 1


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "mamba2"])
def test_thinking_that_is_dropped_costs_its_own_turn(name):
    """As a template does when a new question comes: all thinking since the last one is left out."""
    model, end, header, think = build(name), 1, [2, 3], [4, 6]
    warm = make_engine(model)
    warm.stop_tokens = {end}

    def message(length: int, seed: int) -> list[int]:
        return [*(5 + token % (VOCAB - 6) for token in tokens(length, seed)), end]

    # The answer begins within the last block of the prompt, after the block that ends with the question.
    question = message(40, 1) + message(4 * BLOCK - 41 - 1 - 3, 2)
    prompt = question + header + think
    assert len(question) // BLOCK == 3 and (len(prompt) - 1) // BLOCK == 4
    for seed in range(3):
        thought, call, result = message(25, 10 + seed)[:-1], message(6, 20 + seed), message(9, 30 + seed)
        run(warm, [prompt], count=2)
        # The model calls a tool and goes on, its thinking kept.
        prompt = prompt + thought + call + result + header + think
        run(warm, [prompt], count=2)
        # Then it is dropped, and the next question is asked.
        kept = question
        question = kept + header + call + result + message(9, 40 + seed)
        prompt = question + header + think
        request = run(warm, [prompt], count=2)[0]
        assert request.cached_tokens >= len(kept) // BLOCK * BLOCK


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "falcon_h1", "gpt_oss"])
def test_every_full_block_of_the_turn_before_hits(name):
    model = build(name)
    engine, cold = make_engine(model, kv_memory="16MB"), make_engine(model, prefix_cache=False, kv_memory="16MB")
    prompt = tokens(40, seed=9)
    before = 0
    for turn in range(20):
        request = run(engine, [prompt])[0]
        assert request.tokens == run(cold, [prompt])[0].tokens
        assert request.cached_tokens >= before - BLOCK
        before = len(prompt)
        prompt = prompt + request.tokens + tokens(7 + turn % 5, seed=turn)
