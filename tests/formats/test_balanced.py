"""Constants of a layer change no score, and save most of the error where keys have a common part."""

import mlx.core as mx
import numpy as np
import pytest

from onekv.memory.formats import attention, parse
from onekv.memory.formats.balanced import Balanced, constants

HEADS, TOKENS, DIM = 3, 400, 64


def layer() -> tuple[mx.array, mx.array, mx.array]:
    """Keys with a common part and channels of different size, queries with the reverse; values."""
    random = np.random.default_rng(0)
    size = np.exp(random.standard_normal((HEADS, 1, DIM)))
    keys = random.standard_normal((HEADS, TOKENS, DIM)) * size + 3 * random.standard_normal((HEADS, 1, DIM))
    queries = random.standard_normal((HEADS, 8, DIM)) / size
    values = random.standard_normal((HEADS, TOKENS, DIM))
    return mx.array(keys.astype(np.float32)), mx.array(queries.astype(np.float32)), mx.array(values.astype(np.float32))


def score_error(codec, keys: mx.array, queries: mx.array) -> float:  # type: ignore[no-untyped-def]
    """Of scores less their mean, which softmax does not see."""
    found = codec.rotate(queries) @ codec.decode(codec.encode(keys), mx.float32).swapaxes(1, 2)
    error = found - queries @ keys.swapaxes(1, 2)
    return (error - error.mean(axis=-1, keepdims=True)).square().mean().item()


@pytest.mark.parametrize("name", ["q4", "tq4", "tq3"])
def test_balancing_saves_most_of_the_error(name: str) -> None:
    keys, queries, _ = layer()
    inner = parse(name).keys(DIM, mx.float32)
    balanced = Balanced(inner, *constants(keys, queries))
    assert score_error(balanced, keys, queries) < score_error(inner, keys, queries) / 4


@pytest.mark.parametrize("sinks", [False, True])
def test_attention_is_the_same(sinks: bool) -> None:
    keys, queries, values = layer()
    plain, scale = parse("auto").values(DIM, mx.float32), 0.1
    balanced = Balanced(parse("q8").keys(DIM, mx.float32), *constants(keys, queries))
    sink = mx.full((HEADS, 8, 1), 2.0) if sinks else None
    moved = sink - scale * balanced.missing(queries) if sink is not None else None
    want = attention.attend(queries, plain, (keys,), plain, (values,), scale, sinks=sink)
    found = attention.attend(queries, balanced, balanced.encode(keys), plain, (values,), scale, sinks=moved)
    assert mx.abs(found - want).max().item() < 0.02 * mx.abs(want).max().item()


def test_rotation_is_undone_and_names_differ() -> None:
    keys, queries, _ = layer()
    inner = parse("tq4").keys(DIM, mx.float32)
    one, other = Balanced(inner, *constants(keys, queries)), Balanced(inner, *constants(keys[:, :200], queries))
    assert len({inner.name, one.name, other.name}) == 3
    assert one.token_bytes == inner.token_bytes
    assert mx.abs(one.unrotate(one.rotate(queries)) - queries).max().item() < 1e-5


def test_a_channel_of_zeros_does_no_harm() -> None:
    keys, queries, _ = layer()
    keys[..., 5], queries[..., 7] = 0, 0
    codec = Balanced(parse("q4").keys(DIM, mx.float32), *constants(keys, queries))
    assert mx.all(mx.isfinite(codec.decode(codec.encode(keys), mx.float32))).item()
