"""Whether the Metal kernels are used: what a trial finds out, what follows from that, and a model that has them. On the
CPU, where all of it is Metal but the device.
"""

import sys
from dataclasses import asdict, replace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

import test_doors
from kernels.on_cpu import KernelError
from onekv import LLM
from onekv.memory import device
from onekv.memory.attention.metal import backend, language, trial
from onekv.memory.attention.metal.trial import Outcome, Shape, Timing, attempt, in_child, outcome_of, why_not
from onekv.memory.compiled import CompiledDecode
from onekv.memory.layout import KVLayer, Rule
from test_doors import SETTINGS, generated, greedy, model  # noqa: F401

SHAPE = Shape(2, 3, 64, 96, "float32", 16, None, 0)
FAST = Outcome(None, 1e-6, 1e-3, True, (Timing(1, 2048, 0.1, 0.2), Timing(4, 2048, 0.3, 0.5)))


@pytest.fixture
def metal(kernels_on_cpu, monkeypatch):
    monkeypatch.setattr(mx.fast, "metal_kernel", kernels_on_cpu.metal_kernel)
    monkeypatch.setattr(trial, "TIMED", ((1, 40),))
    monkeypatch.setattr(trial, "REPEATS", 1)
    monkeypatch.setattr(trial, "CALLS", 1)
    language.kernel.cache_clear()
    return kernels_on_cpu


OUTCOMES = [
    (FAST, None),
    (replace(FAST, timings=()), None),
    (Outcome(error="no such function"), "the Metal kernel does not run here: no such function"),
    (replace(FAST, difference=0.01), "differs from that of MLX's operations by 0.01 (0.001 is allowed)"),
    (replace(FAST, difference=float("nan")), "differs from that of MLX's operations by nan"),
    (replace(FAST, stores=False), "does not store new tokens"),
    (replace(FAST, timings=(*FAST.timings, Timing(8, 512, 0.31, 0.3))), "0.310 ms against 0.300 ms for 8 x 512 tokens"),
    (replace(FAST, timings=(Timing(1, 16, 0.2, 0.2),)), "is slower"),
]


@pytest.mark.parametrize(("outcome", "reason"), OUTCOMES)
def test_a_kernel_is_used_if_it_runs_agrees_and_is_faster(outcome, reason):
    found = why_not(outcome)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, window=100, keep=4, block_size=32)])
def test_a_trial_compares_and_measures(metal, shape):
    outcome = attempt(shape, "metal")
    assert outcome.error is None and outcome.stores and outcome.difference < 1e-5 < outcome.tolerance
    (timing,) = outcome.timings
    assert (timing.rows, timing.tokens) == (1, 40) and timing.ours > 0 and timing.theirs > 0
    # Threads on the CPU are slower than MLX's operations there.
    assert "is slower" in why_not(outcome)


MISTAKES = [
    ("SCALE * 1.4426950408889634f", "SCALE * 1.4f", "differs"),
    ("    lanes_barrier();\n\n    if (shrunk)", "\n    if (shrunk)", "differs"),
    ("halve<OWN * 2>(s, lane, 2);", "halve<OWN * 2>(s, lane, 16);", "differs"),
    ("largest_of_lanes(latest)", "smallest_of_lanes(latest)", "differs"),
    # Prefixes that rows share.
    ("rows[own_index / G]", "rows[own_index / (2 * G)]", "differs"),
    # Several tokens of a sequence.
    ("((const DEVICE uint4*)(new_v + from * DV))[i]", "((const DEVICE uint4*)(new_v + from * DV))[0]", "differs"),
    # What is read is not what is stored.
    ("((const DEVICE uint4*)(new_v + new_row * DV))[n]", "((const DEVICE uint4*)(new_v + new_row * DV))[0]", "store"),
    ("n = part; n < K_VECTORS; n += 8", "n = part; n < K_VECTORS; n += 16", "store"),
    ("power_of_2(sink - highest)", "power_of_2(highest - sink)", "differs"),
]


@pytest.mark.parametrize(("old", "new", "reason"), MISTAKES)
def test_a_trial_finds_mistakes(metal, old, new, reason):
    with metal.planted(old, new):
        outcome = attempt(SHAPE, "metal")
    assert reason in why_not(outcome) and outcome.timings == ()


def test_a_barrier_that_not_all_threads_reach_ends_a_trial(metal):
    barrier = "  block_barrier();\n\n  const int group"
    with metal.planted(barrier, barrier.replace("block", "if (lane) block")), pytest.raises(KernelError):
        attempt(SHAPE, "metal")


def test_a_trial_where_there_is_no_metal():
    """In a process of its own, as when a model is loaded; what MLX says there is the reason."""
    if mx.metal.is_available():
        pytest.skip("there is Metal here")
    assert why_not(in_child(SHAPE, "metal")) == (
        "the Metal kernel does not run here: [metal_kernel] No Metal back-end."
    )


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import os; os.abort()", "it was killed by signal 6"),
        ("import time; print('{}', flush=True); time.sleep(60)", "it was still running after 2 s"),
        ("raise KeyError('lanes')", "it exited with status 1: KeyError: 'lanes'"),
    ],
)
def test_what_takes_its_process_with_it_is_a_reason(program, error):
    assert outcome_of([sys.executable, "-c", program], 2.0).error == error


def test_a_process_that_cannot_be_started_is_a_reason(tmp_path):
    error = outcome_of([str(tmp_path / "python")], 2.0).error
    assert error == "it could not be started (No such file or directory)"


def test_an_outcome_comes_back_whole():
    program = f"import json; print('noise'); print(json.dumps({asdict(FAST)!r}))"
    assert outcome_of([sys.executable, "-c", program], 60.0) == FAST


@pytest.fixture
def on_metal(metal, monkeypatch):
    """The memory takes the device for Metal; how a trial there ends is what the fixture is called with."""
    asked = []
    monkeypatch.setattr(device, "kind", lambda: "metal")

    def ends(outcome: Outcome) -> list:
        monkeypatch.setattr(backend, "in_child", lambda shape, on: asked.append((shape, on)) or outcome)
        return asked

    return ends


def test_a_model_with_the_kernels_answers_as_without(on_metal, model):  # noqa: F811
    asked = on_metal(FAST)
    with LLM(model, **SETTINGS) as llm:
        answers = [done.tokens for done in llm.generate(test_doors.PROMPTS, max_tokens=test_doors.COUNT)]
        memory, stats = llm.engine.memory, llm.stats()
        llm.check_integrity()
        assert memory.has_kernels and memory.by_kernels and stats.unused_kernels is None
        assert not isinstance(llm.engine.runner.compiled, CompiledDecode) and "compile" in stats.uncompiled
    assert answers == greedy(model, KVCache)
    layer = model.layers[0].self_attn
    shape = Shape(layer.n_kv_heads, layer.n_heads // layer.n_kv_heads, 64, 64, "float32", 16, None, 0)
    assert set(asked) == {(shape, "metal")}


def test_a_model_without_them_says_why_and_answers_all_the_same(on_metal, model, caplog):  # noqa: F811
    on_metal(replace(FAST, timings=(Timing(1, 2048, 0.5, 0.2),)))
    with LLM(model, **SETTINGS) as llm:
        stats = llm.stats()
        assert "is slower" in stats.unused_kernels and stats.unused_kernels.count("slower") == 1
        assert f"attention by MLX's operations: {stats.unused_kernels}" in repr(stats)
        assert f"  decode steps are not compiled: {stats.uncompiled}" in repr(stats).splitlines()
        assert not llm.engine.memory.has_kernels
    # Once, however many layers there are, and where a server's operator looks.
    (told,) = (each for each in caplog.records if each.name == "onekv" and "slower" in each.getMessage())
    assert told.levelname == "WARNING" and told.getMessage().endswith(stats.unused_kernels)
    assert generated(model) == greedy(model, KVCache)


def test_kernels_that_are_switched_off_are_not_tried(on_metal, model):  # noqa: F811
    asked = on_metal(FAST)
    with LLM(model, **SETTINGS, kernels="off") as llm:
        assert not llm.engine.memory.has_kernels and llm.stats().unused_kernels is None
    assert asked == []
    layer = KVLayer("layer 0", 2, 64, 64, mx.float32)
    assert backend.MetalPlain.why_not(layer, 16, Rule(), 8) is None and len(asked) == 1
    assert "33 query heads share" in backend.MetalPlain.why_not(layer, 16, Rule(), 66)
