"""tq4, tq3, tq2: TurboQuant (arXiv 2504.19874, the MSE version): rotated rows as indices into a codebook, and one norm.

After the rotation a row of norm n is n / sqrt(dim) times numbers that each follow the density (1 - x^2)^((dim - 3) / 2)
of a coordinate of a random unit vector, x scaled by sqrt(dim). The codebook is Lloyd's and Max's for that very density.
Bits per number: 4, 3 or 2, and 16 / dim for the norm.

What is stored is the *corrected* norm, ||x|| / ||c|| with c the row's codebook entries: the decoded row has the length
of x. Let D be the distortion, 0.117, 0.0345, 0.0095 for 2, 3, 4 bits. A row and its codebook entries are at an angle of
cosine sqrt(1 - D), so there are three lengths to choose from, and no single one has all virtues:

    decoded length       relative error         <q, decoded> against <q, x>
    ||x|| sqrt(1 - D)    D                      1 - D           the least error; attention too flat, outputs too small
    ||x||                2 - 2 sqrt(1 - D)      sqrt(1 - D)     0.121, 0.0348, 0.0095: within 3 % of D up to dim 256
    ||x|| / sqrt(1 - D)  D / (1 - D)            1               0.133, 0.0358, 0.0096

Error matters for values, which are only added up, and an unbiased product for keys, which are only multiplied with
queries. So both are stored with the corrected norm, and a codec for keys decodes with a codebook that is longer by a
constant, the mean of 1 / sqrt(1 - D) at this dim (`gain`): products are unbiased, and the bytes are the same.

The norm is a float16: it is the row's root mean square, so it fits wherever the row itself fits in float16, and 11 bits
of it are 100 times more exact than 4 bits of direction. Larger ones are cut.
"""

from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import Any

import mlx.core as mx
import numpy as np

from .base import Book, Codec, Codes, Factors, Plane
from .packing import join, lookup, pack, packed_bytes, pair_table, unpack
from .rotation import VERSION, rotation

LARGEST = 65504.0
# Of a norm: rows that are smaller have squares that float32 cannot add up.
SMALLEST = 1e-30
Floats = np.ndarray[Any, np.dtype[np.float64]]


class Turbo(Codec):
    def __init__(self, bits: int, dim: int, unbiased: bool = False) -> None:
        self.bits, self.dim = bits, dim
        self.name = f"tq{bits}-{VERSION}"
        self.planes = (Plane("q", packed_bytes(bits, dim), mx.uint8), Plane("norm", 1, mx.float16))
        self._rotation = rotation(dim)
        book, gain = codebook(dim, bits)
        self._edges = mx.array(((book[1:] + book[:-1]) / 2).astype(np.float32))
        self._table = pair_table(list(book))
        self._read_table = pair_table(list(book * gain)) if unbiased else self._table
        self.codes = Codes(bits, Book(mx.array(book.astype(np.float32)), self._edges, self._read_table))

    def encode(self, rows: mx.array) -> tuple[mx.array, ...]:
        rotated = self._rotation.apply(rows)
        norm = mx.sqrt((rotated * rotated).sum(axis=-1, keepdims=True))
        unit = rotated * (self.dim**0.5 / mx.maximum(norm, SMALLEST))
        pairs = join(mx.searchsorted(self._edges, unit).astype(mx.uint8), self.bits)
        entries = lookup(self._table, pairs, mx.float32)
        length = mx.sqrt((entries * entries).sum(axis=-1, keepdims=True))
        corrected = mx.minimum(norm / length, LARGEST).astype(mx.float16)
        return pack(pairs, self.bits), corrected

    def read(self, planes: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        return lookup(self._read_table, unpack(planes[0], self.bits), dtype)

    def factors(self, planes: Sequence[mx.array]) -> Factors:
        return Factors(planes[1][..., 0].astype(mx.float32))

    def rotate(self, rows: mx.array) -> mx.array:
        return self._rotation.apply(rows).astype(rows.dtype)

    def unrotate(self, rows: mx.array) -> mx.array:
        return self._rotation.undo(rows).astype(rows.dtype)


@cache
def codebook(dim: int, bits: int) -> tuple[Floats, float]:
    """The 2^bits numbers that lie best, ascending, and `gain`.

    Rounded to six decimals, so that they are the same wherever they are computed.
    """
    x = np.linspace(0, 1, 100_001)
    density = (1 - x * x) ** ((dim - 3) / 2)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)]) * x[1]

    def first_moment(at: Floats) -> Floats:
        """The integral of x * density from `at` to 1."""
        return np.asarray((1 - at * at) ** ((dim - 1) / 2) / (dim - 1))

    half = 2 ** (bits - 1)
    quantiles = [NormalDist().inv_cdf(0.5 + (i + 0.5) / (2 * half)) for i in range(half)]
    # The density is symmetric, so its best codebook is too: the positive half is found.
    numbers = np.minimum(np.array(quantiles) / np.sqrt(dim), 0.99)
    for _ in range(10_000):
        edges = np.concatenate([[0.0], (numbers[1:] + numbers[:-1]) / 2, [1.0]])
        mass = np.diff(np.interp(edges, x, below))
        moved = -np.diff(first_moment(edges)) / mass
        settled = np.abs(moved - numbers).max() < 1e-13
        numbers = moved
        if settled:
            break
    # For the best codebook, the mean of <x, c> and of <c, c> are the same.
    kept = float((mass * numbers**2).sum() / mass.sum() * dim)
    positive = np.round(numbers * np.sqrt(dim), 6)
    return np.concatenate([-positive[::-1], positive]), round(kept**-0.5, 6)
