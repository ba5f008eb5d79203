"""What comes back from disk gives the tokens of a cold run, on every architecture, after an eviction or a restart."""

from pathlib import Path

import mlx.core as mx
import pytest

from architectures import KINDS, build
from onekv.config import Settings
from onekv.engine import Engine
from onekv.memory.plan import make_plan
from stock import engine_of
from test_prefix_exact import hits, run, tokens
from test_prefix_exact import make_engine as make_hot_engine

BLOCK = 16


@pytest.fixture(autouse=True)
def _plain_kernels():
    mx.disable_compile()
    yield
    mx.enable_compile()


def make_engine(model, folder: Path, **settings) -> Engine:
    values = {"kv_memory": "8MB", "block_size": BLOCK, "max_batch": 3, "prefill_chunk": 48, "disk_limit": "256MB"}
    return engine_of(model, disk_cache=str(folder), **{**values, **settings})


def restart(engine: Engine, model, folder: Path, **settings) -> Engine:
    engine.close()
    return make_engine(model, folder, **settings)


@pytest.mark.parametrize("name", KINDS)
def test_tokens_after_a_restart_equal_a_cold_run(name, tmp_path):
    model = build(name)
    cold = make_hot_engine(model, prefix_cache=False)
    hot = make_hot_engine(model)
    engine = make_engine(model, tmp_path)
    base = tokens(100, 1)
    (first,) = run(engine, [base])
    run(hot, [base])
    prompts = hits(base, first.tokens)
    restored = 0
    for kind, prompt in prompts.items():
        engine = restart(engine, model, tmp_path)
        (after,) = run(engine, [prompt])
        assert after.tokens == run(cold, [prompt])[0].tokens, kind
        (never_left,) = run(hot, [prompt])
        if kind in ("repeat", "continuation"):
            # What was in memory comes back, but for the part of a block that is not matched whole.
            assert after.cached_tokens >= never_left.cached_tokens // BLOCK * BLOCK, kind
        restored += after.cached_tokens
    assert restored > 100
    stats = engine.prefix.tiers[0].stats()
    assert stats.corrupt == stats.discarded == 0 and stats.failed is None
    engine.close()


def evicting(model, folder: Path, **settings) -> Engine:
    """An engine whose pool holds hardly more than one of the conversations below."""
    probe = make_plan(model, Settings(kv_memory="8MB", block_size=BLOCK, max_batch=1, prefill_chunk=48), None)
    per_token = sum(group.token_bytes for group in probe.layout.groups)
    size = max(1, per_token) * BLOCK * 16 + 12 * probe.layout.sequence_bytes
    return make_engine(model, folder, kv_memory=size, max_batch=1, **settings)


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "mamba2", "gpt_oss"])
def test_conversations_that_evict_each_other_stay_exact(name, policy, tmp_path):
    model = build(name)
    cold = make_hot_engine(model, prefix_cache=False)
    engine = evicting(model, tmp_path, disk_policy=policy)
    chats = [tokens(120, seed) for seed in (1, 2, 3)]
    cached = 0
    for turn in range(3):
        for index, chat in enumerate(chats):
            (request,) = run(engine, [chat])
            # What is still in the queue is not found.
            engine.prefix.tiers[0].flush()
            assert request.tokens == run(cold, [chat])[0].tokens, (turn, index)
            if turn:
                cached += request.cached_tokens
            chats[index] = chat + request.tokens + tokens(9, 10 * turn + index)
    assert engine.prefix.stats().evicted_blocks or not engine.memory.pools
    stats = engine.prefix.tiers[0].stats()
    assert stats.hits and stats.promoted_bytes and not stats.corrupt
    # Nearly all of every chat, in both later turns.
    assert cached > 5 * 112, (cached, stats)
    engine.close()
