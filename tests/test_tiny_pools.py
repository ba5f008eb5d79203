"""The smallest pool that a plan allows loads and serves what fits into it; one byte less is refused by the plan."""

import mlx.core as mx
import numpy as np
import pytest

from architectures import VOCAB, build
from onekv.config import Settings
from onekv.engine import Engine, Request
from onekv.errors import MemoryBudgetError, TooLongError
from onekv.memory.plan import make_plan
from stock import engine_of

# Full attention, windows, sinks, chunks, latent, recurrent, composite; and one whose rows must be decoded one by one.
NAMES = ["llama", "gemma3_text", "gpt_oss", "llama4", "deepseek_v3", "mamba2", "qwen3_next", "falcon_h1", "gemma2"]
SHAPES = [
    {"block_size": 16, "max_batch": 1, "prefill_chunk": 48},
    {"block_size": 16, "max_batch": 3, "prefill_chunk": 5},
    {"block_size": 1, "max_batch": 2, "prefill_chunk": 1},
    {"block_size": 4, "max_batch": 2, "prefill_chunk": 5, "max_kv_size": 5},
    {"block_size": 1, "max_batch": 1, "prefill_chunk": 1, "max_kv_size": 20},
    {"block_size": 4, "max_batch": 2, "prefill_chunk": 48, "prefix_cache": False},
]


@pytest.fixture(autouse=True)
def _plain_kernels():
    mx.disable_compile()
    yield
    mx.enable_compile()


def least_budget(model, **settings) -> int:
    """The smallest `kv_memory` that makes a plan."""
    low, high = 0, 2**24
    while high - low > 1:
        middle = (low + high) // 2
        try:
            make_plan(model, Settings(kv_memory=middle, **settings), None)
        except MemoryBudgetError as error:
            assert "--kv-memory is " in str(error)
            low = middle
        else:
            high = middle
    return high


def generated(engine: Engine, prompts: list[list[int]], count: int) -> list[list[int]]:
    requests = [Request(prompt, count) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()
    engine.check_integrity()
    assert [request.error for request in requests] == [None] * len(requests)
    return [request.tokens for request in requests]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_pool_serves_what_it_holds(name, shape):
    model = build(name)
    least = least_budget(model, **shape)
    engine = engine_of(model, kv_memory=least, **shape)
    # The last token generated is not kept.
    longest = min(engine.plan.longest, 30)
    count = min(4, longest)
    prompts = [np.random.default_rng(seed).integers(1, VOCAB, longest - count + 1).tolist() for seed in range(3)]
    expected = generated(engine_of(model, **{**shape, "kv_memory": "16MB", "max_batch": 1}), prompts, count)
    assert generated(engine, prompts, count) == expected
    if engine.plan.longest < 2**62:
        with pytest.raises(TooLongError, match="raise --kv-memory"):
            engine.submit(Request([1] * (engine.plan.longest + 1), 1))
