"""The compiled loops over encoded blocks on CPU against attention written out in float32; what they do to memory."""

import itertools
import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from encoded_reference import Case
from onekv import LLM, loops
from onekv.memory.attention.numba import kernel as cpu_kernel
from onekv.memory.attention.numba.encoded import Numba, encoded_decode
from onekv.memory.attention.turns import Turns
from onekv.memory.device import kind
from onekv.memory.formats import parse
from onekv.memory.formats.centre import Rope
from onekv.memory.layout import KVLayer, Rule
from rise import Rise
from stock import engine_of, small_llama
from test_prefix_exact import run, tokens

FORMATS = ("q8", "q6", "q5", "q4", "tq4", "tq3", "tq2", "k8v4", "k5v4", "ktq4vq8")
SLOW = tuple(1.5**i for i in range(32))
# dtype, queries per head, lengths, rule, block size, sinks, RoPE, head dim
SHAPES = (
    (mx.float32, 3, (3000, 1, 64, 65, 1500), Rule(), 64, True, Rope(64, False, 10000.0), 64),
    (mx.float16, 8, (1,), Rule(), 16, False, None, 128),
    (mx.bfloat16, 1, (900, 30), Rule(window=100), 16, False, Rope(32, True, 500.0, 0.5), 96),
    (mx.float32, 5, (900, 333), Rule(window=200, keep=4), 128, True, Rope(64, False, None, 1.0, SLOW), 64),
    (mx.float32, 2, (150,), Rule(), 20, False, Rope(256, False, 10000.0), 256),
)
CASES = [(kv_format, *shape) for kv_format, shape in itertools.product(FORMATS, SHAPES)]


def decode(case: Case, rope: Rope | None, new=True) -> mx.array:
    turns = Turns().table(case.step, rope, case.dim) if case.stored.centre is not None else None
    out = encoded_decode(
        case.queries,
        case.arrays,
        case.stored,
        case.new if new else None,
        case.step.grid,
        case.step.lengths,
        case.step.reach(None),
        case.dim**-0.5,
        case.sinks,
        turns,
    )
    mx.eval(out)
    return out


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_the_loops_attend_and_store_like_the_reference(shape):
    *rest, rope, dim = shape
    case = Case(*rest, rope, dim)
    assert Numba.supports(case.stored, case.block_size, kind())
    out = decode(case, rope)
    assert out.dtype == shape[1] and out.shape == case.queries.shape
    case.check_stored()
    assert case.error(out) < {mx.float32: 2e-5, mx.float16: 1e-3, mx.bfloat16: 1e-2}[shape[1]]
    # Attending again, without a new token, changes nothing and gives the same.
    before = [np.array(part) for part in case.arrays.all]
    assert mx.array_equal(decode(case, rope, new=False), out)
    assert all(np.array_equal(np.array(part), old) for part, old in zip(case.arrays.all, before, strict=True))


def test_a_row_gives_the_same_alone_and_beside_others():
    shape = ("q4", mx.float32, 3, (700, 90, 300), Rule(), 64, False, Rope(64, False, 10000.0), 64)
    together, rope = Case(*shape), shape[7]
    out = decode(together, rope)
    for row, length in enumerate(shape[3]):
        alone = Case(*shape)
        step, table = alone.step, alone.step.tables[row]
        step.__init__([table], [length - 1], [1], None)
        alone.queries, alone.new = alone.queries[row : row + 1], tuple(new[row : row + 1] for new in alone.new)
        assert mx.array_equal(decode(alone, rope)[0], out[row])


def test_the_result_does_not_depend_on_where_arrays_lie():
    """Loops are compiled in several ways, chosen by the distance of their arrays: all add in the same order."""
    shape = ("ktq4vq8", mx.float32, 2, (150,), Rule(), 20, False, Rope(256, False, 10000.0), 256)
    case, rope = Case(*shape), shape[7]
    expected, size, others = decode(case, rope), np.random.default_rng(0), []
    for _ in range(400):
        others = [*others[-30:], np.empty(size.integers(1, 3000), np.float32)]
        assert mx.array_equal(decode(case, rope, new=False), expected)


@pytest.mark.parametrize("kv_format", ["q8", "q5", "q4", "tq3"])
def test_what_is_not_a_number_is_not_lost(kv_format):
    """Neither where it is stored already nor in a new token; other heads do not see it."""
    case = Case(kv_format, mx.float32, 2, (100,), Rule(), 64, False, None, 64)
    scale = np.asarray(case.arrays.all[1])
    scale[0, case.step.tables[0].blocks[0] * 64 + 5] = np.nan
    del scale
    case.new[1][0, 1, 0, 7] = mx.nan
    out = decode(case, None)
    assert bool(mx.isnan(out[0, :4]).all()) and not bool(mx.isnan(out[0, 4:]).any())


@pytest.mark.parametrize("x", [0.0, 1.0, -1.5, 65504.0, -65504.0, 2.0**-14, 2.0**-24, 3e-8, 2.9e-8, 1e-10, 0.1, -1 / 3])
def test_halves_are_those_of_numpy(x):
    assert cpu_kernel._half(np.float32(x)) == np.float32(x).astype(np.float16).view(np.uint16)


def test_all_formats_and_dims_use_what_was_compiled_once():
    for kv_format, shape in itertools.product(("q8", "tq3"), SHAPES[:3]):
        decode(Case(kv_format, *shape), shape[6])
    assert len(cpu_kernel.decode.signatures) == 1


def test_only_for_codes_and_block_sizes_that_the_loops_know(monkeypatch):
    stored = KVLayer("layer 0", 2, 64, 64, mx.float32, parse("q4"))
    assert Numba.supports(stored, 64, "cpu")
    assert not Numba.supports(stored, 64, "metal") and not Numba.supports(stored, 64, "cuda")
    assert not Numba.supports(stored, 18, "cpu")
    assert not Numba.supports(KVLayer("layer 0", 2, 64, 64, mx.float32, parse("kautov4")), 64, "cpu")
    monkeypatch.setattr(loops, "why_not", lambda: "no")
    assert not Numba.supports(stored, 64, "cpu")


@pytest.mark.parametrize("kv_format", ["q8", "q6", "q5", "q4", "tq4", "tq3", "tq2", "k8v4"])
def test_without_numba_decoding_is_the_same(kv_format, monkeypatch):
    """The same tokens from MLX's own operations: the code that runs where numba is not installed."""
    model = small_llama(5, num_hidden_layers=3, intermediate_size=64, num_key_value_heads=2, head_dim=64)
    prompts = [tokens(100, 1), tokens(37, 2), tokens(5, 3)]
    settings = {"kv_format": kv_format, "kv_memory": "8MB", "block_size": 16, "max_batch": 3, "prefill_chunk": 48}
    engine = engine_of(model, **settings)
    assert engine.memory.eager and engine.runner.compiled is not None
    expected = [request.tokens for request in run(engine, prompts, count=20)]
    monkeypatch.setattr(loops, "why_not", lambda: "no")
    engine = engine_of(model, **settings)
    assert not engine.memory.eager and engine.runner.compiled is None
    assert [request.tokens for request in run(engine, prompts, count=20)] == expected


@pytest.mark.parametrize("kv_format", ["q4", "auto"])
def test_a_missing_numba_is_told(kv_format, monkeypatch, caplog):
    why_not = loops.why_not.__wrapped__
    monkeypatch.setattr(loops, "find_spec", lambda name: None)
    monkeypatch.setattr(loops, "why_not", why_not)
    with LLM("smollm2-135m", kv_format=kv_format, kv_memory="64MB"):
        pass
    told = [record.getMessage() for record in caplog.records if "numba is not installed" in record.getMessage()]
    assert len(told) == 1 and "onekv[cpu]" in told[0]


def test_a_numba_that_cannot_be_imported_is_told(monkeypatch):
    monkeypatch.setattr(loops, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "numba", None)
    assert "numba cannot be used" in loops.why_not.__wrapped__()


def test_decoding_takes_no_memory_and_leaves_the_pool_where_it_is():
    model = small_llama(5, num_hidden_layers=2, intermediate_size=64, num_key_value_heads=2, head_dim=64)
    engine = engine_of(model, kv_format="q4", kv_memory="8MB", block_size=64, max_batch=1, prefill_chunk=256)
    run(engine, [tokens(2000, 1)], count=3)
    places = [np.asarray(array).ctypes.data for array in engine.memory.arrays()]
    with Rise(1) as rise:
        run(engine, [tokens(2000, 1)], count=40)
    assert [np.asarray(array).ctypes.data for array in engine.memory.arrays()] == places
    smallest = min(array.nbytes for pool in engine.memory.pools for layer in pool.layers for array in layer.all[:1])
    assert rise.peak < smallest


USE = """
import logging, sys
logging.basicConfig()
sys.path.insert(0, "tests")
from test_cpu_encoded import Case, decode, mx, Rule
case = Case("q8", mx.float32, 2, (10,), Rule(), 64, False, None, 64)
assert case.error(decode(case, None)) < 2e-5
"""


# A busy machine, on which it takes long to load what was compiled.
SLOWLY = """
import time
from numba.core.caching import IndexDataCacheFile
load = IndexDataCacheFile.load
IndexDataCacheFile.load = lambda self, key: time.sleep(3) or load(self, key)
"""


def in_new_process(before: str = "", **environment: str) -> str:
    """What a process that decodes says; `before` runs first."""
    environment = {**os.environ, **environment}
    command = [sys.executable, "-c", before + USE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stderr


def test_what_is_compiled_is_kept_and_said_once(tmp_path):
    assert in_new_process(NUMBA_CACHE_DIR=str(tmp_path)).count("compiling attention over encoded KV") == 1
    assert list(tmp_path.rglob("kernel.decode.*.nbc"))
    assert "compiling" not in in_new_process(SLOWLY, NUMBA_CACHE_DIR=str(tmp_path))


def test_without_a_folder_to_keep_it_in_each_process_compiles():
    assert in_new_process(NUMBA_CACHE_LOCATOR_CLASSES="IPythonCacheLocator").count("compiling attention") == 1
