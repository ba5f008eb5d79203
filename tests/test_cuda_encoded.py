"""The CUDA kernel over encoded blocks against attention written out in float32: on a CUDA device, or a few of the cases
on the CPU.
"""

import itertools

import mlx.core as mx
import pytest

from encoded_reference import Case
from kernels.fixtures import few_on_cpu
from onekv.memory import pairs
from onekv.memory.attention.base import Call
from onekv.memory.attention.cuda.encoded import CudaEncoded
from onekv.memory.attention.layer import LayerKV
from onekv.memory.attention.turns import Turns
from onekv.memory.formats import parse
from onekv.memory.formats.centre import Rope
from onekv.memory.layout import KVLayer, Rule

DIM = 128
FORMATS = ("q8", "q6", "q5", "q4", "tq4", "tq3", "tq2", "k8v4", "k5v4", "ktq4vq8")
SLOW = tuple(1.5**i for i in range(64))
# Each shape with another dtype, block size, number of query heads and RoPE: a kernel is compiled for every case.
SHAPES = (
    (mx.bfloat16, 4, (5000, 1, 64, 65, 1500), Rule(), 64, True, Rope(DIM, False, 10000.0)),
    (mx.float16, 16, (1,), Rule(), 16, False, None),
    (mx.bfloat16, 1, (900, 30), Rule(window=100), 16, False, Rope(64, True, 500.0, 0.5)),
    (mx.float16, 7, (900, 333), Rule(window=200, keep=4), 64, True, Rope(DIM, False, None, 1.0, SLOW)),
)
CASES = [(kv_format, *shape) for kv_format, shape in itertools.product(FORMATS, SHAPES)]


def error(kv_format, dtype, shared, lengths, rule, block_size, with_sinks, rope, alike=False, **rows) -> float:
    """`alike`: tokens of one sequence are read as each would be alone."""
    case = Case(kv_format, dtype, shared, lengths, rule, block_size, with_sinks, rope, DIM, **rows)
    assert CudaEncoded.supports(case.stored, block_size, "cuda")
    backend = CudaEncoded(LayerKV(case.stored, case.arrays, Turns(), "cuda"))
    out = backend.decode(Call(case.step, case.queries, DIM**-0.5, None, case.sinks), case.new)
    mx.eval(out)
    if rows:
        (work,) = case.step.grid._works.values()
        assert work.shape.together is (rule.window is None and not alike) and work.shape.several is alike
    case.check_stored()
    return case.error(out)


@pytest.mark.parametrize("case", few_on_cpu(CASES, 3, lambda case: True), ids=str)
def test_the_kernel_attends_like_the_reference(cuda, case):
    assert error(*case) < (0.015 if case[1] == mx.bfloat16 else 0.003)


# Rows that share 1,000 tokens, or 700 of those and 300 more; of one of them, several tokens are new.
BRANCHES = {"forks": {row: (0, 1000) if row < 5 else (row - 3, 700) for row in range(1, 9)}}
TOGETHER = [
    (kv_format, *shape)
    for kv_format, shape in itertools.product(
        FORMATS,
        (
            (mx.bfloat16, 4, tuple(1100 + 37 * row for row in range(9)), Rule(), 64, True, SHAPES[0][-1], BRANCHES),
            (mx.float16, 7, (1100, 1137, 1100), Rule(), 16, False, SHAPES[3][-1], {"forks": {1: (0, 1024)}}),
            (mx.float16, 2, (700, 1500), Rule(), 16, True, SHAPES[0][-1], {"counts": (9, 1)}),
            (mx.bfloat16, 8, (900, 333), Rule(window=200, keep=4), 64, False, SHAPES[2][-1], {"counts": (3, 4)}),
        ),
    )
]


@pytest.mark.parametrize("case", few_on_cpu(TOGETHER, 3, lambda case: True), ids=str)
def test_rows_that_read_together_attend_like_the_reference(cuda, case, monkeypatch):
    """Of a window that has moved on nothing is shared: each row reads for itself what was stored for all."""
    *shape, rows = case
    monkeypatch.setattr(pairs, "SHARED", 256)
    most = 0.015 if case[1] == mx.bfloat16 else 0.003
    with pairs.reading_together():
        assert error(*shape, **rows) < most
    if "counts" in rows and shape[4].window is None:
        assert error(*shape, **rows, alike=True) < most


def test_the_kernel_is_not_used_without_the_device_or_for_other_shapes():
    stored = KVLayer("layer 0", 2, DIM, DIM, mx.bfloat16, parse("q4"))
    assert CudaEncoded.supports(stored, 16, "cuda")
    assert not CudaEncoded.supports(stored, 16, "cpu") and not CudaEncoded.supports(stored, 16, "metal")
    assert not CudaEncoded.supports(KVLayer("layer 0", 2, 64, 64, mx.bfloat16, parse("q4")), 16, "cuda")
    assert not CudaEncoded.supports(KVLayer("layer 0", 2, DIM, DIM, mx.bfloat16, parse("kautov4")), 16, "cuda")
