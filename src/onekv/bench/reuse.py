"""The cost of continuing a cached conversation: OneKV's prefix cache compared with mlx-lm's LRUPromptCache.

On one model object, in one process, interleaved. For each size K of the conversation's KV: the conversation is stored
once, then it is continued by a few tokens and one token is generated; peak memory above the level before is exact, the
time to that token is a median.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

from ..config import Settings
from ..engine import Engine, Request
from ..memory.plan import make_plan
from ..tables import table
from ..units import format_size, parse_size
from .decode import about, bench_model

ADDED = 16


@dataclass(frozen=True)
class Result:
    """`peak` is what continuing adds to active memory at most; seconds are to the first new token."""

    tokens: int
    kv_bytes: int
    peak: int
    peak_mlx_lm: int
    seconds: float
    seconds_mlx_lm: float


def run(arguments: argparse.Namespace) -> None:
    model = bench_model(arguments.model, arguments.dtype)
    peer = bench_model(arguments.model, arguments.dtype, own=False)
    results = [
        measure(model, peer, parse_size(size, name="--size"), arguments.rounds)
        for size in arguments.size or ["50MB", "100MB", "200MB"]
    ]
    rows = [
        [
            f"{r.tokens:,}",
            format_size(r.kv_bytes),
            f"{format_size(r.peak)} ({r.peak / r.kv_bytes:.2f} K)",
            f"{format_size(r.peak_mlx_lm)} ({r.peak_mlx_lm / r.kv_bytes:.2f} K)",
            f"{r.seconds * 1e3:.0f} ms",
            f"{r.seconds_mlx_lm * 1e3:.0f} ms",
        ]
        for r in results
    ]
    header = ["tokens cached", "KV bytes, K", "peak above", "mlx-lm", "first token", "mlx-lm"]
    print(table(rows, header))
    if arguments.json:
        text = json.dumps({**about(arguments.model), "results": [asdict(r) for r in results]}, indent=2)
        Path(arguments.json).write_text(text + "\n")


def measure(model: Module, peer: Module, kv_bytes: int, rounds: int) -> Result:
    probe = make_plan(model, Settings(kv_memory="1GiB"), None)
    token_bytes = sum(group.token_bytes for group in probe.layout.groups)
    length = kv_bytes // token_bytes
    prompt = np.random.default_rng(0).integers(0, probe.layout.vocabulary, length).tolist()
    more = np.random.default_rng(1).integers(0, probe.layout.vocabulary, (rounds + 1, ADDED)).tolist()

    budget = (length + 4096) * token_bytes
    engine = Engine(model, make_plan(model, Settings(kv_memory=budget, max_batch=1), None), set())
    _generate(engine, prompt)
    stock = LRUPromptCache()
    caches = make_prompt_cache(peer)
    for _ in generate_step(mx.array(prompt), peer, max_tokens=1, prompt_cache=caches):
        pass
    stock.insert_cache("model", prompt, caches)
    del caches

    sides: tuple[Callable[[list[int]], None], ...] = (
        lambda tokens: _generate(engine, prompt + tokens),
        lambda tokens: _generate_stock(peer, stock, prompt + tokens),
    )
    peaks: list[list[int]] = [[], []]
    seconds: list[list[float]] = [[], []]
    for tokens in more:
        for side, continued in enumerate(sides):
            gc.collect()
            mx.synchronize()
            mx.reset_peak_memory()
            before, begin = mx.get_active_memory(), time.perf_counter()
            continued(tokens)
            seconds[side].append(time.perf_counter() - begin)
            peaks[side].append(mx.get_peak_memory() - before)
    # The first round warms up.
    medians = [statistics.median(times[1:]) for times in seconds]
    return Result(length, length * token_bytes, max(peaks[0][1:]), max(peaks[1][1:]), medians[0], medians[1])


def _generate(engine: Engine, prompt: list[int]) -> None:
    engine.submit(Request(prompt, 1))
    while not engine.idle:
        engine.step()


def _generate_stock(model: Module, stock: LRUPromptCache, prompt: list[int]) -> None:
    """As mlx-lm's server does it: fetch the nearest entry, prefill the rest, generate."""
    caches, rest = stock.fetch_nearest_cache("model", prompt)
    for _ in generate_step(mx.array(rest), model, max_tokens=1, prompt_cache=caches):
        pass
