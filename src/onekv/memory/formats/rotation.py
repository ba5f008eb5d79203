"""An orthonormal rotation that spreads a row's large channels over all of them: fixed random signs, then a transform.

The transform of dim = m * 2^k (m odd) is the Kronecker product of a Hartley matrix of size m and a Hadamard matrix of
size 2^k. Both are symmetric and orthonormal, so the transform is its own inverse:

    rotate(x) = T (s * x)          unrotate(y) = s * (T y)          dim 80: T = Hartley(5) x Hadamard(16)

`mx.hadamard_transform` is only ever called with powers of 2: it takes m = 12, 20, 28 too, but is not its own inverse
there, and writes outside its memory for other sizes. A [dim, dim] product would be four times faster on CPU (dim 64:
1.6 against 6.9 ns per number, where all of SmolLM2 takes 600), but no BLAS promises to add in the same order for
another number of rows, and a row could then have other bytes alone than among others. Here every number goes through
the same additions in any shape.
"""

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import UnsupportedLayerError

# Part of every codec's name: a change of the seed, of the generator or of the transform needs a new one.
VERSION = "r1"
SEED = 0x6F6E656B76
# Larger odd factors would make the sum below cost more than it is worth.
LARGEST_ODD = 15
_MASK = 2**64 - 1


class Rotation:
    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.odd, self.power = split(dim)
        self.signs = mx.array(signs(dim))
        self.matrix = hartley(self.odd)
        self._hartley = mx.array(self.matrix)[..., None]

    def apply(self, rows: mx.array) -> mx.array:
        """Rotated rows in float32."""
        return self._transform(rows.astype(mx.float32) * self.signs)

    def undo(self, rows: mx.array) -> mx.array:
        return self._transform(rows.astype(mx.float32)) * self.signs

    def _transform(self, rows: mx.array) -> mx.array:
        if self.odd == 1:
            return mx.hadamard_transform(rows)
        blocks = mx.hadamard_transform(rows.reshape(*rows.shape[:-1], 1, self.odd, self.power))
        # Not a matrix product, see above; on GPUs that would also be rounded to fewer bits.
        return (self._hartley * blocks).sum(axis=-2).reshape(rows.shape)


@cache
def rotation(dim: int) -> Rotation:
    """One per dim, for all layers; refuses dims that it cannot rotate."""
    return Rotation(dim)


def split(dim: int) -> tuple[int, int]:
    """(m, 2^k) with dim = m * 2^k and m odd."""
    power = dim & -dim
    odd = dim // power if power else 0
    if power < 8 or odd > LARGEST_ODD:
        raise UnsupportedLayerError(
            f"a head dim of {dim} cannot be rotated: it must be m * 2^k with m odd, m <= {LARGEST_ODD} and 2^k >= 8; "
            "use --kv-format auto"
        )
    return odd, power


def signs(dim: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The top bits of splitmix64, written out so that they never change with a library."""
    values, state = np.empty(dim, np.float32), SEED
    for i in range(dim):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        values[i] = -1.0 if (z ^ (z >> 31)) >> 63 else 1.0
    return values


def hartley(size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """cos + sin of 2 pi i j / size, over sqrt(size): symmetric and orthonormal."""
    angles = 2 * np.pi / size * (np.outer(np.arange(size), np.arange(size)) % size)
    return np.asarray((np.cos(angles) + np.sin(angles)) / np.sqrt(size), np.float32)
