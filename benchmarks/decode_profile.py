"""Where the time of a decode step goes, on the host and on the device.

    python benchmarks/decode_profile.py 8x4096 32x4096                  # an 8B shape with random weights, on a GPU
    python benchmarks/decode_profile.py --kernels 8x4096                # with the device's time by kernel (needs torch)

Milliseconds, medians over the steps. `draw` builds and starts the sampling, `build` makes the graph of the next forward
pass, `start` hands it to the device, `read` waits for the tokens of the step before; the rest of the step is the
engine's own. `tables`, a mean, is the part of `build` that puts tables into arrays, which is done when one of them
changes. With --shared N, all sequences begin with the same N tokens; with --apart, each reads them for itself.
"""

import argparse
import statistics
import time
from collections import defaultdict

import onekv  # noqa: F401  # Before mlx: it finds it a faster library.

# isort: split
import mlx.core as mx
import numpy as np

from onekv.bench.decode import _case, _OneKV, bench_model
from onekv.engine import runner as runner_module
from onekv.memory import compiled as compiled_module
from onekv.memory import pairs
from onekv.tables import table


class Clock:
    """Adds up the time of functions, by name, for each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def around(self, owner, name: str, label: str) -> None:
        function = getattr(owner, name)

        def timed(*arguments, **options):
            begin = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                if self.steps:
                    self.steps[-1][label] += time.perf_counter() - begin

        setattr(owner, name, timed)


def profile(model, batch: int, context: int, arguments) -> list[str]:
    steps = arguments.steps
    # No sequence ends before the last step.
    total = steps + 40 + batch * (1 + context // 256)
    side = _OneKV(model, batch, context + total, 64, arguments.shared, together=not arguments.apart)
    prompts = np.random.default_rng(0).integers(0, side.engine.plan.layout.vocabulary, (batch, context))
    prompts[:, : arguments.shared] = prompts[0, : arguments.shared]
    running = side.start(prompts.tolist(), total)
    for _ in range(20):
        next(running)
    clock, runner = Clock(), side.engine.runner
    clock.around(runner, "draw", "draw")
    clock.around(runner, "forward", "build")
    clock.around(runner, "_start", "start")
    kept = runner_module._rows, compiled_module.inputs_of
    clock.around(runner_module, "_rows", "read")
    clock.around(compiled_module, "inputs_of", "tables")
    walls = []
    for _ in range(steps):
        clock.steps.append(defaultdict(float))
        begin = time.perf_counter()
        next(running)
        walls.append(time.perf_counter() - begin)
    if arguments.kernels:
        by_kernel(running)
    runner_module._rows, compiled_module.inputs_of = kept
    running.close()
    parts = [statistics.median(step[name] for step in clock.steps) for name in ("draw", "build", "start", "read")]
    step = statistics.median(walls)
    tables = statistics.mean(step["tables"] for step in clock.steps)
    figures = [*parts, step - sum(parts), step, tables]
    slowest = sorted(walls)[-3:]
    return [f"{batch} x {context}", *(f"{1000 * x:.2f}" for x in figures), " ".join(f"{1000 * x:.1f}" for x in slowest)]


def by_kernel(running, steps: int = 6) -> None:
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    torch.cuda.init()
    with profiling(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            next(running)
        mx.synchronize()
    total, counts = defaultdict(float), defaultdict(int)
    spans = []
    for event in seen.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        total[event.name[:90]] += event.time_range.elapsed_us()
        counts[event.name[:90]] += 1
        spans.append((event.time_range.start, event.time_range.end))
    spans.sort()
    busy, end = 0.0, 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    rows = [
        [f"{time_ / steps / 1000:.3f}", f"{counts[name] / steps:.1f}", f"{time_ / counts[name]:.1f}", name]
        for name, time_ in sorted(total.items(), key=lambda item: -item[1])[:18]
    ]
    print(table(rows, ["ms per step", "calls", "us each", "kernel"]))
    print(f"the device was busy for {busy / steps / 1000:.2f} ms of a step\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", type=_case)
    parser.add_argument("--model", default="8b")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--shared", type=int, default=0)
    parser.add_argument("--least", type=int, default=pairs.LEAST, help="tokens that a thread block reads, at least")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    pairs.LEAST = arguments.least
    model = bench_model(arguments.model, None)
    rows = []
    for batch, context in arguments.cases:
        rows.append(profile(model, batch, context, arguments))
        print(rows[-1], flush=True)
    header = ["batch x context", "draw", "build", "start", "read", "other", "step", "tables", "slowest"]
    print(table(rows, header))


if __name__ == "__main__":
    main()
