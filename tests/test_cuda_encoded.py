"""The CUDA kernel over encoded blocks against attention written out in float32. Runs where there is such a device."""

import itertools

import mlx.core as mx
import pytest

from onekv.memory.cuda_encoded import encoded_decode, supported
from onekv.memory.formats import parse
from onekv.memory.formats.centre import Centre, Rope
from onekv.memory.layout import Group, KVLayer, Rule
from onekv.memory.pool import Pool
from onekv.memory.step import GroupStep, visible
from onekv.memory.turns import Turns
from test_cuda import tables_of

DIM, HEADS = 128, 3
FORMATS = ("q8", "q4", "tq4", "tq3", "tq2", "k8v4", "ktq4vq8")
SLOW = tuple(1.5**i for i in range(64))
# Each shape with another dtype, block size, number of query heads and RoPE: a kernel is compiled for every case.
SHAPES = (
    (mx.bfloat16, 4, (5000, 1, 64, 65, 1500), Rule(), 64, True, Rope(DIM, False, 10000.0)),
    (mx.float16, 16, (1,), Rule(), 16, False, None),
    (mx.bfloat16, 1, (900, 30), Rule(window=100), 16, False, Rope(64, True, 500.0, 0.5)),
    (mx.float16, 7, (900, 333), Rule(window=200, keep=4), 64, True, Rope(DIM, False, None, 1.0, SLOW)),
)
CASES = [(kv_format, *shape) for kv_format, shape in itertools.product(FORMATS, SHAPES)]


def make(dtype, kv_format, lengths, rule, block_size, rope):
    """A pool full of encoded rows, and a step of one token for sequences of these lengths."""
    chosen = parse(kv_format)
    centre = Centre(mx.random.normal((HEADS, DIM)), rope, "here") if rope and chosen.centred else None
    stored = KVLayer("layer 0", HEADS, DIM, DIM, dtype, chosen, centre)
    assert supported(stored, block_size)
    blocks = sum(-(-n // block_size) + 1 for n in lengths) + 3
    pool = Pool(Group(rule, (stored,)), blocks, block_size)
    arrays = pool.layers[0]
    mx.random.seed(sum(lengths))
    # Keys of a model have a part that is the same for all tokens, and large channels.
    spread = 1 + 4 * (mx.arange(DIM) % 16 == 3)
    rows = [mx.random.normal((HEADS, blocks * block_size, DIM)) * spread + 1 for _ in range(2)]
    arrays.all[:] = [*stored.keys.encode(rows[0]), *stored.values.encode(rows[1])]
    tables = tables_of(pool, lengths)
    mx.eval(arrays.all)
    return stored, arrays, tables, GroupStep(tables, [n - 1 for n in lengths], 1, None)


def error(kv_format, dtype, shared, lengths, rule, block_size, with_sinks, rope) -> float:
    """The largest difference of the kernel's output to the reference, relative to the largest output."""
    stored, arrays, tables, step = make(dtype, kv_format, lengths, rule, block_size, rope)
    queries = mx.random.normal((len(lengths), HEADS * shared, 1, DIM)).astype(dtype)
    sinks = mx.random.normal((HEADS * shared,)).astype(dtype) if with_sinks else None
    new = tuple(mx.random.normal((len(lengths), HEADS, 1, DIM)).astype(dtype) for _ in range(2))
    turns = Turns().starts(rope, DIM, max(lengths)) if rope else None
    where = (step.grid, step.positions, step.reach(None))
    out = encoded_decode(queries, arrays, stored, new, *where, DIM**-0.5, sinks, turns)
    mx.eval(out)
    check_stored(stored, arrays, tables, lengths, block_size, new)
    wanted = []
    for row, (table, n) in enumerate(zip(tables, lengths, strict=True)):
        positions = [i * block_size + o for i in table.live() for o in range(block_size)]
        slots = mx.array([table.blocks[p // block_size] * block_size + p % block_size for p in positions])
        k = stored.keys.decode([part[:, slots] for part in arrays.keys], mx.float32)
        v = stored.values.decode([part[:, slots] for part in arrays.values], mx.float32)
        k, v = stored.keys.unrotate(k), stored.values.unrotate(v)
        if stored.centre is not None:
            k = k + stored.centre.rows(mx.array(positions), len(positions), 1)[:, :, 0].swapaxes(0, 1)
        q = queries[row].reshape(HEADS, shared, DIM).astype(mx.float32) * DIM**-0.5
        scores = (q[:, :, None] * k[:, None]).sum(axis=-1)
        scores = mx.where(visible(rule, None, n - 1, mx.array(positions)), scores, -mx.inf)
        if sinks is not None:
            scores = mx.concatenate([scores, sinks.astype(mx.float32).reshape(HEADS, shared, 1)], axis=-1)
            v = mx.concatenate([v, mx.zeros_like(v[:, :1])], axis=1)
        weights = mx.softmax(scores, axis=-1)
        wanted.append((weights[..., None] * v[:, None]).sum(axis=2).reshape(HEADS * shared, 1, DIM))
    wanted = mx.stack(wanted)
    return float(mx.abs(out.astype(mx.float32) - wanted).max() / mx.abs(wanted).max())


def check_stored(stored, arrays, tables, lengths, block_size, new) -> None:
    """What the kernel stores is what the codec would have stored, but for a number on the edge of two codes."""
    sides = ((stored.keys, arrays.keys, new[0]), (stored.values, arrays.values, new[1]))
    for row, (table, n) in enumerate(zip(tables, lengths, strict=True)):
        slot = table.blocks[(n - 1) // block_size] * block_size + (n - 1) % block_size
        for codec, parts, rows in sides:
            if codec is stored.keys and stored.centre is not None:
                rows = rows - stored.centre.rows(mx.array([n - 1] * len(rows)), len(rows), 1)
            encoded = codec.encode(rows[row, :, 0])
            own = codec.decode([part[:, slot] for part in parts], mx.float32)
            theirs = codec.decode(encoded, mx.float32)
            away = mx.abs(own - theirs) > 0.004 * mx.abs(theirs).max()
            assert int(away.sum()) <= 3, f"{int(away.sum())} of {away.size} numbers differ"


@pytest.mark.skipif(not mx.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_attends_like_the_reference(case):
    assert error(*case) < (0.015 if case[1] == mx.bfloat16 else 0.003)


def test_the_kernel_is_not_used_without_the_device_or_for_other_shapes():
    stored = KVLayer("layer 0", 2, DIM, DIM, mx.bfloat16, parse("q4"))
    assert supported(stored, 16) == mx.cuda.is_available()
    assert not supported(KVLayer("layer 0", 2, 64, 64, mx.bfloat16, parse("q4")), 16)
    assert not supported(KVLayer("layer 0", 2, DIM, DIM, mx.bfloat16, parse("kautov4")), 16)
