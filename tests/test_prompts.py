"""Loops that prompts need beside products: weights of scores, gated activations, attention of a chunk."""

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models import activations, llama

from onekv import loops
from onekv.loops import prompts
from onekv.memory.attention.chunk import chunk_attention
from onekv.models.packed import gated, keep_packed
from stock import small_llama


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "tokens", "length"), [(1, 1, 1), (3, 5, 5), (2, 7, 3000), (2, 64, 100)])
def test_weights_are_those_of_a_softmax(heads, tokens, length, causal):
    scores = np.random.default_rng(length).normal(size=(heads, 3 * tokens, length)).astype(np.float32) * 30
    array = mx.array(scores)
    sums = prompts.weigh(array, tokens, causal)
    seen = length - tokens + np.arange(3 * tokens) % tokens + 1 if causal else np.full(3 * tokens, length)
    hidden = np.arange(length) >= seen[:, None]
    expected = np.where(hidden, -np.inf, scores.astype(np.float64))
    expected = np.exp2(expected - expected.max(axis=-1, keepdims=True))
    weights = np.array(array)
    assert (weights[:, hidden] == 0).all()
    assert np.abs(weights - expected).max() < 1e-6
    assert np.allclose(np.array(sums)[..., 0], expected.sum(axis=-1), rtol=1e-5)


def test_what_is_not_a_number_is_not_hidden():
    scores = mx.array([[1.0, float("nan"), 2.0], [1.0, 2.0, 3.0]])
    sums = prompts.weigh(scores, 2, causal=False)
    assert np.isnan(np.array(sums)[0, 0]) and np.isfinite(np.array(sums)[1, 0])
    # Infinite scores give what is not a number in MLX, too.
    assert not np.isfinite(np.array(prompts.weigh(mx.array([[float("inf"), 1.0]]), 1, causal=False))).all()


def test_gated_activations():
    gates = mx.random.normal((2, 700, 3)) * 20
    gates[0, :3, 0] = mx.array([-1e30, 1e30, 0.0])
    values = mx.random.normal((2, 700, 3))
    out, expected = prompts.gate(gates, values), nn.silu(gates) * values
    assert mx.allclose(out, expected, rtol=1e-5, atol=1e-6)
    assert mx.isnan(prompts.gate(mx.array([float("nan")]), mx.array([1.0]))).item()


@pytest.mark.parametrize(("tokens", "length"), [(512, 512), (40, 1500), (1, 9), (300, 2000)])
def test_chunks_attend_as_without_loops(tokens, length, monkeypatch):
    queries = mx.random.normal((1, 6, tokens, 32))
    keys, values = (mx.random.normal((1, 2, length, 32)) for _ in range(2))
    by_loops = chunk_attention(queries, keys, values, 0.2, "causal")
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.2, mask="causal")
    assert mx.abs(by_loops - expected).max() < 1e-5
    monkeypatch.setattr(loops, "why_not", lambda: "no")
    assert mx.abs(chunk_attention(queries, keys, values, 0.2, "causal") - expected).max() < 1e-5


def test_mlx_lms_activation_is_its_own_for_what_packed_layers_have_not_given(monkeypatch):
    model = small_llama(3, num_hidden_layers=1, intermediate_size=64)
    nn.quantize(model, group_size=32, bits=4)
    tokens = mx.array([[5] * 40])
    expected = model(tokens)
    keep_packed(model)
    assert llama.swiglu is gated
    calls = []
    gate = prompts.gate
    monkeypatch.setattr(prompts, "gate", lambda *both: calls.append(1) or gate(*both))
    assert mx.abs(model(tokens) - expected).max() < 1e-3 and len(calls) == 1
    # A program of the user's own may take gradients through it.
    a, b = mx.random.normal((9, 4)), mx.random.normal((9, 4))
    gradient = mx.grad(lambda a: llama.swiglu(a, b).sum())(a)
    assert mx.allclose(gradient, mx.grad(lambda a: activations.swiglu(a, b).sum())(a)) and len(calls) == 1
