"""Blocks as bytes: what is copied into the pool is what comes out, and nothing else changes."""

import random

import mlx.core as mx
import numpy as np
import pytest

from onekv.memory.layout import Group, KVLayer, Rule
from onekv.memory.pool import Pool
from onekv.memory.pool.blocks import Blocks

BLOCK = 16
BLOCKS = 5
ALIKE = [(2, 8, 8)] * 6
SHAPES = {
    "alike": ALIKE,
    "keys and values of other widths": [(3, 16, 8)] * 4,
    "one layer": [(2, 8, 8)],
    "one of other heads": [*ALIKE[:3], (4, 8, 8), *ALIKE[:3]],
    "all different": [(1, 8, 8), (2, 8, 16), (3, 16, 8), (4, 32, 32)],
    "layers without values": [(2, 8, 0)] * 3,
    "a first layer without anything": [(2, 0, 0), *ALIKE[:3]],
    "some without values": [(2, 8, 8), (2, 8, 0), (2, 8, 8), (2, 8, 8)],
}


def make_pool(shapes: list[tuple[int, int, int]]) -> Pool:
    layers = [KVLayer(f"layer {i}", *shape, mx.float16) for i, shape in enumerate(shapes)]
    return Pool(Group(Rule(), tuple(layers)), BLOCKS, BLOCK)


def scatter(pool: Pool) -> None:
    """Have its arrays elsewhere, at distances that nobody can foretell."""
    choose = random.Random(1)
    between = []
    for layer in pool.layers:
        for i, array in enumerate(layer.all):
            between.append(mx.zeros((choose.randrange(1, 5000),)) + 1)
            layer.all[i] = mx.zeros(array.shape, array.dtype)
            mx.eval(between[-1], layer.all[i])


def content(blocks: Blocks, size: int) -> list[bytes]:
    found = []
    for block in range(BLOCKS):
        data = bytearray(size)
        blocks.read(block, memoryview(data))
        found.append(bytes(data))
    return found


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("scattered", [False, True])
def test_a_block_goes_in_and_comes_out_and_others_stay(shapes, scattered):
    pool = make_pool(shapes)
    if scattered:
        scatter(pool)
    blocks = Blocks(pool)
    expected = content(blocks, pool.block_bytes)
    for block in (3, 0, 4, 3):
        expected[block] = np.random.default_rng(block).bytes(pool.block_bytes)
        blocks.look()
        blocks.write(block, memoryview(expected[block]))
        assert content(blocks, pool.block_bytes) == expected
    # As the model sees them: layer by layer keys, then values, each [heads, tokens, width].
    start = 0
    for array in pool.arrays():
        rows = np.array(array[:, 3 * BLOCK : 4 * BLOCK])
        assert rows.tobytes() == expected[3][start : start + rows.nbytes]
        start += rows.nbytes
    assert start == pool.block_bytes


def test_arrays_that_were_moved_are_found_again():
    pool = make_pool(ALIKE)
    blocks = Blocks(pool)
    assert content(blocks, pool.block_bytes) == [bytes(pool.block_bytes)] * BLOCKS
    old = pool.arrays()
    for layer in pool.layers:
        layer.all = [array + 1 for array in layer.all]
        mx.eval(layer.all)
    one = np.ones(pool.block_bytes // 2, np.float16).tobytes()
    assert content(blocks, pool.block_bytes) == [one] * BLOCKS
    assert not any(array.any() for array in old)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_no_view_spans_memory_of_others(shapes: list[tuple[int, int, int]]) -> None:
    """NumPy copies a source that seems to overlap again and again, and dies, if each copy lies in the view's span."""
    pool = make_pool(shapes)
    blocks = Blocks(pool)
    blocks.look()
    arrays = list(pool.arrays())
    assert len(blocks._arrays) == len(arrays)
    for (rows, _), array in zip(blocks._arrays, arrays, strict=True):
        low, high = np.lib.array_utils.byte_bounds(rows)
        assert high - low == array.nbytes
