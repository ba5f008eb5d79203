"""Indices in, the same numbers out, in exactly `bits` bits each."""

import mlx.core as mx
import numpy as np
import pytest

from onekv.memory.formats.packing import (
    join,
    lookup,
    pack,
    pack_planes,
    packed_bytes,
    pair_table,
    unpack,
    unpack_planes,
)


def numbers(indices: mx.array, bits: int) -> mx.array:
    octets = pack_planes(indices, bits) if bits > 4 else pack(join(indices, bits), bits)
    assert octets.dtype == mx.uint8 and octets.shape[-1] == packed_bytes(bits, indices.shape[-1])
    if bits > 4:
        return unpack_planes(octets, bits)
    table = pair_table([float(i) for i in range(2**bits)])
    return lookup(table, unpack(octets, bits), mx.float32)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("dim", [8, 64, 72, 128])
def test_all_indices_come_back(bits: int, dim: int) -> None:
    random = np.random.default_rng(bits).integers(0, 2**bits, (3, 50, dim))
    same = np.repeat(np.arange(2**bits), dim).reshape(1, -1, dim)
    for indices in (random, same, np.flip(same, axis=1)):
        found = numbers(mx.array(indices.astype(np.uint8)), bits)
        assert (np.array(found) == indices).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_every_value_at_every_place_comes_back_alone(bits: int) -> None:
    dim = 16
    indices = np.zeros((dim, 2**bits, dim), np.uint8)
    for place in range(dim):
        indices[place, :, place] = np.arange(2**bits)
    assert (np.array(numbers(mx.array(indices), bits)) == indices).all()


@pytest.mark.parametrize(("bits", "byte"), [(5, 8 + 3 % 2), (6, 8 + 3)])
def test_planes_lie_where_the_kernels_read_them(bits: int, byte: int) -> None:
    """Number 3 of 16: its low half in byte 3; the bits above in the part that it belongs to."""
    indices = np.zeros(16, np.uint8)
    indices[3] = 2**bits - 1
    octets = np.array(pack_planes(mx.array(indices), bits))
    above = {5: 1 << (3 // 2), 6: 3}[bits]
    assert {at: int(octets[at]) for at in np.flatnonzero(octets)} == {3: 15, byte: above}
