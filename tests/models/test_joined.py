"""Products that share their input, joined: the same numbers in fewer products, and no weights twice."""

import gc

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import activations
from mlx_lm.models import llama as llama_module

from architectures import build
from onekv.cuda import products
from onekv.models import joined
from onekv.models.joined import Part, join_products
from onekv.traces import watching
from stock import small_llama, stock_logits


def llama(bits: int | None = None, **shape):
    model = small_llama(3, num_hidden_layers=3, intermediate_size=256, num_key_value_heads=2, head_dim=32, **shape)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        mx.eval(model.parameters())
    return model


def parameters(model) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def parts(model) -> list[str]:
    return sorted({name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, Part)})


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_the_numbers_are_those_of_the_products_apart(bits):
    model = llama(bits)
    tokens = list(range(1, 40))
    expected, size = stock_logits(model, tokens, 30, 30), parameters(model)
    # Of each layer's five products that share an input, two are left.
    assert join_products(model) == 3 * 3
    assert parts(model) == ["gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"]
    assert parameters(model) == size
    assert mx.abs(stock_logits(model, tokens, 30, 30) - expected).max() < 1e-4


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3_text", "deepseek_v3", "mixtral", "phi3", "qwen3_next"])
def test_other_models(name):
    model = build(name)
    tokens = list(range(1, 30))
    expected = stock_logits(model, tokens, 20, 20)
    join_products(model)
    assert mx.abs(stock_logits(model, tokens, 20, 20) - expected).max() < 1e-4


def test_while_a_model_is_watched_gate_and_up_are_one_launch(cuda, monkeypatch):
    monkeypatch.setattr(joined, "on_cuda", lambda: True)
    launches, launch = [], products.multiply
    monkeypatch.setattr(products, "multiply", lambda *given: launches.append(given) or launch(*given))
    model = llama()
    model.set_dtype(mx.bfloat16)
    join_products(model)
    tokens, stock = mx.array([[5], [7]]), llama_module.swiglu
    mx.eval(expected := model(tokens))
    # q, k and v, and gate and up, of each layer: then the latter twice, of which nobody needs the first.
    assert len(launches) == 2 * 3
    with watching():
        found = model(tokens)
        assert len(launches) == (2 + 3) * 3 and llama_module.swiglu is not stock
    assert mx.abs(found - expected).max() < 0.05 * mx.abs(expected).max()
    assert llama_module.swiglu is stock


def test_what_is_not_made_of_both_halves_stays_as_it_is(cuda, monkeypatch):
    monkeypatch.setattr(joined, "on_cuda", lambda: True)
    model = llama()
    model.set_dtype(mx.bfloat16)
    join_products(model)
    mlp, x = model.layers[0].mlp, mx.random.normal((2, 1, 64)).astype(mx.bfloat16)
    with watching():
        gate, up = mlp.gate_proj(x), mlp.up_proj(x + 1)
        for one, other in ((gate, up), (gate, gate), (up, gate * 2)):
            assert mx.array_equal(llama_module.swiglu(one, other), activations.swiglu(one, other))
        # Whichever is called first.
        up, gate = mlp.up_proj(x), mlp.gate_proj(x)
        assert mx.allclose(llama_module.swiglu(gate, up), activations.swiglu(gate, up), rtol=0.02, atol=1e-3)
        assert mx.allclose(llama_module.swiglu(up, gate), activations.swiglu(up, gate), rtol=0.02, atol=1e-3)


def test_only_two_parts_are_halves(cuda, monkeypatch):
    """With as many queries' columns as those of keys and values together, queries are half of a product, too."""
    monkeypatch.setattr(joined, "on_cuda", lambda: True)
    model = small_llama(3, num_hidden_layers=1, intermediate_size=64, num_key_value_heads=4, head_dim=32)
    model.set_dtype(mx.bfloat16)
    join_products(model)
    attention, mlp, x = model.layers[0].self_attn, model.layers[0].mlp, mx.ones((2, 1, 64), mx.bfloat16)
    with watching() as noted:
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
            assert noted.half(layer(x)) is None
        assert noted.half(mlp.gate_proj(x)) is not None


def test_a_part_that_is_called_alone_or_with_something_else_is_right():
    model = llama()
    attention = model.layers[0].self_attn
    weights = [attention.q_proj.weight, attention.k_proj.weight]
    join_products(model)
    x, y = mx.random.normal((1, 2, 64)), mx.random.normal((1, 2, 64))
    for _ in range(2):
        assert mx.allclose(attention.q_proj(x), x @ weights[0].T, atol=1e-5)
        assert mx.allclose(attention.k_proj(y), y @ weights[1].T, atol=1e-5)
        assert mx.allclose(attention.k_proj(x), x @ weights[1].T, atol=1e-5)
    assert mx.array_equal(attention.k_proj.weight, weights[1])


def test_no_more_than_one_layer_is_there_twice():
    model = llama(vocab_size=64, hidden_size=512)
    size = parameters(model)
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    join_products(model)
    gc.collect()
    assert abs(mx.get_active_memory() - before) < size // 100
    assert mx.get_peak_memory() - before < size // 3


def test_nothing_of_a_step_is_kept():
    model = llama()
    join_products(model)
    mx.eval(model(mx.array([[1, 2, 3]])))
    joints = [module._joint for module in model.modules() if isinstance(module, Part)]
    assert joints and all(joint._input is None and not joint._outputs for joint in joints)
