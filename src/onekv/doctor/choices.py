"""Choices made when a model is loaded on this device, each with the measurement behind it.

donation   MLX updates an array in place if nothing else references its buffer; otherwise it copies the whole array
overlap    whether a decode step is started while the previous one is still in flight. If MLX operations write the
           pool it has to wait, because a write to a buffer that is being read copies it
compile    whether decode steps run as one compiled function or program, provided the logits are the same
"""

import statistics
import time

import mlx.core as mx

from ..config import Settings
from ..engine import Engine
from ..engine.runner import Runner
from ..engine.selftest import forward
from ..memory.pool.sequence import Sequence
from ..units import format_size
from .base import Case, Check, Notes, switch
from .engines import chat_model, make_engine, random_prompt

SIZE = 64 * 2**20
STEPS, WARM, LENGTH = 24, 4, 200


def run(case: Case, notes: Notes) -> None:
    alone, busy = write_peak(in_flight=False), write_peak(in_flight=True)
    notes.figure("copied by an MLX write, array idle", alone, "B", SIZE // 2)
    notes.figure("copied by an MLX write, array being read", busy, "B")
    if alone > SIZE // 2:
        notes.fail(
            f"MLX copies an array of {format_size(SIZE)} to write one row, although nothing else references it: every "
            "decode step would copy the pool",
            _donation_remedy(case),
        )
    else:
        notes.ok("donation: MLX writes in place")
    settings = Settings(kernels=case.settings.kernels, kv_memory="16MB", max_batch=2)
    engine = make_engine(chat_model(), settings)
    notes.ok(overlap(engine.runner))
    _compiled(engine, notes)
    notes.ok(several(engine.runner))
    if engine.runner.one_by_one is not None:
        notes.warn(f"sequences are decoded one at a time: {engine.runner.one_by_one}")


def _donation_remedy(case: Case) -> str:
    if case.settings.kernels == "off":
        return switch("kernels", "auto")
    return "lower " + switch("kv_memory", "SIZE")


def write_peak(in_flight: bool) -> int:
    """Extra bytes allocated to write one row of an array, optionally while operations that read it are in flight."""
    array = mx.zeros((SIZE // 4096, 1024))
    mx.eval(array)
    mx.synchronize()
    read = mx.zeros(1)
    if in_flight:
        for _ in range(4):
            # Reads the whole array and keeps one number.
            read = read + mx.max(array, keepdims=True)[0]
        mx.async_eval(read)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    array[:1] = mx.ones((1, 1024))
    mx.eval(array)
    mx.eval(read)
    return mx.get_peak_memory() - before


def overlap(runner: Runner) -> str:
    """Whether steps overlap, and why."""
    if runner.eager:
        return "overlap: no, steps are computed eagerly while they are built"
    if runner.memory.writes:
        return "overlap: no, MLX operations write the pool, and would copy it while it is being read"
    return "overlap: yes, kernels write the pool in place"


def several(runner: Runner) -> str:
    if runner.several.why_not is not None:
        return f"several tokens a step (speculation): no, {runner.several.why_not}"
    return f"several tokens a step (speculation): yes, logits within {runner.several.tolerance:.1e}"


def _compiled(engine: Engine, notes: Notes) -> None:
    runner = engine.runner
    plain = step_seconds(engine, compiled=False)
    notes.figure("decode step of a small model, uncompiled", plain * 1e3, "ms")
    if runner.compiled is None:
        notes.ok(f"compile: no, {runner.uncompiled}")
        return
    seconds = step_seconds(engine, compiled=True)
    notes.figure("decode step of a small model, compiled", seconds * 1e3, "ms")
    how = "loops" if runner.compiled.eager else "one function"
    notes.ok(f"compile: yes, as {how}: a step takes {seconds / plain:.2f} of the time")


def step_seconds(engine: Engine, compiled: bool) -> float:
    """Median time of a decode step with one sequence."""
    runner, memory = engine.runner, engine.memory
    sequence: Sequence = memory.open(LENGTH + WARM + STEPS)
    try:
        runner.store([sequence], [random_prompt(LENGTH)])
        sequence.prefilled()
        times = []
        for _ in range(WARM + STEPS):
            begin = time.perf_counter()
            given = ([sequence], mx.array([1]), [1])
            logits = runner.forward(*given) if compiled else forward(runner.model, memory, *given)
            mx.eval(logits, memory.arrays())
            times.append(time.perf_counter() - begin)
        return statistics.median(times[WARM:])
    finally:
        memory.close(sequence)


CHECK = Check("choices", "choices made at load (donation, overlap, compile), with the measurements behind them", run)
