"""The memory line of README.md: OneKV and mlx-lm hold the same conversations with the same model.

    python benchmarks/memory_line.py [--json FILE] [--plot FILE]      runs both sides, each in a process of its own
    python benchmarks/memory_line.py --from FILE [--plot FILE]        draws a recorded run again

A document of 1,500 tokens and a question are answered, then the conversation is continued four times, then three others
begin with the same document. mlx-lm's side does what its server does: fetch the nearest cache from the prompt cache,
generate, insert. It measures what MLX has allocated beyond the weights, as the peak of each interval between two
samples, so no spike is missed. The time axis is in turns, because the two sides are not equally fast.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCUMENT, QUESTION, ANSWER = 1500, 60, 24
BUDGET = 160 << 20
FOLLOWED, OTHERS = 4, 3
SAMPLE_S = 0.01
COLOURS = {"mlx-lm": "#c0504d", "OneKV": "#2b5fd9"}


def turns(vocabulary: int, answers: list[list[int]]) -> Iterator[list[int]]:
    """The prompts, one after the other; the caller appends what was answered to `answers`."""
    import numpy as np

    random = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in random.integers(100, vocabulary, count)]

    document = tokens(DOCUMENT)
    prompt = document + tokens(QUESTION)
    yield prompt
    for _ in range(FOLLOWED):
        prompt = prompt + answers[-1] + tokens(QUESTION)
        yield prompt
    for _ in range(OTHERS):
        yield document + tokens(QUESTION)


class Line:
    """Samples what is allocated, with the peak since the sample before."""

    def __init__(self) -> None:
        import mlx.core as mx

        self._mx, self.samples, self.marks = mx, [], []  # type: Any, list[list[float]], list[float]
        self._end = threading.Event()
        self._base = mx.get_active_memory()
        mx.reset_peak_memory()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        peak = max(self._mx.get_peak_memory(), self._mx.get_active_memory())
        self._mx.reset_peak_memory()
        self.samples.append([round(time.perf_counter(), 3), peak - self._base])

    def turn(self) -> None:
        """A turn begins."""
        self.marks.append(time.perf_counter())

    def close(self) -> dict[str, Any]:
        self._end.set()
        self._thread.join()
        self._sample()
        ends = [*self.marks[1:], self.samples[-1][0]]
        points = []
        for number, (begin, end) in enumerate(zip(self.marks, ends, strict=True)):
            inside = [(at, size) for at, size in self.samples if begin <= at < end]
            # Enough to draw; of each stretch the highest.
            step = max(1, len(inside) // 60)
            for at in range(0, len(inside), step):
                stretch = inside[at : at + step]
                points.append([round(number + (stretch[0][0] - begin) / (end - begin), 3), max(s for _, s in stretch)])
        return {"points": points, "peak": max(size for _, size in self.samples), "turns": len(self.marks)}


def onekv() -> dict[str, Any]:
    from onekv.bench.decode import bench_model
    from onekv.config import Settings
    from onekv.engine import Engine, Request
    from onekv.memory.plan import make_plan

    model = bench_model("smollm2-135m", None)
    plan = make_plan(model, Settings(kv_memory=BUDGET, max_batch=4), None)
    line = Line()
    engine = Engine(model, plan, set())
    answers: list[list[int]] = []
    cached = 0
    for prompt in turns(plan.layout.vocabulary, answers):
        line.turn()
        request = Request(prompt, ANSWER)
        engine.submit(request)
        while not engine.idle:
            engine.step()
        answers.append(request.tokens)
        cached += request.cached_tokens
    return {**line.close(), "cached_tokens": cached, "budget": plan.pool_bytes}


def mlx_lm() -> dict[str, Any]:
    # First: it gives MLX a fast BLAS.
    from onekv.bench.decode import bench_model  # isort: skip
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

    from onekv.config import Settings
    from onekv.memory.plan import make_plan

    model = bench_model("smollm2-135m", None, own=False)
    vocabulary = make_plan(model, Settings(kv_memory="1GiB"), None).layout.vocabulary
    line = Line()
    stock: Any = LRUPromptCache()
    answers: list[list[int]] = []
    cached = 0
    for prompt in turns(vocabulary, answers):
        line.turn()
        caches, rest = stock.fetch_nearest_cache("model", prompt)
        caches, rest = caches or make_prompt_cache(model), rest or prompt
        cached += len(prompt) - len(rest)
        answer = [int(t) for t, _ in generate_step(mx.array(rest), model, max_tokens=ANSWER, prompt_cache=caches)]
        answers.append(answer)
        stock.insert_cache("model", prompt + answer[:-1], caches)
        del caches
    return {**line.close(), "cached_tokens": cached}


def draw(about: dict[str, Any]) -> str:
    width, height, left, right, top, bottom = 760, 340, 64, 16, 56, 44
    sides = about["sides"]
    most = 1.08 * max(side["peak"] for side in sides.values())
    count = sides["OneKV"]["turns"]

    def x(turn: float) -> float:
        return left + (width - left - right) * turn / count

    def y(size: float) -> float:
        return height - bottom - (height - top - bottom) * max(0.0, size) / most

    mib = 1 << 20
    step = next(s for s in (32, 64, 128, 256, 512) if most / (s * mib) <= 7)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="20" font-weight="bold" font-size="14">Memory beyond the weights, turn by turn</text>',
    ]
    for size in range(0, int(most / mib) + 1, step):
        parts.append(
            f'<line x1="{left}" x2="{width - right}" y1="{y(size * mib):.1f}" y2="{y(size * mib):.1f}" stroke="#ddd"/>'
        )
        parts.append(
            f'<text x="{left - 8}" y="{y(size * mib) + 4:.1f}" text-anchor="end" fill="#555">{size} MiB</text>'
        )
    labels = ["document", *["continued"] * FOLLOWED, *["another one"] * OTHERS]
    for turn, label in enumerate(labels):
        parts.append(
            f'<text x="{x(turn + 0.5):.1f}" y="{height - bottom + 18}" text-anchor="middle" fill="#555">{label}</text>'
        )
    for number, (name, side) in enumerate(sides.items()):
        path = " ".join(f"{x(turn):.1f},{y(size):.1f}" for turn, size in side["points"])
        colour = COLOURS[name]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        legend = left + number * 250
        parts.append(f'<line x1="{legend}" x2="{legend + 22}" y1="38" y2="38" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{legend + 28}" y="42">{name}, at most {side["peak"] / mib:.0f} MiB</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=["onekv", "mlx-lm"], help=argparse.SUPPRESS)
    parser.add_argument("--from", dest="recorded", metavar="FILE")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(onekv() if arguments.side == "onekv" else mlx_lm()))
        return
    if arguments.recorded:
        about = json.loads(Path(arguments.recorded).read_text())
    else:
        sides = {}
        for name, side in (("mlx-lm", "mlx-lm"), ("OneKV", "onekv")):
            command = [sys.executable, __file__, "--side", side]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            sides[name] = json.loads(done.stdout.splitlines()[-1])
        from onekv.bench.decode import about as machine

        about = {
            **machine("smollm2-135m"),
            "document": DOCUMENT,
            "question": QUESTION,
            "answer": ANSWER,
            "sides": sides,
        }
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(about) + "\n")
    if arguments.plot:
        Path(arguments.plot).write_text(draw(about))
    for name, side in about["sides"].items():
        print(f"{name}: at most {side['peak'] / 2**20:.1f} MiB, {side['cached_tokens']:,} prompt tokens from the cache")


if __name__ == "__main__":
    main()
