"""The CUDA kernels against attention written out in float32: on a CUDA device, or a few of the cases on the CPU."""

import itertools

import mlx.core as mx
import pytest

from kernels.fixtures import few_on_cpu
from onekv.memory import pairs
from onekv.memory.attention.cuda.plain import Counters, CudaPlain, cuda_decode
from onekv.memory.device import kind
from onekv.memory.layout import Group, KVLayer, Rule
from onekv.memory.pool import Pool
from onekv.memory.pool.table import Table
from onekv.memory.step import GroupStep, visible
from onekv.memory.work import Kernel

CASES = [
    (dtype, dims, shared, lengths, rule, block_size)
    for dtype, (dims, shared), (lengths, rule), block_size in itertools.product(
        (mx.bfloat16, mx.float16),
        (((128, 128), 4), ((64, 64), 1), ((64, 64), 9), ((192, 128), 16), ((256, 256), 8)),
        (
            ((1,), Rule()),
            ((700,), Rule()),
            ((5000, 1, 64, 65, 1500), Rule()),
            ((900, 30), Rule(window=100)),
            ((900, 333), Rule(window=200, keep=4)),
        ),
        (16, 64),
    )
]


# Rows that begin with blocks of another row: (row, tokens) for each.
FORKS = {
    "two": {1: (0, 1024)},
    "all of one": dict.fromkeys(range(1, 21), (0, 1024)),
    "branches": {1: (0, 512), 2: (1, 768), 3: (1, 1024), 4: (0, 1024), 6: (5, 512)},
}
SHARED_CASES = [
    (dtype, dims, shared, tuple(1100 + 37 * row for row in range(max(FORKS[forks]) + 2)), Rule(), size, FORKS[forks])
    for dtype, (dims, shared), forks, size in itertools.product(
        (mx.bfloat16, mx.float16), (((128, 128), 4), ((64, 64), 1), ((64, 64), 9), ((256, 256), 8)), FORKS, (16, 64)
    )
]


def tables_of(pool, lengths, forks=None) -> list[Table]:
    """Tables of sequences of these lengths; blocks that are in none of them come first, so that none starts at 0."""
    pool.reserve(2)
    pool.take(2, None, 0)
    tables = []
    for row, n in enumerate(lengths):
        prefix = []
        if forks and row in forks:
            parent, tokens = forks[row]
            prefix = tables[parent].blocks[: tokens // pool.block_size]
        table = Table(pool, n + 1, n, prefix)
        table.advance(0, n - 1)
        table.advance(n - 1, 1)
        tables.append(table)
    return tables


def check_stored(arrays, before, new, slots) -> None:
    """New rows are in their slots, and nothing else of the pool has changed."""
    for array, old, rows in zip(arrays.all, before, new, strict=True):
        assert mx.array_equal(array[:, mx.array(slots)], rows[:, :, 0].swapaxes(0, 1))
        changed = (array != old).any(axis=(0, 2))
        assert {slot for slot, is_changed in enumerate(changed.tolist()) if is_changed} <= set(slots)


def decode_by_cuda(*arguments) -> mx.array:
    counters = Counters()
    out = cuda_decode(*arguments, counters)
    mx.eval(out)
    assert not counters.zeros.any()
    return out


def rows_together(k_dim, shared) -> int:
    """Rows in a piece of work, at most."""
    return 4 * (16 // shared)


def error(
    dtype,
    dims,
    shared,
    lengths,
    rule,
    block_size,
    forks=None,
    with_sinks=False,
    decode=decode_by_cuda,
    rows_together=rows_together,
    steep=1.0,
) -> float:
    """The largest difference of the output to the reference, relative to the largest output; keys are times `steep`."""
    heads, (k_dim, v_dim) = 3, dims
    blocks = sum(-(-n // block_size) + 1 for n in lengths) + 3
    pool = Pool(Group(rule, (KVLayer("x", heads, k_dim, v_dim, dtype),)), blocks, block_size)
    arrays = pool.layers[0]
    mx.random.seed(sum(lengths))
    arrays.k = (mx.random.normal(arrays.k.shape) * steep).astype(dtype)
    arrays.v = mx.random.normal(arrays.v.shape).astype(dtype)
    tables = tables_of(pool, lengths, forks)
    step = GroupStep(tables, [n - 1 for n in lengths], [1] * len(lengths), None)
    queries = mx.random.normal((len(lengths), heads * shared, 1, k_dim)).astype(dtype)
    sinks = mx.random.normal((heads * shared,)).astype(dtype) if with_sinks else None
    reach = step.reach(None)
    # What the kernels store, they must also read.
    new = tuple(mx.random.normal((len(lengths), heads, 1, dim)).astype(dtype) for dim in dims)
    before = [array + 0 for array in arrays.all]
    mx.eval(arrays.all, new, before)
    if forks:
        kernels = (Kernel(heads, most, 264, 396, 2) for most in (rows_together(k_dim, shared), 1))
        together, apart = (step.grid.work(kernel).table for kernel in kernels)
        assert int(together[3] - together[2]) < int(apart[3] - apart[2])
    out = decode(queries, arrays, new, step.grid, step.positions, reach, k_dim**-0.5, sinks)
    mx.eval(out)
    slots = [
        t.blocks[(n - 1) // block_size] * block_size + (n - 1) % block_size
        for t, n in zip(tables, lengths, strict=True)
    ]
    check_stored(arrays, before, new, slots)

    wanted = []
    for row, (table, n) in enumerate(zip(tables, lengths, strict=True)):
        positions = [i * block_size + o for i in table.live() for o in range(block_size)]
        slots = [table.blocks[p // block_size] * block_size + p % block_size for p in positions]
        k, v = (a[:, mx.array(slots)].astype(mx.float32) for a in (arrays.k, arrays.v))
        q = queries[row].reshape(heads, shared, k_dim).astype(mx.float32) * k_dim**-0.5
        scores = (q[:, :, None] * k[:, None]).sum(axis=-1)
        scores = mx.where(visible(rule, None, n - 1, mx.array(positions)), scores, -mx.inf)
        if sinks is not None:
            column = sinks.astype(mx.float32).reshape(heads, shared, 1)
            scores = mx.concatenate([scores, column], axis=-1)
            v = mx.concatenate([v, mx.zeros_like(v[:, :1])], axis=1)
        weights = mx.softmax(scores, axis=-1)
        wanted.append((weights[..., None] * v[:, None]).sum(axis=2).reshape(heads * shared, 1, v_dim))
    wanted = mx.stack(wanted)
    return float(mx.abs(out.astype(mx.float32) - wanted).max() / mx.abs(wanted).max())


def is_small(case) -> bool:
    _, dims, _, lengths, *_ = case
    return sum(lengths) * max(dims) <= 2**20


SOME = few_on_cpu(list(itertools.product(CASES, (False, True))), 7, lambda case: is_small(case[0]))
SOME_SHARED = few_on_cpu(SHARED_CASES, 7, lambda case: case[1] == (64, 64) or len(case[3]) < 10)


@pytest.mark.parametrize(("case", "with_sinks"), SOME, ids=str)
def test_kernels_attend_like_the_reference(cuda, case, with_sinks):
    dtype, dims, _, _, _, block_size = case
    assert CudaPlain.supports(KVLayer("x", 3, *dims, dtype), block_size, "cuda")
    assert error(*case, with_sinks=with_sinks) < (0.01 if dtype == mx.bfloat16 else 0.002)


@pytest.mark.parametrize("case", SOME_SHARED, ids=str)
def test_rows_that_share_blocks_attend_like_the_reference(cuda, case, monkeypatch):
    monkeypatch.setattr(pairs, "SHARED", 256)
    assert error(*case, with_sinks=True) < (0.01 if case[0] == mx.bfloat16 else 0.002)


@pytest.mark.parametrize(("dims", "steep"), [((64, 64), 40.0), ((96, 64), 1.0)])
def test_rows_together_with_steep_scores_and_keys_of_odd_chunks(cuda, dims, steep, monkeypatch):
    """Sums are rescaled only where scores rise by much; a key of 96 is no multiple of what a warp copies at a time."""
    monkeypatch.setattr(pairs, "SHARED", 256)
    lengths, forks = (340, 350, 290, 80), {1: (0, 320), 2: (1, 272)}
    assert error(mx.float16, dims, 4, lengths, Rule(), 16, forks, steep=steep) < 0.002


def test_kernels_are_not_used_without_the_device():
    layer = KVLayer("x", 2, 64, 64, mx.bfloat16)
    assert CudaPlain.supports(layer, 16, "cuda")
    assert not CudaPlain.supports(layer, 16, "cpu") and not CudaPlain.supports(layer, 16, "metal")
    assert (kind() == "cuda") == mx.cuda.is_available()
