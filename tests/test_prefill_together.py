"""Several prompts stored in one pass: what they become is what each would be alone, and memory stays as planned."""

import gc
import random
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from architectures import build
from onekv.config import Settings
from onekv.engine import Request
from onekv.engine.params import Sampling
from onekv.engine.runner import Runner
from onekv.memory.plan import make_plan
from onekv.memory.plan.workspace import SCORES, fits_pass
from onekv.memory.pool.table import blocks_needed
from stock import engine_of, small_llama

CHUNK = 256
# Beside each other some, and some not: padding would be too much, or the pass too large.
LENGTHS = (30, 33, 37, 41, 100, 90, 120, 2, 3, 1)


class Recorded(Runner):
    """Keeps the rows of every pass: tokens stored before, and new ones."""

    def __init__(self, model, memory, max_batch, together=True):
        super().__init__(model, memory, max_batch, together)
        self.passes = []

    def store(self, sequences, tokens):
        rows = [(sequence.length, len(row)) for sequence, row in zip(sequences, tokens, strict=True)]
        super().store(sequences, tokens)
        self.passes.append(rows)


def make(model, together=True, **settings):
    settings = {"kv_memory": "8MB", "block_size": 16, "max_batch": 16, "prefill_chunk": CHUNK} | settings
    return engine_of(model, make_runner=partial(Recorded, together=together), **settings)


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 90) for _ in range(length)]


def run(engine, prompts, max_tokens=5) -> list[Request]:
    requests = [Request(tokens, max_tokens, sampling=Sampling(logprobs=0)) for tokens in prompts]
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    return requests


def same(ours: list[Request], theirs: list[Request], tolerance: float = 1e-4) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.error is None and mine.tokens == other.tokens
        numbers = [[entry.logprob for entry in request.logprobs] for request in (mine, other)]
        np.testing.assert_allclose(*numbers, atol=tolerance)


def check_passes(engine) -> None:
    """Each within a planned chunk, its padding at most a quarter."""
    for rows in engine.runner.passes:
        counts = [count for _, count in rows]
        size = len(counts) * max(counts)
        assert size <= engine.plan.prefill_chunk
        assert 4 * (size - sum(counts)) <= size


@pytest.mark.parametrize(
    "name",
    ["llama", "qwen3_moe", "deepseek_v3", "minicpm3", "gemma3n", "gemma3_text", "gpt_oss", "cohere2", "deepseek_v32"],
)
def test_prompts_stored_together_give_what_each_gives_alone(name):
    """Full attention, windows, sinks, latent attention; first chunks, and later ones after what is cached."""
    model = build(name)
    engine, alone = make(model), make(model, together=False, max_batch=1)
    assert engine.runner.together
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    answers = run(engine, prompts)
    same(answers, run(alone, prompts))
    assert max(map(len, engine.runner.passes)) >= 4
    check_passes(engine)
    # The next turns: of what is new, as many tokens for all, or nearly.
    engine.runner.passes.clear()
    turns = [request.all_tokens + prompt(20 + seed % 3, 50 + seed) for seed, request in enumerate(answers)]
    same(run(engine, turns), run(make(model, together=False, max_batch=1, prefix_cache=False), turns))
    assert any(len(rows) > 1 and min(rows)[0] > 0 and min(rows) != max(rows) for rows in engine.runner.passes)
    check_passes(engine)


@pytest.mark.parametrize("name", ["mamba", "qwen3_next", "llama4", "gemma2", "minimax_m3_vl"])
def test_models_whose_rows_cannot_be_together_store_them_one_by_one(name):
    """Recurrent states, chunks, and models that need a plain position."""
    model = build(name)
    engine = make(model)
    assert not engine.runner.together
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS[:5])]
    same(run(engine, prompts), run(make(model, together=False, max_batch=1), prompts))
    assert all(len(rows) == 1 for rows in engine.runner.passes)


@pytest.mark.parametrize("settings", [{"kv_format": "q8"}, {"kv_format": "tq4", "kv_plain_layers": 1}], ids=str)
def test_formats_too(settings):
    """Layers of one group may be stored in different ways, and share a mask."""
    model = small_llama(3, num_hidden_layers=3, intermediate_size=64, num_key_value_heads=2, head_dim=32)
    engine, alone = make(model, **settings), make(model, together=False, max_batch=1, **settings)
    assert engine.runner.together
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    same(run(engine, prompts), run(alone, prompts), 1e-3)
    assert max(map(len, engine.runner.passes)) >= 4


@pytest.fixture(scope="module")
def model():
    return small_llama(5, num_hidden_layers=2, intermediate_size=64, num_key_value_heads=2, head_dim=16)


def test_on_cpu_prompts_are_stored_one_by_one_unless_told_otherwise(model):
    if mx.default_device() == mx.cpu:
        assert not engine_of(model, kv_memory="4MB").runner.together
    assert make(model).runner.together
    assert not make(model, max_batch=1).runner.together


def test_chunks_join_in_their_order_while_they_fit(model):
    engine = make(model)
    run(engine, [prompt(length + 1, length) for length in (200, 60, 62, 100, 64, 61, 300)])
    # The shortest first; a fifth row of 100 would be too much for 256. The long one's last 44 find nobody left.
    counts = [[count for _, count in rows] for rows in engine.runner.passes]
    assert counts == [[60, 61, 62, 64], [100], [200], [256], [44]]


def test_padding_is_at_most_a_quarter(model):
    engine = make(model)
    run(engine, [prompt(length + 1, length) for length in (40, 80, 81, 41)])
    counts = [[count for _, count in rows] for rows in engine.runner.passes]
    assert counts == [[40, 41], [80, 81]]


def test_who_has_all_but_its_last_token_cached_starts_at_once(model):
    engine = make(model)
    prompts = [prompt(40, seed) for seed in range(5)]
    run(engine, prompts, 1)
    engine.runner.passes.clear()
    again = [Request(tokens, 3) for tokens in prompts]
    for request in [*again, Request(prompt(50, 9), 3)]:
        engine.submit(request)
    engine.step()
    assert {request.state for request in again} == {"running"}
    assert engine.runner.passes == [[(0, 49)]]


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_who_waits_for_what_another_stores_is_not_stored_beside_it(model, kernels):
    engine = make(model, kernels=kernels)
    common = prompt(80, 1)
    requests = run(engine, [common, [*common, 5], [*common[:70], 6, 7], prompt(81, 2)])
    first, *others = engine.runner.passes
    assert first == [(0, 79), (0, 80)]
    # Of what is common nothing is stored twice.
    assert all(start >= 64 for rows in others for start, _ in rows)
    # The last block of the one that is waited for is there a step later where steps are not compiled.
    cached = [0, 80, 70, 0] if engine.runner.compiled is not None else [0, 64, 64, 0]
    assert [request.cached_tokens for request in requests] == cached


def test_rows_that_share_a_prefix_are_read_within_the_planned_workspace(model):
    """Each row of a pass is a copy of what it reads, shared or not: as many as one layer of the pool has blocks for."""
    engine = make(model, kv_memory="1MB", max_batch=8)
    blocks = engine.plan.blocks[0]
    system = prompt(16 * (blocks // 3), 1)
    run(engine, [system], 1)
    engine.runner.passes.clear()
    run(engine, [[*system, *prompt(20, seed)] for seed in range(6)], 2)
    passes = engine.runner.passes
    assert max(map(len, passes)) == 2
    for rows in passes:
        longest = max(start + count for start, count in rows)
        assert len(rows) * -(-longest // 16) <= blocks


def test_scores_and_windows_bound_a_pass():
    layout = make_plan(build("gemma3_text"), Settings(kv_memory="8MB", block_size=16), None).layout
    blocks = tuple(100_000 for _ in layout.groups)

    def fits(lengths, counts, blocks=blocks):
        return fits_pass(layout, blocks, 16, 2048, lengths, counts)

    assert fits([0] * 8, [256] * 8) and not fits([0] * 8, [257] * 8)
    # One token more of what is read than the scores of 2,048 queries may take.
    most = SCORES // (layout.query_heads * 2048 * 8)
    assert fits([most - 256] * 8, [256] * 8) and not fits([most - 255] * 8, [256] * 8)
    # A window reads no more than its own blocks, however long the sequence is.
    window = next(number for number, group in enumerate(layout.groups) if group.rule.span is not None)
    needed = 4 * blocks_needed(layout.groups[window].rule, 16, 10_000, 16)
    for count in (needed, needed - 1):
        narrow = tuple(count if number == window else 10_000 for number in range(len(blocks)))
        assert fits([8000] * 4, [16] * 4, narrow) == (count == needed)


def test_a_pass_takes_no_more_memory_than_planned(model):
    engine = make(model, kv_memory="16MB", max_batch=32)
    buffers = [np.array(array, copy=False).ctypes.data for pool in engine.memory.pools for array in pool.arrays()]
    run(engine, [prompt(60 + seed, seed) for seed in range(8)], 1)
    gc.collect()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    run(engine, [prompt(60 + seed % 5, 100 + seed) for seed in range(32)], 1)
    assert max(map(len, engine.runner.passes)) >= 4
    # Without the part that the plan sets aside for scores of long contexts: the bound would say nothing here.
    scores = engine.plan.layout.query_heads * CHUNK * 64 * 4 * 4
    assert mx.get_peak_memory() - before <= engine.plan.workspace - SCORES + scores
    assert mx.get_active_memory() - before < 2**20
    after = [np.array(array, copy=False).ctypes.data for pool in engine.memory.pools for array in pool.arrays()]
    assert after == buffers


def test_a_pass_that_fails_ends_its_own_rows_and_nobody_else(model):
    engine = make(model)
    expected = run(make(model, together=False), [prompt(10, 1), prompt(200, 2)], 30)
    talker = Request(prompt(10, 1), 30)
    engine.submit(talker)
    engine.step()
    stock = engine.runner.model

    def fails(inputs, cache):
        if inputs.shape[0] > 1 and inputs.shape[1] > 1:
            raise ValueError("the pass failed")
        return stock(inputs, cache=cache)

    engine.runner.model = fails
    long, *others = [Request(prompt(length, seed), 30) for seed, length in enumerate((200, 40, 41, 42), 2)]
    for request in (*others, long):
        engine.submit(request)
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    assert [request.finish_reason for request in others] == ["error"] * 3
    assert [talker.tokens, long.tokens] == [request.tokens for request in expected]
    # What was computed by them is forgotten.
    engine.runner.model = stock
    assert run(engine, [others[0].prompt])[0].cached_tokens == 0


def test_who_finds_no_room_ends_alone(model):
    engine = make(model)
    prompts = [prompt(40, seed) for seed in range(4)]
    expected = run(make(model, together=False), prompts)
    requests = [Request(tokens, 5) for tokens in prompts]
    for request in requests:
        engine.submit(request)
    while (request := engine.scheduler.to_admit()) is not None:
        engine._admit(request)

    def raises(count):
        raise ValueError("no room")

    requests[1].lease.grow = raises
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    assert engine.runner.passes == [[(0, 39)] * 3]
    assert requests[1].finish_reason == "error"
    assert [r.tokens for r in requests if r is not requests[1]] == [
        r.tokens for number, r in enumerate(expected) if number != 1
    ]


@pytest.mark.skipif(not mx.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("lengths", [[2], [2, 2, 2], [18, 130, 130]], ids=str)
def test_a_chunk_of_one_token_is_stored_where_kernels_store(lengths):
    """Kernels write when their output is computed, and nobody asks for that of a prompt."""
    model = small_llama(5, num_hidden_layers=2, intermediate_size=64, num_key_value_heads=2, head_dim=64)
    model.set_dtype(mx.bfloat16)
    engine = make(model, prefill_chunk=128 + 16)
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    if lengths[0] > 2:
        # After a hit one token is left to store.
        run(engine, [tokens[:-2] for tokens in prompts], 1)
    for tokens, request in zip(prompts, run(engine, prompts, 1), strict=True):
        logits = model(mx.array([tokens]))[0, -1].astype(mx.float32)
        expected = logits - mx.logsumexp(logits)
        assert abs(request.logprobs[0].logprob - float(expected.max())) < 0.05
