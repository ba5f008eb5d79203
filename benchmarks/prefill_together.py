"""Prompts that come at once: stored in one pass where they are small, or one after the other.

    python benchmarks/prefill_together.py                              # an 8B shape with random weights, on a GPU
    python benchmarks/prefill_together.py --model smollm2-135m --cases 8x64 8x200 8:32-256

A case is prompts x tokens, or prompts:least-most for lengths between (the same in all rounds; with a * others in each),
with +n for so many tokens before them that are cached. One engine does both in turn, each time with prompts of its own.
Times are until the last first token, figures medians over the rounds; the peak is above weights and pool.
"""

import argparse
import re
import statistics
import sys
import time
from collections import defaultdict
from functools import partial

import onekv  # noqa: F401  # Before mlx: it finds it a faster library.

# isort: split
import mlx.core as mx
import numpy as np

from onekv.bench.decode import about, bench_model
from onekv.config import Settings
from onekv.engine import Engine, Request
from onekv.engine.runner import Runner
from onekv.memory.plan import make_plan
from onekv.report import table
from onekv.units import format_size

CASES = ["32x128", "32x512", "16:64-512", "16:64-512*", "16x128+1024"]
SIDES = (False, True)


class Case:
    def __init__(self, text: str) -> None:
        parts = re.fullmatch(r"(\d+)(?:x(\d+)|:(\d+)-(\d+)(\*?))(?:\+(\d+))?", text)
        if parts is None:
            raise SystemExit(f"a case is {text!r}; write it like 32x128, 16:64-512, 16:64-512* or 16x128+1024")
        count, same, least, most, varied, cached = parts.groups()
        self.text, self.count, self.cached, self.varied = text, int(count), int(cached or 0), bool(varied)
        self.least, self.most = int(least or same), int(most or same)

    @property
    def longest(self) -> int:
        return self.cached + self.most

    def lengths(self, number: int) -> list[int]:
        draw = np.random.default_rng(number if self.varied else 0)
        return draw.integers(self.least, self.most + 1, self.count).tolist()


class Passes(Runner):
    """Counts passes over the model."""

    count = 0

    def store(self, sequences, tokens):
        self.count += 1
        super().store(sequences, tokens)


def measure(engine: Engine, case: Case, rounds: int) -> list[str]:
    draw = np.random.default_rng(1)

    def fresh(length: int) -> list[int]:
        return draw.integers(0, engine.plan.layout.vocabulary, length).tolist()

    starts = [fresh(case.cached) for _ in range(case.count)]
    if case.cached:
        run(engine, starts)
    figures = {side: defaultdict(list) for side in SIDES}
    for number in range(rounds + 1):
        for side in SIDES if number % 2 else reversed(SIDES):
            new = [fresh(length) for length in case.lengths(number)]
            engine.runner.together, engine.runner.count = side, 0
            mx.reset_peak_memory()
            before, begin = mx.get_active_memory(), time.perf_counter()
            first = run(engine, [start + tokens for start, tokens in zip(starts, new, strict=True)])
            seconds = time.perf_counter() - begin
            # The first round warms up.
            if number:
                kept = figures[side]
                kept["speed"].append(sum(map(len, new)) / seconds)
                kept["first"].append(first)
                kept["passes"].append(engine.runner.count)
                kept["peak"].append(mx.get_peak_memory() - before)
    apart, together = ({name: statistics.median(values) for name, values in figures[side].items()} for side in SIDES)
    ratio = statistics.median(b / a for a, b in zip(*(figures[side]["speed"] for side in SIDES), strict=True))
    return [
        case.text,
        *(f"{side['speed']:,.0f}" for side in (apart, together)),
        f"{ratio:.2f}x",
        *(f"{side['first'] * 1000:,.0f}" for side in (apart, together)),
        *(f"{side['passes']:.0f}" for side in (apart, together)),
        *(format_size(int(side["peak"])) for side in (apart, together)),
    ]


def run(engine: Engine, prompts: list[list[int]]) -> float:
    """The mean time to the first token."""
    requests = [Request(prompt, 1) for prompt in prompts]
    for request in requests:
        request.arrived(engine.now())
        engine.submit(request)
    while not engine.idle:
        engine.step()
    assert not any(request.error for request in requests)
    return statistics.mean(request.timings.first_token for request in requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b")
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk", type=int, help="tokens of a pass; default: as planned")
    arguments = parser.parse_args()
    cases = [Case(text) for text in arguments.cases]
    model = bench_model(arguments.model, None)
    batch = max(case.count for case in cases)
    options = {"max_batch": batch, "prefill_chunk": arguments.chunk}
    layout = make_plan(model, Settings(kv_memory="1GiB", **options), None).layout
    token_bytes = sum(group.token_bytes for group in layout.groups)
    # What a case caches is there when the next round comes.
    tokens = 2 * max(case.count * -(-(case.longest + 64) // 64) * 64 for case in cases)
    settings = Settings(kv_memory=tokens * token_bytes, **options)
    plan = make_plan(model, settings, None)
    engine = Engine(model, plan, set(), settings, make_runner=partial(Passes, together=True))
    if not engine.runner.together:
        raise SystemExit("this model's prompts cannot be stored together")
    print(about(arguments.model))
    print(f"passes of at most {plan.prefill_chunk} tokens, planned workspace {format_size(plan.workspace)}")
    columns = ["tokens/s", "first token, ms", "passes", "peak"]
    apart, *others = ([f"{name}: apart", "together"] for name in columns)
    header = ["prompts", *apart, "ratio", *(name for pair in others for name in pair)]
    rows = []
    for case in cases:
        rows.append(measure(engine, case, arguments.rounds))
        print(*rows[-1], file=sys.stderr, flush=True)
    print(table(rows, header))


if __name__ == "__main__":
    main()
