"""Centres of keys: what is taken off is put back exactly, whichever way scores are made, and how they are found."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from architectures import build
from onekv.memory.formats import parse
from onekv.memory.formats.centre import Centre, Rope
from onekv.memory.layout.calibration import centred
from onekv.memory.layout.fingerprint import stored_as
from onekv.memory.layout.reader import read_layout
from onekv.memory.layout.stored import encoded
from stock import CALIBRATION, small_llama

HEADS, DIM = 3, 32
ROPES = {
    "none": Rope(),
    "halves": Rope(DIM, False, 10000.0),
    "neighbours": Rope(DIM, True, 500.0, 0.5),
    "part": Rope(16, False, 10000.0),
    "freqs": Rope(24, True, None, 1.0, tuple(1.7**i for i in range(12))),
}


@pytest.fixture(params=ROPES.values(), ids=ROPES.keys())
def centre(request) -> Centre:
    mx.random.seed(3)
    return Centre(mx.random.normal((HEADS, DIM)) * 3, request.param, "here")


def test_a_centre_is_the_mean_turned_by_its_position_and_nothing_at_the_first(centre):
    rows = centre.rows(0, 1, 50)
    assert not rows[:, :, 0].any()
    x = mx.contiguous(mx.broadcast_to(centre.mean[None, :, None], (1, HEADS, 50, DIM)))
    rope = centre.rope
    if rope.dims:
        freqs = mx.array(rope.freqs) if rope.freqs else None
        keywords = {"traditional": rope.traditional, "base": rope.base, "scale": rope.scale, "freqs": freqs}
        x = mx.fast.rope(x, rope.dims, offset=0, **keywords)
    assert mx.array_equal(rows[:, :, 1:], x[:, :, 1:])


def test_a_row_has_the_same_centre_however_it_is_asked_for(centre):
    whole = centre.rows(0, 1, 96)
    assert mx.array_equal(centre.rows(37, 1, 20), whole[:, :, 37:57])
    blocks = centre.rows(mx.array([0, 32, 64]), 3, 32)
    assert mx.array_equal(blocks.swapaxes(0, 1).reshape(whole.shape), whole)
    assert mx.array_equal(
        centre.rows(mx.array([5, 0, 80]), 3, 1)[:, :, 0], whole[0][:, mx.array([5, 0, 80])].swapaxes(0, 1)
    )


def test_products_with_centres_are_products_of_factors_with_the_table(centre):
    queries = mx.random.normal((HEADS, 4, DIM))
    table = centre.rope.table(DIM, 0, 1, 200)[0]
    products = centre.factors(queries) @ table.T
    wanted = queries @ centre.rows(0, 1, 200)[0].swapaxes(1, 2)
    assert mx.allclose(products, wanted, rtol=1e-4, atol=1e-3)


def test_angles_are_those_of_the_table(centre):
    first, second = centre.rope.all_pairs(DIM)
    assert sorted([*first, *second]) == list(range(DIM))
    assert mx.array_equal(centre.paired, centre.mean[:, mx.array([*first.tolist(), *second.tolist()])])
    turned = np.arange(1, 200)[:, None] * centre.rope.angles(DIM)
    table = np.array(centre.rope.table(DIM, 0, 1, 200)[0])[1:]
    turning = centre.rope.dims // 2
    assert np.allclose(table[:, first], np.cos(turned), atol=1e-4)
    assert np.allclose(table[:, second[:turning]], np.sin(turned)[:, :turning], atol=1e-4)


def layout_of(model, name):
    return encoded(read_layout(model), parse(name), 0)


def test_the_centre_is_the_mean_of_the_keys_before_rope():
    model = small_llama(5, num_hidden_layers=2, intermediate_size=64, num_key_value_heads=2, head_dim=64)
    layers = centred(layout_of(model, "q4"), model, CALIBRATION).groups[0].layers
    attention = model.layers[0].self_attn
    x = model.layers[0].input_layernorm(model.model.embed_tokens(mx.array(CALIBRATION)[None]))
    keys = attention.k_proj(x).reshape(1, -1, 2, 64).swapaxes(1, 2)
    assert mx.allclose(layers[0].centre.mean, keys[0, :, 1:].mean(axis=1), atol=1e-5)
    assert layers[0].centre.rope == Rope(64, False, 10000, 1.0)
    caches = make_prompt_cache(model)
    model(mx.array(CALIBRATION)[None], cache=caches)
    away = caches[1].keys[:, :, : len(CALIBRATION)] - layers[1].centre.rows(0, 1, len(CALIBRATION))
    before = mx.fast.rope(away[:, :, 1:], 64, traditional=False, base=10000, scale=-1.0, offset=1)
    assert mx.abs(before.mean(axis=2)).max() < 1e-5


def test_keys_that_no_rope_turned_have_the_mean_of_what_is_stored():
    """Latent attention stores what is turned and what is not apart."""
    model = build("deepseek_v3")
    layers = [layer for g in centred(layout_of(model, "tq4"), model, CALIBRATION).groups for layer in g.layers]
    assert {layer.centre.rope.dims for layer in layers} == {0}


@pytest.mark.parametrize("name", ["auto", "q8", "k8v4"])
def test_formats_with_enough_bits_have_none(name):
    model = small_llama(5, num_hidden_layers=1, intermediate_size=64, num_key_value_heads=2, head_dim=64)
    layout = layout_of(model, name)
    assert centred(layout, model, CALIBRATION) is layout


def test_other_tokens_and_none_give_other_names():
    model = small_llama(5, num_hidden_layers=1, intermediate_size=64, num_key_value_heads=2, head_dim=64)
    layout = layout_of(model, "q4")
    named = {stored_as(centred(layout, model, tokens), 16) for tokens in ((), CALIBRATION, CALIBRATION[1:])}
    assert len(named) == 3


class Broken:
    """Fails in the middle of a pass."""

    def __init__(self, model):
        self.layers = model.layers

    def __call__(self, tokens, cache):
        mx.fast.rope(mx.zeros((1, 1, 1, 64)), 64, traditional=False, base=1.0, scale=1.0, offset=0)
        raise RuntimeError("broken")


def test_rope_is_what_it_was_after_an_error():
    model = small_llama(5, num_hidden_layers=1, intermediate_size=64, num_key_value_heads=2, head_dim=64)
    rope = mx.fast.rope
    with pytest.raises(RuntimeError, match="broken"):
        centred(layout_of(model, "q4"), Broken(model), CALIBRATION)
    assert mx.fast.rope is rope
