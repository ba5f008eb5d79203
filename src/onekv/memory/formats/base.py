"""The contract of a codec: how the keys, or the values, of one layer are stored.

A row is what one token keeps in one KV head, `dim` numbers. It is stored as a few `planes`, one pool array each, and
stays so in every tier. Row t of every plane depends on row t of the input alone, never on its neighbours or on the
shape around it, so rows can be written at any slot, shared, copied and restored byte by byte.

Codecs other than `Plain` store rows in a rotated basis. Nothing rotates them back: inner products do not change when
both sides are rotated, so queries are rotated instead, and the sum over values is unrotated once per query.

A codec owns no arrays of the pool and keeps no state; one can be shared by all layers of the same dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx


class Plane(NamedTuple):
    """What is stored of every row under this name: `width` items of `dtype`."""

    name: str
    width: int
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return self.width * self.dtype.size


class Factors(NamedTuple):
    """What `Codec.read` leaves out of a row: row = numbers * scale + bias, both float32 [...] or nothing.

    Attention applies them to scores and weights, which are `dim` times fewer than the numbers.
    """

    scale: mx.array | None = None
    bias: mx.array | None = None


class Book(NamedTuple):
    """What codes stand for: ascending `entries`, the `edges` between them, and the two numbers of each pair of codes
    as they are read, which for keys are longer by a constant (`turbo`).
    """

    entries: mx.array
    edges: mx.array
    pairs: mx.array


class Codes(NamedTuple):
    """How a compiled kernel reads and writes rotated rows: codes of `bits` bits, packed as `packing` says.

    With a book, a number is the entry of its code times the row's scale: planes are codes and scale. Without one it is
    code * scale + bias of its group: planes are codes, scales and biases.
    """

    bits: int
    book: Book | None = None


class Codec(ABC):
    # Goes into the fingerprint: it changes whenever the bytes of a row would.
    name: str
    dim: int
    planes: tuple[Plane, ...]

    # Whether rows are stored as they are.
    plain = False
    # For kernels that know such codes; None if a codec's bytes are its own affair.
    codes: Codes | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one head."""
        return sum(plane.nbytes for plane in self.planes)

    @abstractmethod
    def encode(self, rows: mx.array) -> tuple[mx.array, ...]:
        """`rows` [..., dim] of any float dtype as the arrays [..., width] of `planes`."""

    @abstractmethod
    def read(self, planes: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        """The numbers [..., dim] of encoded `planes`: rotated rows without their factors."""

    def factors(self, planes: Sequence[mx.array]) -> Factors:
        """The factors of the rows, one pair for each."""
        return Factors()

    def decode(self, planes: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        """The rotated rows [..., dim] of encoded `planes`."""
        rows, (scale, bias) = self.read(planes, dtype), self.factors(planes)
        if scale is not None:
            rows = rows * scale[..., None].astype(dtype)
        return rows if bias is None else rows + bias[..., None].astype(dtype)

    def weigh(self, weights: mx.array, planes: Sequence[mx.array]) -> mx.array | None:
        """`weights` [..., G, tokens] times the rotated rows, straight from the bytes; None if there is no such way."""
        return None

    @abstractmethod
    def rotate(self, rows: mx.array) -> mx.array:
        """`rows` [..., dim] in the basis of the decoded ones; same dtype."""

    @abstractmethod
    def unrotate(self, rows: mx.array) -> mx.array:
        """The inverse of `rotate`."""


class Plain(Codec):
    """Rows as they are, in the layer's own dtype."""

    plain = True

    def __init__(self, dim: int, dtype: mx.Dtype) -> None:
        self.dim = dim
        self.name = str(dtype).removeprefix("mlx.core.")
        self.planes = (Plane("x", dim, dtype),)

    def encode(self, rows: mx.array) -> tuple[mx.array, ...]:
        return (rows.astype(self.planes[0].dtype),)

    def read(self, planes: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        return planes[0].astype(dtype)

    def rotate(self, rows: mx.array) -> mx.array:
        return rows

    def unrotate(self, rows: mx.array) -> mx.array:
        return rows
