"""The engine as on a CUDA device, with its kernels run on the CPU: compiled steps, padding, RoPE in kernels, guesses.

MLX computes all else on the CPU, and a compiled function runs as it is written: kernels there run when they are called.
"""

import mlx.core as mx
import numpy as np
import pytest

from onekv.engine import Request, selftest
from onekv.memory import device, pairs
from onekv.memory.compiled import CompiledDecode
from onekv.memory.plan import plan, workspace
from onekv.models import joined
from proposers import Oracle, speculate
from stock import engine_of, small_llama, stock_logits

SETTINGS = {"kv_memory": "4MB", "max_batch": 4, "block_size": 16, "prefill_chunk": 64}


@pytest.fixture(autouse=True)
def like_cuda(cuda, monkeypatch):
    if not mx.cuda.is_available():
        for module in (device, plan, workspace):
            monkeypatch.setattr(module, "kind", lambda: "cuda")
        monkeypatch.setattr(joined, "on_cuda", lambda: True)
        monkeypatch.setattr(mx, "compile", lambda function: function)


@pytest.fixture(scope="module")
def model():
    made = small_llama(5, num_hidden_layers=2, intermediate_size=64, num_key_value_heads=2, head_dim=128)
    made.set_dtype(mx.float16)
    return made


def run(engine, prompts, count: int = 24) -> list[list[int]]:
    requests = [Request(prompt, count) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    return [request.tokens for request in requests]


def prompts_of(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(seed).integers(1, 100, length).tolist() for seed, length in enumerate(lengths)]


def test_answers_are_those_of_mlx_lm(model):
    engine = engine_of(model, speculate="off", **SETTINGS)
    assert isinstance(engine.runner.compiled, CompiledDecode), engine.runner.uncompiled
    assert not engine.memory.writes
    prompts = prompts_of(40, 23, 130)
    for prompt, answer in zip(prompts, run(engine, prompts), strict=True):
        logits = stock_logits(model, prompt + answer, len(prompt), 64)[len(prompt) - 1 : -1].astype(mx.float32)
        best = mx.take_along_axis(logits, mx.array(answer)[:, None], axis=-1)[:, 0]
        # Within what rounding to float16 may change.
        assert (logits.max(axis=-1) - best).max() < 0.02


@pytest.mark.parametrize(("lengths", "kv_format"), [((300,), "auto"), ((40, 23, 130), "auto"), ((40, 300), "k8v4")])
def test_guesses_change_nothing(model, lengths, kv_format):
    prompts = prompts_of(*lengths)
    plain = run(engine_of(model, speculate="off", kv_format=kv_format, **SETTINGS), prompts)
    engine = engine_of(model, kv_format=kv_format, **SETTINGS)
    assert engine.runner.several.why_not is None
    oracle = Oracle(0.8, 100)
    speculate(engine, oracle)
    requests = [Request(prompt, 24) for prompt in prompts]
    for request, answer in zip(requests, plain, strict=True):
        oracle.know(request, answer)
        engine.submit(request)
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    stats = engine.speculation.stats()
    assert [request.tokens for request in requests] == plain
    assert stats.accepted > 10 * len(prompts)


def apart(engine, length: int, count: int) -> float:
    """How far logits of `count` tokens in one step after `length` others are from those of one at a time."""
    tokens, runner = np.random.default_rng(length).integers(1, 100, length + count), engine.runner
    alone, together = (
        selftest._after(runner.model, engine.memory, tokens, length, counts, runner.compiled)
        for counts in ([1] * count, [count])
    )
    assert runner.compiled.exact
    return float(mx.abs(alone - together).max())


def model_in(dtype):
    made = small_llama(6, num_hidden_layers=2, intermediate_size=64, num_key_value_heads=2, head_dim=128)
    made.set_dtype(dtype)
    joined.fuse(made)
    return made


@pytest.mark.parametrize("kv_format", ["auto", "k8v4", "q4", "tq4"])
def test_several_tokens_in_a_step_are_exactly_those_of_one_at_a_time(kv_format):
    engine = engine_of(model_in(mx.bfloat16), kv_format=kv_format, **SETTINGS)
    assert engine.runner.several.exact == 64
    # In one block and over the edges of blocks and of pieces, in one tile of queries and in several.
    for length, count in ((40, 5), (299, 3), (510, 12), (700, 30)):
        assert apart(engine, length, count) == 0


def test_nothing_is_in_doubt_where_steps_are_exact():
    """Two tokens are always equally likely: by any tolerance, nothing could be told for sure."""
    model = model_in(mx.bfloat16)
    head = model.model.embed_tokens.weight
    model.model.embed_tokens.weight = mx.concatenate([head[:56], head[:56]])
    prompts = prompts_of(300, 70)
    plain = run(engine_of(model, speculate="off", **SETTINGS), prompts)
    engine, oracle = engine_of(model, **SETTINGS), Oracle(0.8, 100)
    speculate(engine, oracle)
    requests = [Request(prompt, 24) for prompt in prompts]
    for request, answer in zip(requests, plain, strict=True):
        oracle.know(request, answer)
        engine.submit(request)
    while not engine.idle:
        engine.step()
    stats = engine.speculation.stats()
    assert [request.tokens for request in requests] == plain
    assert stats.accepted > 20 and not stats.doubtful


def test_what_logits_may_differ_by_covers_long_contexts():
    """Read together, several tokens are joined from other parts than one at a time, but only where there is much to
    read."""
    engine = engine_of(model_in(mx.bfloat16), **SETTINGS)
    compiled, tolerance, found = engine.runner.compiled, engine.runner.several.tolerance, []
    for length, count in ((40, 5), (300, 3), (700, 9)):
        tokens = np.random.default_rng(length).integers(1, 100, length + count)
        how = (engine.runner.model, engine.memory, tokens, length)
        alone = selftest._after(*how, [1] * count, compiled)
        with pairs.reading_together():
            together = selftest._after(*how, [count], compiled)
        found.append(float(mx.abs(alone - together).max()))
    assert found[0] < found[-1] and 2 * max(found) <= tolerance
