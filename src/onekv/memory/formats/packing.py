"""Indices of 2 to 6 bits in bytes, exactly `bits` bits per number.

2, 3 and 4 bits lie there two at a time: a byte is looked up in a table of pairs of numbers.

Number 2j is the low half of pair j, number 2j + 1 the high half. Pairs of 4, 6 or 8 bits lie in bytes so that reading
them needs as few steps as possible; n = dim / 2 pairs:

    4 bits   byte j = pair j
    3 bits   byte j = pair j, and above it two bits of a pair of the last quarter:
             | n/4 bytes, bits 0-1 | n/4 bytes, bits 2-3 | n/4 bytes, bits 4-5 |   of pairs 3n/4 ... n
    2 bits   byte j = pair j, and above it pair n/2 + j

What lies above a pair need not be masked: `pair_table` gives the same numbers whatever is there.

5 and 6 bits are two planes: the low four bits of all numbers, then the bits above them. A plane is cut into parts that
lie above each other, so that one shift moves a whole part, and channels stay in their order:

    low four     byte j = number j, and above it number dim/2 + j                               dim/2 bytes
    5 bits       bit i of byte j = the fifth bit of number i * dim/8 + j                        dim/8 bytes
    6 bits       bits 2i, 2i + 1 of byte j = the fifth and sixth of number i * dim/4 + j        dim/4 bytes
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

# Bytes of a word, widest first.
WORDS = ((8, mx.uint64), (4, mx.uint32), (2, mx.uint16), (1, mx.uint8))


def packed_bytes(bits: int, dim: int) -> int:
    return dim * bits // 8


def join(indices: mx.array, bits: int) -> mx.array:
    """Indices [..., dim] as pairs [..., dim / 2]."""
    return indices[..., 0::2] | (indices[..., 1::2] << bits)


def pack(pairs: mx.array, bits: int) -> mx.array:
    """Pairs [..., n] as bytes [..., packed_bytes]."""
    count = pairs.shape[-1]
    if bits == 4:
        return pairs
    if bits == 2:
        return pairs[..., : count // 2] | (pairs[..., count // 2 :] << 4)
    last = pairs[..., 3 * count // 4 :]
    above = mx.concatenate([last, last >> 2, last >> 4], axis=-1)
    return pairs[..., : 3 * count // 4] | (above << 6)


def unpack(octets: mx.array, bits: int) -> mx.array:
    """The inverse of `pack`, except for what lies above each pair."""
    if bits == 4:
        return octets
    # The widest words that a third of a row of 3 bits, or a row of 2 bits, is made of: few wide ones cost less.
    size, word = next(
        (size, word) for size, word in WORDS if octets.shape[-1] % (size * (bits if bits == 3 else 1)) == 0
    )
    words = octets.view(word)
    if bits == 2:
        above = words >> 4
    else:
        low, middle, high = mx.split((words >> 6) & mx.array(3 * (256**size // 255), word), 3, axis=-1)
        above = low | (middle << 2) | (high << 4)
    return mx.concatenate([words, above], axis=-1).view(mx.uint8)


def pack_planes(indices: mx.array, bits: int) -> mx.array:
    """Indices [..., dim] of 5 or 6 bits as bytes [..., packed_bytes]; dim is a multiple of 8."""
    return mx.concatenate([_above_each_other(indices & 15, 4), _above_each_other(indices >> 4, bits - 4)], axis=-1)


def unpack_planes(octets: mx.array, bits: int) -> mx.array:
    """The inverse of `pack_planes`: uint8 [..., dim]."""
    dim, more = octets.shape[-1] * 8 // bits, bits - 4
    size, word = next((size, word) for size, word in WORDS if dim * more // 8 % size == 0)
    words, half = octets.view(word), dim // 2 // size
    low = _side_by_side(words[..., :half], 4, size)
    return (low | (_side_by_side(words[..., half:], more, size) << 4)).view(mx.uint8)


def _above_each_other(numbers: mx.array, bits: int) -> mx.array:
    parts = mx.split(numbers, 8 // bits, axis=-1)
    packed = parts[0]
    for index, part in enumerate(parts[1:], 1):
        packed = packed | (part << (index * bits))
    return packed


def _side_by_side(words: mx.array, bits: int, size: int) -> mx.array:
    mask = mx.array((2**bits - 1) * (256**size // 255), words.dtype)
    return mx.concatenate([(words >> shift) & mask for shift in range(0, 8, bits)], axis=-1)


def pair_table(numbers: Sequence[float]) -> mx.array:
    """Entry b, of 256, is the two numbers of the pair in byte b, as one complex number."""
    count = len(numbers)
    octets = np.arange(256) % count**2
    table = np.array(numbers, np.float32)[np.stack([octets % count, octets // count], axis=-1)]
    return mx.array(table.view(np.complex64)[:, 0])


def lookup(table: mx.array, pairs: mx.array, dtype: mx.Dtype) -> mx.array:
    """The numbers [..., 2 * n] of `pairs` [..., n].

    A pair moves as one complex number, and `take_along_axis` of a flat array is one plain loop on CPU: 0.7 ns per
    number, where `take` needs 6 and shifts with a table of single numbers 12.
    """
    flat = mx.take_along_axis(table, pairs.reshape(-1), axis=0)
    return flat.view(mx.float32).reshape(*pairs.shape[:-1], -1).astype(dtype)
