"""The CUDA kernel over encoded blocks against attention written out in float32. Runs where there is such a device."""

import itertools

import mlx.core as mx
import pytest

from encoded_reference import Case
from onekv.memory.attention.cuda.encoded import CudaEncoded, encoded_decode
from onekv.memory.attention.turns import Turns
from onekv.memory.device import kind
from onekv.memory.formats import parse
from onekv.memory.formats.centre import Rope
from onekv.memory.layout import KVLayer, Rule

DIM = 128
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


def error(kv_format, dtype, shared, lengths, rule, block_size, with_sinks, rope) -> float:
    case = Case(kv_format, dtype, shared, lengths, rule, block_size, with_sinks, rope, DIM)
    assert CudaEncoded.supports(case.stored, block_size, kind())
    turns = Turns().starts(rope, DIM, max(lengths)) if rope else None
    where = (case.step.grid, case.step.positions, case.step.reach(None))
    out = encoded_decode(case.queries, case.arrays, case.stored, case.new, *where, DIM**-0.5, case.sinks, turns)
    mx.eval(out)
    case.check_stored()
    return case.error(out)


@pytest.mark.skipif(not mx.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_attends_like_the_reference(case):
    assert error(*case) < (0.015 if case[1] == mx.bfloat16 else 0.003)


def test_the_kernel_is_not_used_without_the_device_or_for_other_shapes():
    stored = KVLayer("layer 0", 2, DIM, DIM, mx.bfloat16, parse("q4"))
    assert CudaEncoded.supports(stored, 16, "cuda")
    assert not CudaEncoded.supports(stored, 16, "cpu") and not CudaEncoded.supports(stored, 16, "metal")
    assert not CudaEncoded.supports(KVLayer("layer 0", 2, 64, 64, mx.bfloat16, parse("q4")), 16, "cuda")
    assert not CudaEncoded.supports(KVLayer("layer 0", 2, DIM, DIM, mx.bfloat16, parse("kautov4")), 16, "cuda")
