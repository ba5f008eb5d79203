"""The centre of a layer's keys: the component that they all have in common is subtracted before they are encoded, and
added back to the scores.

In many models, most of a key's energy is the same vector for all tokens of a head, rotated by RoPE: codes would be
wasted on it. With m that vector before RoPE, and R_s the rotation at position s,

    stored     encode(k - R_s m)
    score      <q, k> = <q, decoded> + <q, R_s m>

R_s turns pairs of channels, so <q, R_s m> is a sum over pairs of cosines and sines of s, whose factors depend on q and
m alone. All heads and layers share their table (`Rope.table`):

    <q, R_s m> = <q A, table_s>         A [dim, dim] from m, two numbers per row (`Centre.matrix`)

The first token of a sequence is not centred: it is an attention sink, unlike all others.

m is an estimate (`memory.calibration`): a bad one costs precision of the codes, never correctness, because the same
numbers are subtracted and added back.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

# Part of the names of what is stored: it changes whenever the bytes would.
VERSION = "c1"
Numbers = np.ndarray[Any, Any]
Pairs = tuple[Numbers, Numbers]


@dataclass(frozen=True)
class Rope:
    """What a call of `mx.fast.rope` does to rows; with no `dims`, nothing. `freqs` are divisors of the position."""

    dims: int = 0
    traditional: bool = False
    base: float | None = None
    scale: float = 1.0
    freqs: tuple[float, ...] | None = None

    def turn(self, rows: mx.array, offset: int | mx.array) -> mx.array:
        """`rows` [n, heads, tokens, dim], the first token of each at `offset`."""
        if not self.dims:
            return rows
        return mx.fast.rope(
            # On CUDA, MLX's rope reads rows that were broadcast from the wrong places.
            mx.contiguous(rows),
            self.dims,
            traditional=self.traditional,
            base=self.base,
            scale=self.scale,
            offset=offset,
            freqs=self._divisors,
        )

    @cached_property
    def _divisors(self) -> mx.array | None:
        return mx.array(self.freqs) if self.freqs is not None else None

    def pairs(self) -> Pairs:
        """The first and the second channels of all pairs."""
        half = np.arange(self.dims // 2)
        return (2 * half, 2 * half + 1) if self.traditional else (half, half + self.dims // 2)

    def all_pairs(self, dim: int) -> Pairs:
        """The same, and after them pairs of channels that do not turn."""
        still = np.arange(self.dims, dim)
        first, second = self.pairs()
        return np.concatenate([first, still[::2]]), np.concatenate([second, still[1::2]])

    def angles(self, dim: int) -> Numbers:
        """By how much each pair of `all_pairs` turns from one position to the next, in float64."""
        freqs = self.freqs or [(self.base or 1.0) ** (2 * i / self.dims) for i in range(self.dims // 2)]
        return np.concatenate([self.scale / np.array(freqs, np.float64), np.zeros((dim - self.dims) // 2)])

    def table(self, dim: int, offset: int | mx.array, rows: int, tokens: int) -> mx.array:
        """[rows, tokens, dim]: a pair's cosine and sine of each position, 1 where nothing turns; 0 at position 0."""
        unit = np.ones(dim, np.float32)
        unit[self.pairs()[1]] = 0
        turned = self.turn(mx.broadcast_to(mx.array(unit), (rows, 1, tokens, dim)), offset)[:, 0]
        return _without_first(turned, offset, tokens)


class Centre:
    """m of each head of a layer, [heads, dim] in float32, and how RoPE turns it. `found` names how m was found."""

    def __init__(self, mean: mx.array, rope: Rope, found: str) -> None:
        self.mean, self.rope = mean.astype(mx.float32), rope
        self.name = f"{VERSION}-{found}"
        mx.eval(self.mean)

    def __repr__(self) -> str:
        return f"Centre({self.name})"

    def rows(self, offset: int | mx.array, rows: int, tokens: int) -> mx.array:
        """What is taken off: [rows, heads, tokens, dim] in float32, the first token of each row at `offset`."""
        heads, dim = self.mean.shape
        turned = self.rope.turn(mx.broadcast_to(self.mean[None, :, None], (rows, heads, tokens, dim)), offset)
        return _without_first(turned, offset, tokens)

    # What follows is made where it is needed: the CUDA kernel reads `paired`, all else `matrix`.

    @cached_property
    def matrix(self) -> mx.array:
        return mx.array(_matrix(np.array(self.mean), self.rope))

    @cached_property
    def paired(self) -> mx.array:
        """The mean of each head: the first channels of all pairs, then the second ones."""
        paired = mx.array(np.array(self.mean)[:, np.concatenate(self.rope.all_pairs(self.mean.shape[1]))])
        mx.eval(paired)
        return paired

    def factors(self, queries: mx.array) -> mx.array:
        """What the table is multiplied with for `queries` [heads, G, dim]; the sum is what centres add to products."""
        return queries @ self.matrix


def centre_bytes(heads: int, dim: int) -> int:
    """Memory of one layer's centre."""
    return heads * dim * (dim + 1) * 4


def _without_first(rows: mx.array, offset: int | mx.array, tokens: int) -> mx.array:
    """`rows` [n, ..., tokens, dim] with zeros at position 0."""
    if isinstance(offset, int):
        if offset:
            return rows
        return mx.concatenate([mx.zeros_like(rows[..., :1, :]), rows[..., 1:, :]], axis=-2)
    positions = offset.reshape(-1, *[1] * (rows.ndim - 1)) + mx.arange(tokens)[:, None]
    return mx.where(positions == 0, 0, rows)


def _matrix(mean: Numbers, rope: Rope) -> Numbers:
    """Column c of a head: what products with queries give the factor of the table's column c."""
    heads, dim = mean.shape
    matrix = np.zeros((heads, dim, dim), np.float32)
    still = np.arange(rope.dims, dim)
    matrix[:, still, still] = mean[:, still]
    first, second = rope.pairs()
    matrix[:, first, first] = mean[:, first]
    matrix[:, second, first] = mean[:, second]
    matrix[:, second, second] = mean[:, first]
    matrix[:, first, second] = -mean[:, second]
    return matrix
