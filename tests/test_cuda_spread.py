"""Several tokens of one sequence in one step on CUDA: stored first, then each reads up to its own place. On a CUDA
device, or the kernels alone, and of these a few of the cases, on the CPU.
"""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from kernels.fixtures import few_on_cpu
from onekv.engine import Request
from onekv.engine.params import Sampling
from onekv.engine.speculation.log import Match
from onekv.memory.attention.base import Call
from onekv.memory.attention.cuda.plain import CudaPlain
from onekv.memory.attention.layer import LayerKV
from onekv.memory.attention.turns import Turns
from onekv.memory.compiled import CompiledDecode
from onekv.memory.layout import Group, KVLayer, Rule
from onekv.memory.pool import Pool
from onekv.memory.step import GroupStep, visible
from onekv.models.draft import WithDraft
from stock import engine_of, small_llama
from test_cuda import check_stored, tables_of

on_device = pytest.mark.skipif(not mx.cuda.is_available(), reason="no CUDA device")

CASES = list(
    itertools.product(
        (mx.bfloat16, mx.float16),
        (((128, 128), 4), ((64, 64), 9), ((256, 256), 8)),
        (((700,), (5,), Rule()), ((5000, 3, 1500), (16, 1, 7), Rule()), ((900, 333), (8, 20), Rule(window=100))),
        (16, 64),
    )
)


SOME = few_on_cpu(CASES, 3, lambda case: case[1][0][0] <= 64 or max(case[2][0]) < 1000)


def error(dtype, model, sequences, size, backend, device) -> float:
    """The largest difference of a backend's output to the reference, relative to the largest output.

    Lengths of sequences have the new tokens in them, so many of `counts` of each.
    """
    (dims, shared), (lengths, counts, rule) = model, sequences
    heads, (k_dim, v_dim) = 3, dims
    pool = Pool(Group(rule, (KVLayer("x", heads, k_dim, v_dim, dtype),)), sum(n // size + 3 for n in lengths), size)
    arrays = pool.layers[0]
    mx.random.seed(sum(lengths))
    arrays.k, arrays.v = (mx.random.normal(array.shape).astype(dtype) for array in arrays.all)
    own = tables_of(pool, lengths)
    rows = [(table, n - count + i) for table, n, count in zip(own, lengths, counts, strict=True) for i in range(count)]
    step = GroupStep([table for table, _ in rows], [at for _, at in rows], [1] * len(rows), None)
    queries = mx.random.normal((len(rows), heads * shared, 1, k_dim)).astype(dtype)
    new = tuple(mx.random.normal((len(rows), heads, 1, dim)).astype(dtype) for dim in dims)
    before = [array + 0 for array in arrays.all]
    mx.eval(arrays.all, new, before)
    layer = backend(LayerKV(pool.group.layers[0], arrays, Turns(), device))
    out = layer.decode(Call(step, queries, k_dim**-0.5, None, None), new)
    mx.eval(out)
    check_stored(arrays, before, new, [table.blocks[at // size] * size + at % size for table, at in rows])
    wanted = []
    for row, (table, at) in enumerate(rows):
        positions = [i * size + o for i in table.live() for o in range(size)]
        slots = mx.array([table.blocks[p // size] * size + p % size for p in positions])
        k, v = (array[:, slots].astype(mx.float32) for array in arrays.all)
        q = queries[row].reshape(heads, shared, k_dim).astype(mx.float32) * k_dim**-0.5
        scores = mx.where(visible(rule, None, at, mx.array(positions)), (q[:, :, None] * k[:, None]).sum(-1), -mx.inf)
        weights = mx.softmax(scores, axis=-1)
        wanted.append((weights[..., None] * v[:, None]).sum(axis=2).reshape(heads * shared, 1, v_dim))
    return float(mx.abs(out.astype(mx.float32) - mx.stack(wanted)).max() / mx.abs(mx.stack(wanted)).max())


@pytest.mark.parametrize("case", SOME, ids=str)
def test_rows_of_one_sequence_attend_like_the_reference(cuda, case):
    assert error(*case, CudaPlain, "cuda") < (0.01 if case[0] == mx.bfloat16 else 0.002)


class Oracle:
    """Knows the answers; every so many tokens it says another one."""

    def __init__(self, answers: dict[int, list[int]], wrong: int) -> None:
        self._answers, self._wrong = answers, wrong

    def propose(self, request, limit):
        answer, at = self._answers[request.prompt[0]], len(request.tokens)
        guess = answer[at : at + limit]
        return (
            Match(20, [t if (at + i) % self._wrong else (t + 1) % 100 for i, t in enumerate(guess)]) if guess else None
        )

    def learn(self, request):
        pass

    forget = learn

    def clear(self):
        pass


def model(seed: int = 5, layers: int = 3):
    made = small_llama(seed, num_hidden_layers=layers, intermediate_size=64, num_key_value_heads=2, head_dim=64)
    made.set_dtype(mx.bfloat16)
    return made


def answers(engine, count: int = 60) -> list[list[int]]:
    engine.now = lambda: 0.0
    requests = []
    for number, length in enumerate((40, 23, 900)):
        prompt = [number + 1, *np.random.default_rng(number).integers(1, 100, length).tolist()]
        rule = Sampling(temperature=0.7, seed=3) if number == 1 else Sampling()
        requests.append(Request(prompt, count, sampling=rule))
        engine.submit(requests[-1])
    before = None
    while not engine.idle:
        engine.step()
        if before is None and all(len(request.tokens) > 10 for request in requests):
            before = mx.get_active_memory()
    engine.check_integrity()
    assert mx.get_active_memory() <= before + 2**20
    return [request.tokens for request in requests]


SETTINGS = {"kv_memory": "64MB", "max_batch": 3, "block_size": 16}


@on_device
def test_answers_are_those_of_one_token_at_a_time():
    plain = answers(engine_of(model(), speculate="off", **SETTINGS))
    engine = engine_of(model(), **SETTINGS)
    assert isinstance(engine.runner.compiled, CompiledDecode), engine.runner.uncompiled
    assert engine.runner.several.why_not is None
    engine.speculation.proposer = Oracle({number + 1: tokens for number, tokens in enumerate(plain)}, 5)
    assert answers(engine) == plain
    stats = engine.speculation.stats()
    assert stats.accepted > 40 and not engine.memory.writes


@on_device
def test_a_draft_model():
    plain = answers(engine_of(model(), speculate="off", **SETTINGS))
    engine = engine_of(WithDraft(model(), model()), speculate="draft", draft_model="x", draft_tokens=4, **SETTINGS)
    assert isinstance(engine.runner.compiled, CompiledDecode), engine.runner.uncompiled
    assert answers(engine) == plain
    assert engine.speculation.stats().accepted > 40
