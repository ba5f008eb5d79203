"""Where the time of a step that verifies guesses goes, beside a plain one, and how far its logits are from those of one
token at a time.

    python benchmarks/speculation_profile.py 1x2048 8x4096              # an 8B shape with random weights, on a GPU
    python benchmarks/speculation_profile.py --kernels 8x4096           # with the device's time by kernel (needs torch)

The model and the guesses are those of `onekv bench speculate --oracle`. Milliseconds, medians over the steps. `propose`
and `land` come before a step, `build` makes the graph of the forward pass (`tables`, a mean, is the part of it that
puts tables into arrays), `start` hands it to the device, `draw` builds the sampling, `wait` is until its tokens are
there; the rest is the engine's own. `made` are functions that were compiled during the measured steps.
"""

import argparse
import statistics
import time
from collections import defaultdict
from types import SimpleNamespace

import onekv  # noqa: F401  # Before mlx: it finds it a faster library.

# isort: split
import mlx.core as mx
import numpy as np
from decode_profile import Clock, by_kernel

from onekv.bench import speculate_oracle as oracle_bench
from onekv.bench.decode import _case, bench_model
from onekv.cuda import products
from onekv.engine import Request, selftest
from onekv.engine import runner as runner_module
from onekv.engine.speculation import verify as verify_module
from onekv.engine.speculation.control import Speculation
from onekv.memory import compiled as compiled_module
from onekv.memory import pairs
from onekv.tables import table

PARTS = ("propose", "land", "build", "start", "draw", "wait")


def apart(model, engine, context: int, count: int, engine_s: float) -> list[str]:
    """How far logits of `count` tokens in one step are from those of one token at a time, as text."""
    tokens = np.random.default_rng(1).integers(0, engine.plan.layout.vocabulary, context + count)
    by = engine.runner.compiled

    def after(counts: list[int], shared: int = pairs.SHARED) -> mx.array:
        kept, pairs.SHARED = pairs.SHARED, shared
        try:
            return selftest._after(model, engine.memory, tokens, context, counts, by).astype(mx.float32)
        finally:
            pairs.SHARED = kept

    alone = after([1] * count)
    cases = {
        "one at a time, again": after([1] * count),
        "in one step": after([count]),
        "in one step, each row reads for itself": after([count], 0),
    }
    with pairs.reading_together():
        cases["in one step, read together"] = after([count])
    spacing, tolerance = mx.finfo(mx.bfloat16).eps * float(mx.abs(alone).max()), engine.runner.several.tolerance
    best = mx.sort(alone, axis=-1)[:, -2:]
    gaps = (best[:, 1] - best[:, 0]).tolist()
    lines = [
        f"steps of up to {engine.runner.several.exact} rows are exact; tolerance of others {tolerance:.5f}; "
        f"the engine took {engine_s:.1f} s to make; standard deviation of logits "
        f"{float(alone.std()):.4f}, one step of bfloat16 at the largest {spacing:.4f}; "
        f"gaps of the best {' '.join(f'{gap:.3f}' for gap in gaps)}"
    ]
    for name, logits in cases.items():
        far = mx.abs(logits - alone)
        same = int((mx.argmax(logits, axis=-1) == mx.argmax(alone, axis=-1)).sum())
        equal = float((logits == alone).astype(mx.float32).mean())
        lines.append(f"{name}: at most {float(far.max()):.5f} apart, {equal:.1%} equal, {same} of {count} tokens alike")
    return lines


class TimedMx:
    """`mlx.core`, with the time of evaluations on a clock."""

    def __init__(self, clock: Clock, **labels: str) -> None:
        for name, label in labels.items():
            setattr(self, name, getattr(mx, name))
            clock.around(self, name, label)

    def __getattr__(self, name: str):
        return getattr(mx, name)


def run(engine, prompts, tokens: int, clock: Clock | None = None) -> SimpleNamespace:
    """Answers, and the seconds of each step while all of the sequences run."""
    requests = [Request(prompt, tokens) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    had, walls = sum(len(request.tokens) for request in requests), []
    while not any(request.finished for request in requests):
        if clock is not None:
            clock.steps.append(defaultdict(float))
        begin = time.perf_counter()
        engine.step()
        walls.append(time.perf_counter() - begin)
    made = sum(len(request.tokens) for request in requests) - had
    while not engine.idle:
        engine.step()
    return SimpleNamespace(answers=[request.tokens for request in requests], walls=walls, tokens=made)


def profile(model, batch: int, context: int, arguments) -> list[str]:
    tokens, count = arguments.tokens, arguments.proposed
    plain = oracle_bench._engine(model, batch, context + tokens, "off", 1)
    begin = time.perf_counter()
    engine = oracle_bench._engine(model, batch, context + tokens, "auto", count)
    engine_s = time.perf_counter() - begin
    if engine.speculation is None:
        raise SystemExit(f"no speculation here: {engine.runner.several.why_not}")
    print(f"\n{batch} x {context}", *apart(model, engine, context, 1 + count, engine_s), sep="\n    ", flush=True)
    prompts = np.random.default_rng(context).integers(0, engine.plan.layout.vocabulary, (batch, context)).tolist()
    run(plain, prompts, tokens)
    off = run(plain, prompts, tokens)
    if batch == 1:
        stock(model, context, prompts, tokens)
    oracle = oracle_bench.Oracle(engine.plan.layout.vocabulary)
    oracle.answers = dict(zip(map(tuple, prompts), off.answers, strict=True))
    oracle.share, oracle.count = arguments.share, count
    most = engine.speculation.most
    engine.speculation = Speculation(oracle, most, allot=oracle_bench.everything)
    run(engine, prompts, tokens)
    engine.speculation = Speculation(oracle, most, allot=oracle_bench.everything)
    clock = Clock()
    clock.around(engine.speculation, "propose", "propose")
    for name, label in (("land", "land"), ("forward", "build"), ("draw", "draw")):
        clock.around(engine.runner, name, label)
    if engine.runner.compiled is not None:
        clock.around(engine.runner.compiled, "_compile", "made")
    kept = runner_module.mx, verify_module.mx, compiled_module.inputs_of
    runner_module.mx, verify_module.mx = TimedMx(clock, async_eval="start"), TimedMx(clock, eval="wait")
    clock.around(compiled_module, "inputs_of", "tables")
    try:
        own = run(engine, prompts, tokens, clock)
    finally:
        runner_module.mx, verify_module.mx, compiled_module.inputs_of = kept
    if arguments.kernels:
        kernels(engine, prompts, tokens)
    stats = engine.speculation.stats()
    steps = [(step, wall) for step, wall in zip(clock.steps, own.walls, strict=False) if step["wait"]]
    parts = [statistics.median(step[name] for step, _ in steps) for name in PARTS]
    wall = statistics.median(wall for _, wall in steps)
    same = sum(a == b for a, b in zip(own.answers, off.answers, strict=True))
    lone = [wall for step, wall in zip(clock.steps, own.walls, strict=False) if not step["wait"]]
    seconds = sum(own.walls) / own.tokens, sum(off.walls) / off.tokens
    print(
        f"    {stats.accepted} of {stats.proposed} accepted in {stats.steps} steps, {stats.doubtful} doubtful; "
        f"{len(lone)} plain steps of {1000 * statistics.median(lone or [0]):.2f} ms between; "
        f"{own.tokens / len(own.walls) / batch:.2f} tokens a step and sequence; "
        f"{1 / seconds[0]:.1f} tokens/s, off {1 / seconds[1]:.1f}: {seconds[1] / seconds[0]:.2f}x; "
        f"{same} of {batch} answers the same",
        flush=True,
    )
    made = sum("made" in step for step, _ in steps)
    tables = statistics.mean(step["tables"] for step, _ in steps)
    figures = [*parts, wall - sum(parts), wall, statistics.median(off.walls), tables]
    slowest = " ".join(f"{1000 * x:.1f}" for x in sorted(wall for _, wall in steps)[-3:])
    return [f"{batch} x {context}", *(f"{1000 * x:.2f}" for x in figures), slowest, str(made)]


def stock(model, context: int, prompts, tokens: int) -> None:
    """Plain steps whose one row is multiplied by MLX's own kernel, beside ours."""
    kept, products.LEAST = products.LEAST, 2
    try:
        engine = oracle_bench._engine(model, 1, context + tokens, "off", 1)
        run(engine, prompts, tokens)
        median = statistics.median(run(engine, prompts, tokens).walls)
    finally:
        products.LEAST = kept
    print(f"    a plain step with MLX's own products of one row: {1000 * median:.2f} ms", flush=True)


def kernels(engine, prompts, tokens: int) -> None:
    requests = [Request(prompt, tokens) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    while engine.scheduler.waiting or engine.scheduler.prefilling or not all(r.tokens for r in requests):
        engine.step()

    def running():
        while True:
            engine.step()
            yield

    by_kernel(running())
    engine.cancel(requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", type=_case)
    parser.add_argument("--model", default="8b")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--proposed", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.7)
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    model = oracle_bench.decided(bench_model(arguments.model, None))
    print(f"the model took {time.perf_counter() - begin:.1f} s", flush=True)
    rows = []
    for batch, context in arguments.cases:
        rows.append(profile(model, batch, context, arguments))
        print(rows[-1], flush=True)
    print(table(rows, ["batch x context", *PARTS, "other", "step", "plain", "tables", "slowest", "made"]))
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
