"""What CUDA kernels do besides attention in a compiled step: RoPE of queries and new keys, and rows of padding.

On a CUDA device, or on the CPU.
"""

from typing import Any

import mlx.core as mx
import pytest

from onekv.memory import pairs
from onekv.memory.attention.base import Call
from onekv.memory.attention.cuda.plain import CudaPlain, _unturned, cuda_store
from onekv.memory.attention.layer import LayerKV
from onekv.memory.attention.turns import Turns
from onekv.memory.layout import Group, KVLayer, Rule
from onekv.memory.pool import Pool
from onekv.memory.step import GroupStep
from onekv.traces import watching
from test_cuda import decode_by_cuda, tables_of

HEADS, SHARED, SIZE = 3, 4, 16
LENGTHS = (300, 1, 33)


def rope(x, dims, traditional, offset, freqs=None):
    base = None if freqs is not None else 10_000.0
    return mx.fast.rope(x, dims, traditional=traditional, base=base, scale=0.5, offset=offset, freqs=freqs)


class Setting:
    """Rows of some lengths, the last token of each new; with `several`, the last rows are tokens of one sequence."""

    def __init__(self, dim: int, several: bool = False, dtype: mx.Dtype = mx.float16) -> None:
        mx.random.seed(dim)
        blocks = sum(n // SIZE + 3 for n in LENGTHS)
        pool = Pool(Group(Rule(), (KVLayer("x", HEADS, dim, 64, dtype),)), blocks, SIZE)
        arrays = pool.layers[0]
        arrays.k, arrays.v = (mx.random.normal(array.shape).astype(dtype) for array in arrays.all)
        own = tables_of(pool, LENGTHS)
        rows = [(table, n - 1) for table, n in zip(own, LENGTHS, strict=True)]
        if several:
            rows.insert(2, (own[2], LENGTHS[2] - 2))
        self.step = GroupStep([table for table, _ in rows], [at for _, at in rows], [1] * len(rows), None)
        self.queries = mx.random.normal((len(rows), HEADS * SHARED, 1, dim)).astype(dtype)
        self.new = tuple(mx.random.normal((len(rows), HEADS, 1, wide)).astype(dtype) for wide in (dim, 64))
        mx.eval(arrays.all, self.queries, self.new)
        self.arrays, self.slots = arrays, self.step.row_slots
        self.backend = CudaPlain(LayerKV(pool.group.layers[0], arrays, Turns(), "cuda"))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("dim", "dims", "traditional", "with_freqs"),
    [(128, 128, False, False), (128, 64, False, True), (64, 64, True, False), (96, 32, True, True)],
)
def test_the_kernel_turns_queries_and_new_keys(cuda, dim, dims, traditional, with_freqs, several):
    freqs = mx.exp(mx.arange(dims // 2) / 7) if with_freqs else None
    outs, stored = [], []
    for fused in (False, True):
        case = Setting(dim, several)
        with watching() as notes:
            queries, keys = (
                rope(x, dims, traditional, case.step.positions, freqs) for x in (case.queries, case.new[0])
            )
            if not fused:
                notes.clear()
            assert (_unturned(case.step, queries, (keys, case.new[1])) is not None) is fused
            out = case.backend.decode(Call(case.step, queries, dim**-0.5, None, None), (keys, case.new[1]))
        mx.eval(out)
        outs.append(out.astype(mx.float32))
        stored.append(case.arrays.k[:, case.slots].astype(mx.float32))
    assert mx.abs(outs[1] - outs[0]).max() < 0.002 * mx.abs(outs[0]).max()
    # As they would be turned in float32, up to the last bit.
    exact = rope(case.new[0].astype(mx.float32), dims, traditional, case.step.positions, freqs)
    assert mx.abs(stored[1] - exact[:, :, 0].swapaxes(0, 1)).max() <= 2**-10
    assert not mx.allclose(stored[0], case.new[0][:, :, 0].swapaxes(0, 1).astype(mx.float32))


def test_only_what_was_turned_alike_is_turned_by_the_kernel():
    case = Setting(64)
    at, new = case.step.positions, case.new[1]

    def found(queries, keys) -> Any:
        return _unturned(case.step, queries, (keys, new))

    with watching():
        queries, keys = rope(case.queries, 64, False, at), rope(case.new[0], 64, False, at)
        turn = found(queries, keys)
        assert turn.queries is case.queries and turn.new == (case.new[0], new)
        # All layers share the table.
        assert found(rope(case.queries, 64, False, at), keys).angles is turn.angles
        assert _unturned(case.step, queries, None).new is None
        assert found(queries, case.new[0]) is None and found(case.queries, keys) is None
        assert found(queries * 1, keys) is None
        assert found(queries, rope(case.new[0], 64, True, at)) is None
        assert found(queries, rope(case.new[0], 32, False, at)) is None
        # Halves of 16 are not what a lane has.
        assert found(rope(case.queries, 32, False, at), rope(case.new[0], 32, False, at)) is None
        # At positions of somebody else.
        other = at + 0
        assert found(rope(case.queries, 64, False, other), rope(case.new[0], 64, False, other)) is None
    assert found(queries, keys) is None


class Padded:
    """A grid with rows of padding behind its own."""

    def __init__(self, grid, rows: int) -> None:
        self._grid, self._rows, self.block_size = grid, rows, grid.block_size

    def work(self, kernel):
        return self._grid.work(kernel, self._rows)


def check_padding(store, decode, shared: bool) -> None:
    """Rows of padding read and store nothing, by these functions of a backend."""
    case = Setting(64, several=shared)
    rows = len(case.queries)
    padding = [(0, 8 - rows), (0, 0), (0, 0), (0, 0)]
    queries, new_k, new_v = (mx.pad(array, padding, constant_values=7) for array in (case.queries, *case.new))
    positions = mx.pad(case.step.positions, (0, 8 - rows), constant_values=-1)
    before = [array + 0 for array in case.arrays.all]
    mx.eval(before)
    if shared:
        slots = mx.pad(case.slots, (0, 8 - rows), constant_values=-1)
        positions, new = store(case.arrays, (new_k, new_v), slots, positions), None
        assert positions.tolist() == [*case.step.positions.tolist(), *[-1] * (8 - rows)]
    else:
        new = (new_k, new_v)
    grid = Padded(case.step.grid, 8)
    out = decode(queries, case.arrays, new, grid, positions, case.step.reach(None), 0.125, None)
    mx.eval(out)
    assert not out[rows:].any() and out[:rows].any(axis=(1, 2, 3)).all()
    for array, old, own in zip(case.arrays.all, before, case.new, strict=True):
        assert mx.array_equal(array[:, case.slots], own[:, :, 0].swapaxes(0, 1))
        changed = (array != old).any(axis=(0, 2)).tolist()
        assert {slot for slot, is_changed in enumerate(changed) if is_changed} <= set(case.slots.tolist())
    grid = Padded(case.step.grid, rows)
    alone = decode(case.queries, case.arrays, None, grid, case.step.positions, case.step.reach(None), 0.125, None)
    assert mx.abs(out[:rows].astype(mx.float32) - alone.astype(mx.float32)).max() < 0.002


@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_padding_read_and_store_nothing(cuda, monkeypatch, shared):
    monkeypatch.setattr(pairs, "SHARED", SIZE if shared else 0)
    check_padding(cuda_store, decode_by_cuda, shared)


def test_layers_share_no_counters():
    """Those of a draft model run beside the target's; each has to know which of its own thread blocks is last."""
    one, other = (Setting(64).backend._counters for _ in range(2))
    assert one is not other and one.take(5) is not other.take(5)
    assert one.take(3) is one.take(5) and one.take(9).tolist() == [0] * 9
