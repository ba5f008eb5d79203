"""The compiled loops over plain blocks on CPU against attention written out in float64; what they do to memory."""

import mlx.core as mx
import numpy as np
import pytest

from onekv import loops
from onekv.memory.attention.base import Call
from onekv.memory.attention.layer import LayerKV
from onekv.memory.attention.numba import plain
from onekv.memory.attention.numba.plain import NumbaPlain, plain_decode
from onekv.memory.attention.turns import Turns
from onekv.memory.formats import parse
from onekv.memory.layout import Group, KVLayer, Rule
from onekv.memory.pool import Pool
from onekv.memory.pool.table import Table
from onekv.memory.step import GroupStep, visible

HEADS = 3
ALL = Rule()
ERRORS = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}


class Case:
    """A pool that is NaN where no row may read, and a step of one token for rows of these `lengths`.

    Row i begins with the first `forks[i][1]` tokens of row `forks[i][0]`, if there are forks.
    """

    def __init__(self, lengths, dtype=mx.float32, group=3, dims=(64, 64), rule=ALL, size=16, sinks=False, forks=()):
        rng = np.random.default_rng(sum(lengths))
        self.lengths, self.rule, self.size, self.group = lengths, rule, size, group
        self.layer = KVLayer("layer 0", HEADS, *dims, dtype)
        pool = Pool(Group(rule, (self.layer,)), sum(-(-n // size) + 1 for n in lengths) + 3, size)
        self.tables, shared = [], {i: fork for i, fork in enumerate(forks) if fork is not None}
        for i, length in enumerate(lengths):
            parent, tokens = shared.get(i, (0, 0))
            table = Table(pool, length, length, self.tables[parent].blocks[: tokens // size] if tokens else None)
            # As prefill does it, and then a step of one token, which forgets what is behind a window.
            table.advance(0, length - 1)
            table.advance(length - 1, 1)
            self.tables.append(table)
        self.step = GroupStep(self.tables, [n - 1 for n in lengths], [1] * len(lengths), None)
        self.arrays = pool.layers[0]
        self.read = np.zeros(pool.blocks * size, bool)
        for row in range(len(lengths)):
            self.read[self.slots(row)] = True
        for i, dim in enumerate(dims):
            numbers = rng.normal(size=(HEADS, len(self.read), dim)) * 2
            numbers[:, ~self.read] = np.nan
            self.arrays.all[i] = mx.array(numbers.astype(np.float32)).astype(dtype)
        shapes = ((HEADS * group, dims[0]), (HEADS, dims[0]), (HEADS, dims[1]))
        made = [mx.array(rng.normal(size=(len(lengths), n, 1, dim)).astype(np.float32)) for n, dim in shapes]
        self.queries, *self.new = (array.astype(dtype) for array in made)
        self.sinks = mx.array(rng.normal(size=HEADS * group).astype(np.float32)) if sinks else None
        mx.eval(self.arrays.all, self.queries, self.new)
        self.before = self.stored()
        self.scale = dims[0] ** -0.5

    def stored(self):
        """The bytes of the pool."""
        return [np.array(array.view(mx.uint8)) for array in self.arrays.all]

    def positions(self, row):
        own = np.concatenate([i * self.size + np.arange(self.size) for i in self.tables[row].live()])
        return own[visible(self.rule, None, self.lengths[row] - 1, own)]

    def slots(self, row):
        own = self.positions(row)
        return np.array(self.tables[row].blocks)[own // self.size] * self.size + own % self.size

    def new_slots(self):
        return [self.slots(row)[-1] for row in range(len(self.lengths))]

    def decode(self, new=True):
        kv = LayerKV(self.layer, self.arrays, Turns(), "cpu")
        call = Call(self.step, self.queries, self.scale, None, self.sinks)
        out = NumbaPlain(kv).decode(call, tuple(self.new) if new else None)
        mx.eval(out)
        return out

    def expected(self):
        """From what is stored."""
        k, v, q = (np.array(array.astype(mx.float32), np.float64) for array in (*self.arrays.all, self.queries))
        out = np.empty((*q.shape[:2], v.shape[2]))
        for row, query in np.ndindex(q.shape[:2]):
            slots, head = self.slots(row), query // self.group
            scores = k[head, slots] @ q[row, query, 0] * self.scale
            sink = [float(self.sinks[query])] if self.sinks is not None else []
            weights = np.exp(scores - max([scores.max(), *sink]))
            total = weights.sum() + sum(np.exp(s - max([scores.max(), *sink])) for s in sink)
            out[row, query] = weights @ v[head, slots] / total
        return out

    def check(self):
        out = self.decode()
        assert out.shape == (*self.queries.shape[:3], self.layer.v_dim) and out.dtype == self.queries.dtype
        found, expected = np.array(out.astype(mx.float32))[:, :, 0], self.expected()
        assert np.abs(found - expected).max() < ERRORS[self.layer.dtype] * np.abs(expected).max()
        return out

    def check_stored(self):
        """The new tokens bit for bit, and nothing else."""
        slots = self.new_slots()
        for array, before, new in zip(self.stored(), self.before, self.new, strict=True):
            wanted = np.array(new.view(mx.uint8))[:, :, 0].swapaxes(0, 1)
            assert np.array_equal(array[:, slots], wanted)
            rest = np.delete(np.arange(array.shape[1]), slots)
            assert np.array_equal(array[:, rest], before[:, rest])


RAGGED = (900, 1, 64, 65, 333, 16)
CASES = {
    "one": {"lengths": (700,)},
    "first token": {"lengths": (1,)},
    "ragged": {"lengths": RAGGED, "size": 64},
    "one query": {"lengths": RAGGED, "group": 1},
    "four queries": {"lengths": RAGGED, "group": 4},
    "nine queries": {"lengths": RAGGED, "group": 9},
    "many queries": {"lengths": (200, 35), "group": 35},
    "dims": {"lengths": (300, 20), "dims": (64, 128)},
    "wide keys": {"lengths": (300, 20), "dims": (192, 128), "group": 9},
    "odd dims": {"lengths": (300, 20), "dims": (20, 35)},
    "odd dims, nine queries": {"lengths": (300, 20), "dims": (35, 20), "group": 9},
    "dims of 80": {"lengths": (300, 20), "dims": (80, 80), "sinks": True},
    "sinks": {"lengths": RAGGED, "sinks": True},
    "window": {"lengths": RAGGED, "rule": Rule(window=100), "sinks": True},
    "short window": {"lengths": RAGGED, "rule": Rule(window=1)},
    "kept": {"lengths": RAGGED, "rule": Rule(window=100, keep=4), "group": 9},
    "kept blocks": {"lengths": RAGGED, "rule": Rule(window=50, keep=70), "size": 64, "sinks": True},
}
FORKS = {
    "two rows": ((500, 200), (None, (0, 160))),
    "all rows": ((300, 257, 258, 259, 260, 261, 262, 263), (None, *[(0, 256)] * 7)),
    "branches of branches": ((400, 390, 500, 200, 330), (None, (0, 64), (1, 320), (1, 192), (0, 320))),
    "one beside": ((300, 500, 310), (None, None, (0, 256))),
    "shorter than a piece": ((100, 90), (None, (0, 64))),
}


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
def test_the_loops_attend_and_store_like_the_reference(shape, dtype):
    case = Case(dtype=dtype, **shape)
    out = case.check()
    case.check_stored()
    # Attending again, without a new token, changes nothing and gives the same.
    assert mx.array_equal(case.decode(new=False), out)
    case.check_stored()


@pytest.mark.parametrize(
    "dtype, group, size", [(mx.float32, 3, 16), (mx.float32, 9, 64), (mx.bfloat16, 1, 16)], ids=str
)
@pytest.mark.parametrize("lengths, forks", FORKS.values(), ids=FORKS)
def test_rows_that_share_blocks(lengths, forks, dtype, group, size, monkeypatch):
    case = Case(lengths, dtype, group, size=size, forks=forks, sinks=True)
    together = case.check().astype(mx.float32)
    case.check_stored()
    work = [work for work in case.step.grid._derived.values() if (work.pieces[:, 3] > 1).any()]
    assert len(work) == 1 and work[0].together.any()
    monkeypatch.setattr(plain, "LEAST", 0)
    apart = case.check().astype(mx.float32)
    assert float(mx.abs(together - apart).max()) < ERRORS[dtype] * float(mx.abs(apart).max())


@pytest.mark.parametrize("forks", [None, FORKS["branches of branches"]])
@pytest.mark.parametrize("group", [3, 9])
def test_threads_change_nothing(forks, group, monkeypatch):
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(plain, "threads", lambda threads=threads: threads)
        case = Case(forks[0], group=group, forks=forks[1]) if forks else Case((1500, 700, 3), group=group)
        found.append(case.decode())
        (work,) = case.step.grid._derived.values()
        assert len(work.shares) == min(threads, plain.threads()) + 1
    assert mx.array_equal(*found)


def test_a_row_that_ends_inside_of_what_it_shares_reads_alone():
    case = Case((70, 100), forks=(None, (0, 64)))
    case.step.lengths[1] = 40
    case.lengths = (70, 41)
    case.check()


def test_what_is_not_a_number_is_not_lost():
    """In the row and the head where it is, and in no other."""
    case = Case((100, 90))
    values = np.asarray(case.arrays.v)
    values[1, case.slots(0)[5], 7] = np.nan
    del values
    case.queries[1, 0, 0, 3] = mx.nan
    nan = np.isnan(np.array(case.decode())[:, :, 0])
    wanted = np.zeros_like(nan)
    wanted[0, 3:6, 7] = wanted[1, 0] = True
    assert np.array_equal(nan, wanted)


def test_work_is_shared_out_evenly():
    assert plain._shares(np.full(6, 1000), 2).tolist() == [0, 3, 6]
    assert plain._shares(np.array([5000, 1000, 1000, 1000, 1000, 1000]), 2).tolist() == [0, 1, 6]
    assert plain._shares(np.full(3, 100), 2).tolist() == [0, 3]


def test_all_dtypes_and_dims_use_what_was_compiled_once():
    from onekv.memory.attention.numba.plain_kernel import decode

    for dtype in ERRORS:
        Case((30, 20), dtype).decode()
    assert len(decode.overloads) == 1


def test_numpy_in_and_out():
    case = Case((50, 20))
    grid, lengths = case.step.grid, case.step.lengths
    q, k, v = (np.asarray(array) for array in (case.queries, *case.arrays.all))
    new = (np.asarray(array)[:, :, 0] for array in case.new)
    out = plain_decode(q[:, :, 0], k, v, *new, grid, lengths, case.step.reach(None), case.scale, None)
    assert isinstance(out, np.ndarray) and np.abs(out - case.expected()).max() < 1e-5


def test_only_for_plain_layers_on_cpu(monkeypatch):
    layer = KVLayer("layer 0", 2, 64, 64, mx.bfloat16)
    assert NumbaPlain.supports(layer, 64, "cpu")
    # By steps outside of MLX, or by MLX.
    assert not NumbaPlain.supports(KVLayer("layer 0", 2, 64, 64, mx.float32), 64, "cpu")
    assert not NumbaPlain.supports(layer, 64, "metal") and not NumbaPlain.supports(layer, 64, "cuda")
    assert not NumbaPlain.supports(KVLayer("layer 0", 2, 64, 0, mx.bfloat16), 64, "cpu")
    assert not NumbaPlain.supports(KVLayer("layer 0", 2, 64, 64, mx.bfloat16, parse("q8")), 64, "cpu")
    monkeypatch.setattr(loops, "why_not", lambda: "no")
    assert not NumbaPlain.supports(layer, 64, "cpu")


def test_the_pool_stays_where_it_is():
    """No view is left, so that MLX's next write is in place."""
    case = Case((50, 20))
    places = [np.asarray(array).ctypes.data for array in case.arrays.all]
    case.decode()
    for i in range(2):
        case.arrays.all[i][:, 0] = 1.0
    mx.eval(case.arrays.all)
    assert [np.asarray(array).ctypes.data for array in case.arrays.all] == places
