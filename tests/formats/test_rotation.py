"""The rotation is orthonormal for every dim it takes, spreads what is large, and never changes."""

import mlx.core as mx
import numpy as np
import pytest

from onekv.errors import UnsupportedLayerError
from onekv.memory.formats.rotation import hartley, rotation, signs, split

DIMS = [8, 32, 64, 72, 80, 96, 112, 128, 160, 192, 256, 512, 576]


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_is_orthonormal_and_undone(dim: int) -> None:
    matrix = np.array(rotation(dim).apply(mx.eye(dim)), np.float64)
    assert np.abs(matrix @ matrix.T - np.eye(dim)).max() < 1e-5
    rows = mx.random.normal((5, 3, dim), key=mx.random.key(0))
    assert np.abs(np.array(rotation(dim).undo(rotation(dim).apply(rows)) - rows)).max() < 1e-5


@pytest.mark.parametrize("dim", DIMS)
def test_one_large_channel_is_spread_over_all(dim: int) -> None:
    spread = np.abs(np.array(rotation(dim).apply(mx.eye(dim)))).max()
    assert spread <= 1.42 / dim**0.5


@pytest.mark.parametrize("dim", DIMS)
def test_the_transform_is_what_it_is_said_to_be(dim: int) -> None:
    odd, power = split(dim)
    hadamard = np.ones((1, 1))
    while len(hadamard) < power:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    expected = np.kron(hartley(odd), hadamard / power**0.5) * signs(dim)
    assert np.abs(np.array(rotation(dim).apply(mx.eye(dim))).T - expected).max() < 1e-6


def test_signs_are_fixed() -> None:
    drawn = "".join("-+"[int(sign > 0)] for sign in signs(32))
    assert drawn == "++--+-+-++--+-+--+++-+-+-++---+-"
    assert (signs(64)[:32] == signs(32)).all()
    assert abs(signs(4096).mean()) < 0.05


@pytest.mark.parametrize("dim", [0, 1, 4, 60, 100, 17 * 64, 12])
def test_other_dims_are_refused(dim: int) -> None:
    with pytest.raises(UnsupportedLayerError, match=f"dim of {dim} "):
        rotation(dim)
