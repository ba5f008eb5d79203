"""Functions of MLX's arrays as programs of NumPy and compiled loops: they give what MLX gives."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx import nn

from architectures import ARCHITECTURES, build
from onekv.loops.graph import Unsupported, tracing
from onekv.loops.program import Program

WEIGHT, SCALE = mx.random.normal((32, 64)), mx.random.normal((64,))
mx.eval(WEIGHT, SCALE)
FUNCTIONS = {
    "add": (lambda a, b: a + b, (2, 1, 64), (2, 1, 64)),
    "rows by columns": (lambda a, b: a * b, (3, 1), (1, 64)),
    "the other way round": (lambda a, b: a - b, (1, 64), (3, 1)),
    "numbers": (lambda a: (a * 2 + 1) / 3, (3, 5)),
    "largest": (lambda a, b: mx.maximum(a, b) + mx.minimum(a, 0.5), (7,), (7,)),
    "roots": (lambda a: mx.sqrt(mx.abs(a)) + mx.rsqrt(mx.square(a) + 1) - -a, (4, 9)),
    "norm": (lambda a: mx.fast.rms_norm(a, SCALE, 1e-5), (2, 1, 64)),
    "layer norm": (lambda a: mx.fast.layer_norm(a, SCALE, SCALE, 1e-5), (2, 1, 64)),
    "weights": (lambda a: a @ WEIGHT.T, (2, 1, 64)),
    "weights and bias": (lambda a: mx.addmm(SCALE[:32], a, WEIGHT.T), (2, 64)),
    "weights of what is cut": (lambda a: a[..., 1::2] @ WEIGHT.T, (2, 1, 128)),
    "products": (lambda a, b: a @ b.swapaxes(-1, -2), (2, 3, 5), (2, 4, 5)),
    "turned and back": (
        lambda a: (a.reshape(2, 4, 16).transpose(1, 0, 2) * 2).transpose(1, 0, 2).reshape(2, 64),
        (2, 64),
    ),
    "turned and flat": (lambda a: a.reshape(2, 4, 8).transpose(1, 2, 0).reshape(-1) + 1, (2, 32)),
    "rope": (lambda a: mx.fast.rope(a, 16, traditional=True, base=1e4, scale=1.0, offset=3), (2, 4, 1, 16)),
    "half rope": (lambda a: mx.fast.rope(a, 8, traditional=False, base=1e4, scale=0.5, offset=7), (2, 4, 1, 16)),
    "swish": (lambda a: a * mx.sigmoid(a), (2, 1, 64)),
    "gelu": (lambda a: nn.gelu_approx(a), (2, 1, 64)),
    "softmax": (lambda a: mx.softmax(a, axis=-1), (2, 9)),
    "parts": (lambda a: mx.concatenate(mx.split(a, [8, 24], axis=1)[::-1], axis=1), (3, 64)),
    "stacked": (lambda a, b: mx.stack([a, b], axis=-1).reshape(2, -1), (2, 8), (2, 8)),
    "sums": (lambda a: a.sum(axis=1) + a.max(axis=(1, 2))[:, None] + a.sum(axis=-1), (3, 4, 4)),
    "backwards": (lambda a: a[:, ::-1] + 0, (3, 5)),
    "chosen": (lambda a: mx.where(a > 0, a, a * 0.1) + mx.logical_not(a > 1).astype(mx.float32), (3, 5)),
    "repeated": (lambda a: mx.broadcast_to(a[:, None], (3, 2, 5)).reshape(6, 5) * 2, (3, 5)),
    "sorted apart": (lambda a: mx.take_along_axis(a, mx.argpartition(a, kth=2, axis=-1)[..., :1], axis=-1) * 0, (3, 5)),
}


def numbers(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def check(function, shapes):
    program = Program(function, [mx.zeros(shape) for shape in shapes], lambda: [1])
    # Twice: nothing of a run may be left for the next.
    for seed in (1, 2):
        given_ = [numbers(shape, seed + index) for index, shape in enumerate(shapes)]
        for index, array in enumerate(given_):
            program.set(index, array)
        (out,) = program.run(0)
        expected = np.array(function(*map(mx.array, given_)))
        assert out.shape == expected.shape
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    function, *shapes = FUNCTIONS[name]
    check(function, shapes)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_are_multiplied_as_they_are(bits):
    layer = nn.QuantizedLinear(64, 48, bias=True, group_size=32, bits=bits)
    mx.eval(layer.parameters())
    check(lambda a: layer(a) * 2, [(2, 1, 64)])
    layer = nn.QuantizedLinear(64, 48, group_size=32, bits=2)
    mx.eval(layer.parameters())
    with pytest.raises(Unsupported, match="QuantizedMatmul"):
        Program(layer, [mx.zeros((1, 64))], lambda: [1])


@st.composite
def expressions(draw):
    """A random function of two arrays, and their shape."""
    operations = draw(
        st.lists(st.tuples(st.integers(0, 8), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=25)
    )
    shape = draw(st.sampled_from([(1, 1, 6), (2, 1, 6), (3, 2, 4), (5,), (2, 8)]))

    def function(a, b):
        made = [a, b]
        for code, first, second in operations:
            x, y = made[first % len(made)], made[second % len(made)]
            made.append(
                [
                    lambda x, y: x + y,
                    lambda x, y: x * 0.5 - y,
                    lambda x, y: mx.maximum(x, y) * mx.abs(y),
                    lambda x, y: x / (1 + mx.square(y)),
                    lambda x, y: x.sum(axis=-1, keepdims=True) * 0.1 + y,
                    lambda x, y: x.transpose().reshape(y.shape),
                    lambda x, y: mx.concatenate([x[..., 1:], y[..., :1]], axis=-1),
                    lambda x, y: mx.sigmoid(x) * y,
                    lambda x, y: x[..., ::-1] - y.mean(),
                ][code](x, y)
            )
        return made[-1] + made[len(made) // 2]

    return function, shape


@given(expressions())
def test_places_are_not_used_while_somebody_reads_them(expression):
    function, shape = expression
    check(function, [shape, shape])


def test_sections_are_computed_in_order_and_inputs_may_come_between():
    def function(a, b):
        double = a * 2
        return [double, (double + b) * a]

    program = Program(function, [mx.zeros(4), mx.zeros(4)], lambda: [1, 1])
    program.set(0, np.arange(4))
    (double,) = program.run(0)
    assert double.tolist() == [0, 2, 4, 6]
    assert not program.needs(0, 1) and program.needs(1, 1) and program.used == {0, 1}
    program.set(1, double + 1)
    assert program.run(1)[0].tolist() == [0, 5, 18, 39]
    assert Program(lambda a, b: a + 1, [mx.zeros(4), mx.zeros(4)], lambda: [1]).used == {0}


def test_what_cannot_be_run_is_told_when_the_program_is_made():
    for function in (
        lambda a: a.astype(mx.bfloat16) + 1,
        mx.erf,
        lambda a: mx.conv1d(a[None, :, None], mx.ones((1, 2, 1))),
    ):
        with pytest.raises(Unsupported):
            Program(function, [mx.zeros(8)], lambda: [1])
    assert not tracing()


def test_weights_are_not_copied():
    weight = mx.random.normal((512, 256))
    mx.eval(weight)
    before = mx.get_active_memory()
    program = Program(lambda a: a @ weight.T, [mx.zeros((1, 256))], lambda: [1])
    (operation,) = [one for one in program.operations if one.product is not None]
    assert np.shares_memory(operation.product._weight, np.asarray(weight))
    assert mx.get_active_memory() - before < weight.nbytes / 10


# All of mlx-lm's that have only operations that are known: fewer would be a loss.
RUN = {
    *(
        "llama",
        "llama-tied-bias",
        "llama-dynamic-rope",
        "qwen2",
        "qwen3",
        "gemma2",
        "phi3",
        "olmo2",
        "glm4",
        "stablelm",
    ),
    *("llama4_text", "minicpm3", "afm7", "gemma4_text", "llama-sliding", "ministral3", "gemma3_text", "cohere2"),
    *("olmo3", "exaone4", "iquestloopcoder", "rwkv7", "baichuan_m1"),
}


@pytest.mark.parametrize("name", sorted(RUN & set(ARCHITECTURES)))
def test_models(name):
    model = build(name)
    mx.eval(model.parameters())
    tokens = mx.array([[3], [5]])
    program = Program(model, [tokens], lambda: [1])
    program.set(0, np.array([[7], [9]]))
    (logits,) = program.run(0)
    expected = np.array(model(mx.array([[7], [9]])))
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()
