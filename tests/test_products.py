"""Products by compiled loops, against NumPy in float64 with the weights that MLX unpacks."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from onekv import loops
from onekv.loops import products
from onekv.loops.products import Product, product, supports

pytestmark = pytest.mark.skipif(loops.why_not() is not None, reason="there are no compiled loops")

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
# n and k: fewer columns than a tile has, one more than whole tiles, two threads with parts of different sizes.
SIZES = ((1, 32), (3, 96), (7, 128), (129, 576), (258, 1056), (65, 4096))
PLAIN_SIZES = (*SIZES, (5, 1), (9, 33), (131, 1000), (4, 31))


def numbers(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


def plain(n: int, k: int, dtype: mx.Dtype, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(k, n, bias=bias)
    layer.weight = mx.array(numbers(n, k)).astype(dtype)
    if bias:
        layer.bias = mx.array(numbers(n)).astype(dtype)
    return layer


def packed(n: int, k: int, bits: int, group: int, dtype: mx.Dtype = mx.float32, bias: bool = False) -> Any:
    return nn.QuantizedLinear.from_linear(plain(n, k, dtype, bias), group, bits)


def dequantized(layer: Any) -> np.ndarray[Any, Any]:
    """In float32, from scales and biases of any type."""
    scales, biases = layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
    return np.asarray(mx.dequantize(layer.weight, scales, biases, layer.group_size, layer.bits))


def check(made: Product, weight: np.ndarray[Any, Any], rows: int) -> None:
    x = numbers(rows, weight.shape[1])
    exact, sizes = x.astype(np.float64) @ weight.T.astype(np.float64), np.abs(x) @ np.abs(weight).T
    assert np.all(np.abs(made(x) - exact) <= 1e-6 * sizes)


def unpacked(made: products.Product) -> np.ndarray:
    out = np.full((made.n, made.k), np.nan, np.float32)
    made.unpack(out)
    return out


@pytest.mark.parametrize("dtype", FLOATS)
def test_plain_weights(dtype: mx.Dtype) -> None:
    for n, k in PLAIN_SIZES:
        layer = plain(n, k, dtype)
        for rows in range(1, 10):
            check(product(layer), np.asarray(layer.weight.astype(mx.float32)), rows)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_packed_weights(bits: int, group: int, dtype: mx.Dtype) -> None:
    for n, k in SIZES:
        layer = packed(n, (k + group - 1) // group * group, bits, group, dtype)
        made, weight = product(layer), dequantized(layer)
        for rows in range(1, 10):
            check(made, weight, rows)


def kinds(n: int, k: int) -> list[Any]:
    return [plain(n, k, dtype) for dtype in FLOATS] + [packed(n, k, bits, 32) for bits in (4, 8)]


def test_a_row_gives_the_same_alone_and_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ALONE", 0)
    for layer in kinds(133, 608):
        made, x = product(layer), numbers(17, 608)
        together = {}
        for count in (1, 2):
            monkeypatch.setattr(products, "threads", lambda count=count: count)
            together[count] = made(x)
            for rows in range(1, 10):
                assert np.array_equal(made(x[3 : 3 + rows]), together[count][3 : 3 + rows])
        assert np.array_equal(together[1], together[2])


def test_a_column_gives_the_same_in_any_matrix() -> None:
    x = numbers(3, 608)
    for whole, part in zip(kinds(133, 608), kinds(133, 608), strict=True):
        for name in ("weight", "scales", "biases"):
            if name in part:
                part[name] = mx.contiguous(part[name][5:72])
        assert np.array_equal(product(part)(x), product(whole)(x)[:, 5:72])


def test_what_is_no_number_stays_so() -> None:
    for layer in kinds(70, 128):
        weight = dequantized(layer) if "scales" in layer else np.asarray(layer.weight.astype(mx.float32))
        for place, (first, second) in enumerate(((np.nan, 0), (np.inf, 0), (-np.inf, np.inf), (0, -np.inf))):
            x = numbers(3, 128)
            x[1, 2 + place], x[1, 77] = first, second
            with np.errstate(invalid="ignore"):
                expected = x.astype(np.float64) @ weight.T.astype(np.float64)
            got = product(layer)(x)
            finite = np.isfinite(expected)
            assert np.array_equal(got[~finite], expected[~finite].astype(np.float32), equal_nan=True)
            assert np.allclose(got[finite], expected[finite], atol=1e-4)
            assert np.isfinite(got[[0, 2]]).all() and not np.isfinite(got[1]).any()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_unpacked_weights_are_those_of_mlx(bits: int, group: int) -> None:
    layer = packed(301, 640, bits, group)
    made, weight = product(layer), dequantized(layer)
    assert np.array_equal(unpacked(made).view(np.uint32), weight.view(np.uint32))
    layer = packed(33, 640, bits, group, mx.bfloat16)
    assert np.array_equal(unpacked(product(layer)), dequantized(layer))


def test_unpacked_weights_of_gguf_are_exact() -> None:
    for bits, zero in ((4, 8), (8, 128)):
        rng = np.random.default_rng(bits)
        codes = rng.integers(0, 2**bits, (64, 96), dtype=np.uint8)
        scales = rng.standard_normal((64, 3)).astype(np.float16).astype(np.float32)
        stored = codes if bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4
        made = products.Packed(stored, scales, scales * np.float32(-zero), bits, 32)
        exact = (codes.astype(np.float64) - zero) * np.repeat(scales, 32, axis=1)
        assert np.array_equal(unpacked(made), exact)
        check(made, exact.astype(np.float32), 5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_plain_rows(dtype: mx.Dtype) -> None:
    layer = nn.Embedding(50, 48)
    layer.weight = layer.weight.astype(dtype)
    made, weight = product(layer), np.asarray(layer.weight.astype(mx.float32))
    assert np.array_equal(unpacked(made), weight)
    check(made, weight, 2)


def test_layers() -> None:
    for layer in (plain(40, 64, mx.float32, True), packed(40, 64, 4, 32, mx.float16, True)):
        made, x = product(layer), numbers(2, 64)
        own = np.asarray(layer(mx.array(x).astype(layer.bias.dtype)).astype(mx.float32))
        assert np.allclose(made(x), own, atol=1e-5 if layer.bias.dtype == mx.float32 else 0.1)
    embedding = nn.Embedding(40, 64).to_quantized(64, 8)
    x = mx.array(numbers(1, 64))
    assert np.allclose(product(embedding)(np.asarray(x)), embedding.as_linear(x), atol=1e-4)
    gaps = nn.Linear(64, 40, bias=False)
    gaps.weight = mx.array(numbers(64, 40)).T
    check(product(gaps), np.asarray(gaps.weight), 3)


def test_memory_is_not_copied() -> None:
    for layer in kinds(40, 64):
        made: Any = product(layer)
        weight = made._weight if "scales" not in layer else made._parts[0]
        assert not weight.flags.owndata and weight.nbytes == layer.weight.nbytes
        mine = np.asarray(layer.weight.view(mx.uint8))
        assert weight.__array_interface__["data"][0] == mine.__array_interface__["data"][0]


def test_what_is_refused() -> None:
    class Other(nn.Linear):
        pass

    assert all(supports(layer) for layer in kinds(40, 64))
    assert supports(nn.Embedding(40, 64)) and supports(nn.Embedding(40, 64).to_quantized(32, 4))
    assert not supports(Other(64, 40)) and not supports(nn.ReLU())
    assert not any(supports(packed(40, 64, bits, 32)) for bits in (2, 3, 5, 6))
    assert not supports(nn.QuantizedLinear.from_linear(nn.Linear(64, 40), 32, 4, mode="mxfp4"))
