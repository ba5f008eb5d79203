"""Attention over encoded rows equals attention over the same rows decoded, and never has them all in plain form."""

import mlx.core as mx
import numpy as np
import pytest

from onekv.memory.attention import tiles
from onekv.memory.formats import compared, parse


def draw(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32))


def expected(name, queries, keys, values, scale, bias=None, sinks=None):  # type: ignore[no-untyped-def]
    k, v = parse(name).keys(keys.shape[-1], mx.float32), parse(name).values(values.shape[-1], mx.float32)
    keys = k.unrotate(k.decode(k.encode(keys), mx.float32))
    values = v.unrotate(v.decode(v.encode(values), mx.float32))
    scores = np.array(queries @ keys.swapaxes(-1, -2), np.float64) * scale
    if bias is not None:
        scores = scores + np.array(bias)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(np.array(sinks), (*scores.shape[:-1], 1))], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights[..., : keys.shape[-2]] @ np.array(values, np.float64)


def attend(name, queries, keys, values, scale, **more):  # type: ignore[no-untyped-def]
    k, v = parse(name).keys(keys.shape[-1], mx.float32), parse(name).values(values.shape[-1], mx.float32)
    return tiles.attend(queries, k, k.encode(keys), v, v.encode(values), scale, **more)


@pytest.mark.parametrize("name", [*compared(), "ktq4vtq2"])
@pytest.mark.parametrize("tile", [None, 7, 250])
@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (192, 128), (256, 256)])
def test_equals_attention_over_decoded_rows(
    name: str, tile: int | None, dim: int, v_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tile is not None:
        monkeypatch.setattr(tiles, "TILE_BYTES", tile * 4 * dim)
    queries, keys, values = draw(2, 3, dim), draw(2, 100, dim), draw(2, 100, v_dim)
    found = attend(name, queries, keys, values, 0.3)
    assert np.abs(np.array(found) - expected(name, queries, keys, values, 0.3)).max() < 2e-5


@pytest.mark.parametrize("name", ["auto", "q4", "tq3"])
def test_rows_of_a_batch_with_bias_and_sinks(name: str) -> None:
    queries, keys, values = draw(8, 3, 64), draw(8, 50, 64), draw(8, 50, 64)
    lengths = mx.array([50, 50, 1, 1, 17, 17, 33, 33]).reshape(8, 1, 1)
    bias = mx.where(mx.arange(50) < lengths, 0.0, -mx.inf)
    sinks = draw(8, 3, 1)
    found = attend(name, queries, keys, values, 0.125, bias=bias, sinks=sinks)
    want = expected(name, queries, keys, values, 0.125, bias, sinks)
    assert np.abs(np.array(found) - want).max() < 2e-5


@pytest.mark.parametrize("name", ["q8", "q6", "q5", "q4", "tq4", "tq3", "tq2"])
def test_few_tokens_are_plain_at_a_time(name: str) -> None:
    heads, tokens, dim = 4, 16384, 64
    k, v = parse(name).keys(dim, mx.float32), parse(name).values(dim, mx.float32)
    key_parts, value_parts = k.encode(draw(heads, tokens, dim)), v.encode(draw(heads, tokens, dim))
    queries = draw(heads, 2, dim)
    mx.eval(key_parts, value_parts, queries)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(tiles.attend(queries, k, key_parts, v, value_parts, 0.125))
    plain = heads * tokens * dim * 4
    assert mx.get_peak_memory() - before < 0.75 * plain
