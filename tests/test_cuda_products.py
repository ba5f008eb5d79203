"""Products of few rows as a CUDA kernel, against MLX's own: on a CUDA device, or a few of the cases on the CPU."""

import itertools

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from kernels.fixtures import few_on_cpu
from onekv.cuda import products
from onekv.models.layers import replace_layers

SHAPES = [(2, 4096, 4096), (8, 4096, 6144), (16, 14336, 4096), (3, 96, 32), (32, 1056, 64), (13, 4096, 28672)]
CASES = list(itertools.product(SHAPES, (mx.bfloat16, mx.float16), (False, True)))


def layer_of(dtype, k, n, bias):
    mx.random.seed(k + n)
    layer = nn.Linear(k, n, bias=bias)
    layer.set_dtype(dtype)
    return layer


@pytest.mark.parametrize(
    ("shape", "dtype", "bias"), few_on_cpu(CASES, 3, lambda case: case[0][1] * case[0][2] <= 2**24), ids=str
)
def test_products_are_those_of_the_layer(cuda, shape, dtype, bias):
    rows, k, n = shape
    layer = layer_of(dtype, k, n, bias)
    x = mx.random.normal((rows, 1, k)).astype(dtype)
    expected = x.astype(mx.float32) @ layer.weight.astype(mx.float32).T
    if bias:
        expected = expected + layer.bias
    ends = (n // 32 * 16, n) if n > 32 else (n,)
    parts = products.multiply(layer, x, ends)
    assert [part.shape for part in parts] == [(rows, 1, b - a) for a, b in zip((0, *ends), ends, strict=False)]
    error = mx.abs(mx.concatenate(parts, axis=-1).astype(mx.float32) - expected).max() / mx.abs(expected).max()
    assert error < (0.01 if dtype == mx.bfloat16 else 0.002)


GATED_SHAPES = [(2, 4096, 2048), (13, 4096, 28672), (3, 96, 32), (40, 1056, 64)]
GATED = list(itertools.product(GATED_SHAPES, (False, True), (0, 1)))


@pytest.mark.parametrize(
    ("shape", "bias", "gate"), few_on_cpu(GATED, 1, lambda case: case[0][1] * case[0][2] <= 2**20), ids=str
)
def test_gated_products_are_those_of_both_halves(cuda, shape, bias, gate):
    rows, k, n = shape
    layer = layer_of(mx.bfloat16, k, n, bias)
    x = mx.random.normal((rows, 1, k)).astype(mx.bfloat16)
    halves = [half.astype(mx.float32) for half in products.multiply(layer, x, (n // 2, n))]
    expected = nn.silu(halves[gate]) * halves[1 - gate]
    made = products.gated(layer, x, gate)
    assert made.shape == (rows, 1, n // 2)
    # The halves are the same bit for bit: what is made of them in float32 is rounded once.
    assert mx.allclose(made, expected.astype(mx.bfloat16), rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize(("k", "n"), [(1056, 64), (640, 48)])
def test_a_row_is_the_same_whatever_is_beside_it(cuda, k, n):
    """With any number of rows, and of outputs of a thread block."""
    layer = layer_of(mx.bfloat16, k, n, False)
    x = mx.random.normal((64, 1, k)).astype(mx.bfloat16)
    alone = mx.concatenate([products.multiply(layer, x[row : row + 1], (16, n))[1] for row in range(64)])
    for rows in (4, 8, 13, 16, 24, 40, 48, 64):
        assert mx.array_equal(products.multiply(layer, x[:rows], (16, n))[1], alone[:rows]), rows
    gated = mx.concatenate([products.gated(layer, x[row : row + 1], 0) for row in range(64)])
    for rows in (8, 13, 40, 64):
        assert mx.array_equal(products.gated(layer, x[:rows], 0), gated[:rows]), rows


def test_only_decode_steps_of_few_rows_come_here():
    layer = layer_of(mx.bfloat16, 64, 32, False)
    assert products.supports(layer) and not products.supports(layer, (24, 32))
    assert not products.supports(layer_of(mx.float32, 64, 32, False))
    assert not products.supports(layer_of(mx.bfloat16, 64, 40, False))
    for shape, here in (
        ((8, 1, 64), True),
        ((1, 1, 64), True),
        ((1, 8, 64), False),
        ((17, 1, 64), False),
        ((4, 2, 64), False),
    ):
        assert products.fits(layer, mx.zeros(shape, mx.bfloat16)) is here
    assert not products.fits(layer, mx.zeros((8, 1, 64)))


def test_logits_of_an_embedding_are_the_same_whatever_is_beside_a_row(cuda):
    """MLX multiplies one row and several in different ways."""
    stock = nn.Embedding(48, 64)
    stock.set_dtype(mx.bfloat16)
    x = mx.random.normal((16, 1, 64)).astype(mx.bfloat16)
    head = products.few_rows(stock)
    assert type(head) is products.FewRowsHead
    alone = mx.concatenate([head.as_linear(x[row : row + 1]) for row in range(16)])
    assert mx.array_equal(head.as_linear(x), alone)
    assert mx.allclose(alone, stock.as_linear(x), rtol=0.02, atol=1e-3)
    # More rows are the embedding's own, as are those of a prompt, and what it embeds.
    for many in (mx.tile(x, (2, 1, 1)), x.reshape(1, 16, 64)):
        assert mx.array_equal(head.as_linear(many), stock.as_linear(many))
    assert mx.array_equal(head(mx.array([[3, 40]])), stock(mx.array([[3, 40]])))
    # In float32 there is no kernel.
    assert type(products.few_rows(nn.Embedding(48, 64))) is nn.Embedding


def test_layers_are_replaced_with_their_weights_and_names():
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 30))
    model.set_dtype(mx.bfloat16)
    before = dict(tree_flatten(model.parameters()))
    x = mx.random.normal((1, 3, 64)).astype(mx.bfloat16)
    expected = model(x)
    assert replace_layers(model, products.few_rows) == 1
    after = dict(tree_flatten(model.parameters()))
    assert after.keys() == before.keys() and all(mx.array_equal(after[key], before[key]) for key in after)
    assert mx.array_equal(model(x), expected)
