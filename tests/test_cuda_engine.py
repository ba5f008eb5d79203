"""The engine as on a CUDA device, with its kernels run on the CPU: compiled steps, padding, RoPE in kernels, guesses.

MLX computes all else on the CPU, and a compiled function runs as it is written: kernels there run when they are called.
"""

import mlx.core as mx
import numpy as np
import pytest

from onekv.engine import Request, selftest
from onekv.memory import device
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


def test_what_logits_may_differ_by_covers_long_contexts():
    """Several tokens in a step are joined from other parts than one at a time, but only where there is much to read."""
    model = small_llama(6, num_hidden_layers=2, intermediate_size=64, num_key_value_heads=2, head_dim=128)
    model.set_dtype(mx.bfloat16)
    engine = engine_of(model, **SETTINGS)
    compiled, tolerance = engine.runner.compiled, engine.runner.several.tolerance
    apart = []
    for length, count in ((40, 5), (300, 3), (700, 9)):
        tokens = np.random.default_rng(length).integers(1, 100, length + count)
        alone, together = (
            selftest._after(model, engine.memory, tokens, length, counts, compiled) for counts in ([1] * count, [count])
        )
        apart.append(float(mx.abs(alone - together).max()))
    assert apart[0] < apart[-1] and 2 * max(apart) <= tolerance
