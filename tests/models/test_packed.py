"""Weights of quantized files on CPU stay packed, and give what unpacked ones give."""

import gc

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from architectures import build
from onekv import LLM, loops
from onekv.memory.plan.workspace import weight_bytes
from onekv.models import load_model
from onekv.models.packed import MOST, PackedEmbedding, PackedLinear, gated, is_eager, keep_packed
from stock import small_llama


def pair(bits, bias=True):
    """A model whose layers are packed, and one with the same weights unpacked."""
    model = nn.Sequential(nn.Linear(64, 96, bias=bias), nn.Linear(96, 64, bias=bias))
    nn.quantize(model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    plain = nn.Sequential(*(nn.Linear(1, 1, bias=bias) for _ in range(2)))
    for layer, stock in zip(plain.layers, model.layers, strict=True):
        layer.weight = mx.dequantize(stock.weight, stock.scales, stock.biases, group_size=32, bits=bits)
        if bias:
            layer.bias = stock.bias
    keep_packed(model)
    return model, plain


@pytest.mark.parametrize("rows", [1, MOST, MOST + 1, 200])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_layers_give_what_plain_ones_give(bits, rows):
    model, plain = pair(bits)
    assert [type(layer) for layer in model.layers] == [PackedLinear if bits > 2 else nn.Linear] * 2
    x = mx.random.normal((1, rows, 64))
    assert mx.abs(model(x) - plain(x)).max() < 1e-4
    assert is_eager(model) is (bits > 2)


def test_layers_do_not_overwrite_what_another_has_given():
    """They share the buffer that weights are unpacked into."""
    model, plain = pair(4)
    x = mx.random.normal((1, 50, 64))
    first = model.layers[0](x)
    second = model.layers[1](first)
    again = model.layers[0](x + 1)
    assert mx.abs(first - plain.layers[0](x)).max() < 1e-4
    assert mx.abs(second - plain(x)).max() < 1e-4
    assert mx.abs(again - plain.layers[0](x + 1)).max() < 1e-4


def test_logits_of_a_prompt_are_not_computed():
    embedding = nn.Embedding(2000, 64)
    model = nn.Sequential(nn.QuantizedEmbedding.from_embedding(embedding, 32, 4))
    keep_packed(model)
    table = model.layers[0]
    assert type(table) is PackedEmbedding
    mx.eval(table.parameters())
    before = mx.get_active_memory()
    logits = table.as_linear(mx.zeros((1, 500, 64)))
    assert logits.shape == (1, 500, 2000) and mx.get_active_memory() - before < 10**6
    few = mx.random.normal((1, 2, 64))
    weight = mx.dequantize(table.weight, table.scales, table.biases, group_size=32, bits=4)
    assert mx.abs(table.as_linear(few) - few @ weight.T).max() < 1e-4
    assert mx.array_equal(table(mx.array([[5, 7]])), weight[mx.array([[5, 7]])])


def test_smollm2_is_little_larger_than_its_file(smollm2_path):
    gc.collect()
    before = mx.get_active_memory()
    packed = load_model(str(smollm2_path), packed=True).model
    size = smollm2_path.stat().st_size
    assert weight_bytes(packed) < 1.6 * size
    assert mx.get_active_memory() - before < 1.6 * size
    tokens = mx.array([[1, 400, 7000]])
    logits = packed(tokens)
    del packed
    plain = load_model(str(smollm2_path)).model
    assert weight_bytes(plain) > 5 * size
    expected = plain(tokens)
    assert mx.abs(logits - expected).max() < 1e-3 * expected.std()


def test_without_numba_weights_are_unpacked(smollm2_path, monkeypatch):
    monkeypatch.setattr(loops, "why_not", lambda: "numba is not installed")
    model = load_model(str(smollm2_path), packed=True, lazy=True).model
    assert not is_eager(model) and not any(isinstance(module, nn.QuantizedLinear) for module in model.modules())


def test_other_dtypes_are_unpacked(smollm2_path):
    model = load_model(str(smollm2_path), dtype="bfloat16", packed=True, lazy=True).model
    assert not is_eager(model)


def test_a_packed_model_gives_the_tokens_of_an_unpacked_one(monkeypatch):
    """In an engine, also where the model cannot be looped and its layers are computed one by one."""
    model, plain = (small_llama(5, num_hidden_layers=2, intermediate_size=128) for _ in range(2))
    for one in (model, plain):
        nn.quantize(one, group_size=32, bits=8)
    keep_packed(model)
    prompts = [np.random.default_rng(seed).integers(0, 128, 40).tolist() for seed in range(3)]
    wanted = [one.tokens for one in LLM(plain, kv_memory="4MiB").generate(prompts, max_tokens=12)]
    llm = LLM(model, kv_memory="4MiB")
    assert llm.engine.runner.eager and llm.engine.runner.compiled is not None
    assert [one.tokens for one in llm.generate(prompts, max_tokens=12)] == wanted
    llm.engine.runner.compiled = None
    assert [one.tokens for one in llm.generate(prompts, max_tokens=12)] == wanted


def test_a_model_with_parts_from_the_module_of_the_activation_leaves_it_usable():
    """gpt_oss has one: its activation was replaced by one that called itself, for all models loaded later."""
    keep_packed(build("gpt_oss"))
    keep_packed(build("llama"))
    gates, values = mx.random.normal((2, 4, 8))
    assert mx.allclose(gated(gates, values), nn.silu(gates) * values)
