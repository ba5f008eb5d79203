"""Memory is a flat line: the pool's arrays keep their buffers, and a step leaves nothing behind."""

import weakref

import mlx.core as mx
import numpy as np
import pytest

from onekv.config import Settings
from onekv.engine import Engine, Request
from onekv.memory.attention import layer
from onekv.memory.plan import make_plan
from stock import small_llama

PROMPT, DECODED = 1500, 600


def make_engine(layer_count: int, **settings) -> Engine:
    """A random model whose pool is far larger than what a step computes."""
    model = small_llama(1, num_hidden_layers=layer_count, intermediate_size=128, num_key_value_heads=4, head_dim=32)
    # One token a step.
    resolved = Settings(**{"kv_memory": "200MB", "max_batch": 4, "speculate": "off", **settings})
    return Engine(model, make_plan(model, resolved, None), set(), resolved)


def addresses(engine: Engine) -> list[int]:
    mx.eval(engine.memory.arrays())
    pools = [arrays for pool in engine.memory.pools for arrays in pool.layers]
    return [np.array(a, copy=False).ctypes.data for arrays in pools for a in (arrays.k, arrays.v)]


def run(engine: Engine, requests: list[Request]) -> list[int]:
    """Active memory after every step that decodes."""
    for request in requests:
        engine.submit(request)
    active = []
    while not engine.idle:
        engine.step()
        if not engine.scheduler.waiting and not engine.scheduler.prefilling:
            active.append(mx.get_active_memory())
    return active


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 128, length).tolist()


# Few layers, where a step is over before the next is built, and many.
@pytest.mark.parametrize("layer_count", [4, 26])
def test_active_memory_is_flat_while_decoding(layer_count):
    engine = make_engine(layer_count)
    pool = engine.memory.pools[0]
    before = addresses(engine)
    active = run(engine, [Request(random_prompt(PROMPT), DECODED)])
    workspace = engine.plan.layout.groups[0].layers[0].token_bytes * (PROMPT + DECODED)
    assert len(active) >= DECODED
    assert max(active) - min(active) < workspace + pool.block_bytes
    assert addresses(engine) == before
    engine.check_integrity()


@pytest.mark.parametrize("layer_count", [4, 26])
def test_a_batch_peaks_far_below_a_second_copy(layer_count):
    engine = make_engine(layer_count)
    before = addresses(engine)
    base = mx.get_active_memory()
    mx.reset_peak_memory()
    run(engine, [Request(random_prompt(300 + 50 * i, i), 40) for i in range(4)])
    one_layer = engine.memory.pools[0].nbytes // layer_count
    scores = engine.plan.layout.query_heads * 512 * 512 * 4 * 3
    assert mx.get_peak_memory() - base < one_layer // 2 + scores
    assert mx.get_active_memory() <= base + 2**20
    assert addresses(engine) == before


def test_memory_is_flat_past_max_kv_size():
    engine = make_engine(4, max_kv_size=256, prefill_chunk=64)
    before = addresses(engine)
    active = run(engine, [Request(random_prompt(700), 300)])
    assert max(active) - min(active) < engine.memory.pools[0].block_bytes
    assert addresses(engine) == before


def test_a_write_that_is_not_in_place_is_noticed(monkeypatch):
    """The tests above can fail: a slice that outlives its step makes the next write copy the pool."""
    engine = make_engine(4)
    # By operations of MLX; what loops write, nothing can make a copy of.
    engine.runner.compiled, engine.runner.eager = None, False
    before = addresses(engine)
    pinned = []
    write = layer.write

    def pinning_write(step, pool, new):
        written = write(step, pool, new)
        pinned.append(written[:, :1])
        return written

    monkeypatch.setattr(layer, "write", pinning_write)
    run(engine, [Request(random_prompt(40), 8)])
    assert addresses(engine) != before


class Cycle:
    def __init__(self) -> None:
        self.array, self.itself = mx.zeros(1000), self


@pytest.fixture(scope="module")
def garbage():
    """What an earlier test may leave behind: made before anything that belongs to one test alone."""
    return weakref.ref(Cycle())


def test_garbage_of_earlier_tests_is_not_counted(garbage):
    """Freed in the midst of a test, it would be taken for something that the test has freed."""
    assert garbage() is None


def test_the_plan_covers_what_a_run_peaks_at():
    # What other tests of this process hold.
    others = mx.get_active_memory()
    engine = make_engine(8, prefill_chunk=512)
    mx.reset_peak_memory()
    run(engine, [Request(random_prompt(3000, i), 10) for i in range(3)])
    plan = engine.plan
    assert mx.get_peak_memory() - others < plan.total
    assert plan.pool_bytes <= plan.budget


def test_closed_engine_returns_all_memory():
    base = mx.get_active_memory()
    engine = make_engine(4)
    run(engine, [Request(random_prompt(100), 10)])
    assert mx.get_active_memory() > base + 150 * 10**6
    del engine
    assert mx.get_active_memory() < base + 10**6
