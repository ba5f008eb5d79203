"""The kernels for Metal against attention written out in float32: the cases of the CUDA kernels, and those that only
these have. On a GPU as what it takes, Metal's language or CUDA's, and a few of the cases as both on the CPU.
"""

import itertools
from functools import partial

import mlx.core as mx
import pytest

import test_cuda
import test_cuda_fused
import test_cuda_spread
from kernels.fixtures import few_on_cpu
from onekv.memory import pairs
from onekv.memory.attention.metal.backend import MetalPlain
from onekv.memory.attention.metal.language import LANGUAGES
from onekv.memory.attention.metal.plain import decode, most_queries, rows_together, store
from onekv.memory.device import kind
from onekv.memory.formats import parse
from onekv.memory.layout import KVLayer, Rule
from test_cuda import is_small

ERRORS = {mx.float32: 2e-5, mx.float16: 0.002, mx.bfloat16: 0.01}
# Head dims that are no multiple of 32 or 64, every number of queries that a warp may have, one that fills a block.
CASES = [
    *test_cuda.CASES,
    *(
        (dtype, dims, shared, lengths, rule, block_size)
        for (dims, shared), dtype, ((lengths, rule), block_size) in itertools.product(
            (
                ((80, 80), 1),
                ((96, 96), 2),
                ((64, 128), 3),
                ((192, 192), 5),
                ((256, 72), 16),
                ((128, 256), 32),
                ((8, 8), 7),
            ),
            (mx.float32, mx.bfloat16, mx.float16),
            (
                (((700,), Rule()), 64),
                (((1, 64, 65, 333), Rule()), 8),
                (((900, 30), Rule(window=100)), 16),
                (((900, 333), Rule(window=200, keep=4)), 48),
            ),
        )
    ),
]
SHARED_CASES = [
    *test_cuda.SHARED_CASES,
    *(
        (mx.float32, dims, shared, *case[3:])
        for case, (dims, shared) in zip(
            test_cuda.SHARED_CASES[:6] * 2,
            itertools.cycle((((80, 96), 5), ((128, 128), 8), ((192, 64), 3))),
            strict=False,
        )
    ),
]
SOME = few_on_cpu(list(itertools.product(CASES, (False, True))), 21, lambda case: is_small(case[0]))
SOME_SHARED = few_on_cpu(SHARED_CASES, 7, lambda case: case[1] == (64, 64) or len(case[3]) < 10)

SOME_SPREAD = few_on_cpu(test_cuda_spread.CASES, 5, lambda case: max(case[2][0]) < 1000)


def of(gpu) -> dict:
    return {"decode": partial(decode, LANGUAGES[gpu]), "rows_together": rows_together}


@pytest.mark.parametrize(("case", "with_sinks"), SOME, ids=str)
def test_kernels_attend_like_the_reference(gpu, case, with_sinks):
    dtype, dims, _, _, _, block_size = case
    assert MetalPlain.supports(KVLayer("x", 3, *dims, dtype), block_size, "metal")
    assert test_cuda.error(*case, with_sinks=with_sinks, **of(gpu)) < ERRORS[dtype]


@pytest.mark.parametrize("case", SOME_SHARED, ids=str)
def test_rows_that_share_blocks_attend_like_the_reference(gpu, case, monkeypatch):
    monkeypatch.setattr(pairs, "SHARED", 256)
    assert test_cuda.error(*case, with_sinks=True, **of(gpu)) < ERRORS[case[0]]


@pytest.mark.parametrize("case", SOME_SPREAD, ids=str)
def test_rows_of_one_sequence_attend_like_the_reference(gpu, case):
    assert test_cuda_spread.error(*case, MetalPlain, gpu) < ERRORS[case[0]]


@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_padding_read_and_store_nothing(gpu, monkeypatch, shared):
    monkeypatch.setattr(pairs, "SHARED", test_cuda_fused.SIZE if shared else 0)
    test_cuda_fused.check_padding(partial(store, LANGUAGES[gpu]), of(gpu)["decode"], shared)


def test_what_nobody_may_read_may_be_anything(gpu):
    """Slots that are not written yet, or fell out of a window, are not multiplied with zeros: they are not read."""
    poisoned = partial(_with_nan, of(gpu)["decode"])
    for lengths, rule in (((300, 33), Rule()), ((300,), Rule(window=50, keep=3))):
        case = (mx.float32, (64, 96), 3, lengths, rule, 16)
        assert test_cuda.error(*case, decode=poisoned, rows_together=rows_together) < ERRORS[mx.float32]


def _with_nan(decode, queries, arrays, new, grid, lengths, reach, scale, sinks):
    """`decode`, while all slots that no row reads are NaN."""
    held = [array + 0 for array in arrays.all]
    read = set()
    for row, at in enumerate(lengths.tolist()):
        for slot, position in zip(_slots(grid, row), grid.positions(row).tolist(), strict=True):
            if position < at and (position > at - reach[0] or position < reach[1]):
                read.add(slot)
    unread = mx.array([slot not in read for slot in range(held[0].shape[1])])[None, :, None]
    arrays.all = [mx.where(unread, mx.nan, array) for array in held]
    mx.eval(arrays.all)
    out = decode(queries, arrays, new, grid, lengths, reach, scale, sinks)
    mx.eval(out)
    # What was stored stays, the rest is as it was.
    arrays.all = [mx.where(mx.isnan(array), old, array) for array, old in zip(arrays.all, held, strict=True)]
    mx.eval(arrays.all)
    return out


def _slots(grid, row) -> list[int]:
    ids, _ = grid.numbers
    return [int(block) * grid.block_size + offset for block in ids[row] for offset in range(grid.block_size)]


def test_shapes_that_the_kernels_take():
    def supports(k_dim=64, v_dim=64, dtype=mx.bfloat16, device="metal", kv_format="auto", heads=2):
        return MetalPlain.supports(KVLayer("layer 0", heads, k_dim, v_dim, dtype, parse(kv_format)), 16, device)

    assert supports() and supports(256, 80) and supports(dtype=mx.float32)
    assert not supports(264) and not supports(64, 60) and not supports(0) and not supports(dtype=mx.int32)
    assert not supports(device="cpu") and not supports(device="cuda") and not supports(kv_format="q8")
    assert not supports(heads=0)
    assert [most_queries(dim) for dim in (64, 128, 136, 256)] == [32, 32, 16, 16]
    assert rows_together(128, 4) == 8 and rows_together(256, 9) == 1
    assert (kind() == "metal") == (mx.metal.is_available() and mx.default_device() == mx.gpu)
