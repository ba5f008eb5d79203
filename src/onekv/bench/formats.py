"""Decode speed of every KV format compared with plain KV, on one model object, in one process.

Each format has an engine with a pool of its own, all holding a context of the same length, and they take turns: a
round is N tokens of every format, plain first. A ratio is a format's speed over that of plain KV in the same round;
figures are medians over the rounds, the first of which is a warm-up. All pools must fit into memory at once.

The first `PROMPT` tokens of the context are prefilled, and timed; the keys and values of the rest are random numbers,
encoded and stored like all others: decoding takes equally long, and a long context is ready within seconds.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from ..config import Settings
from ..engine import Engine
from ..memory.formats import compared
from ..memory.plan import make_plan
from ..tables import table
from ..units import format_size
from .decode import about, bench_model
from .quality import asked

# Tokens that the model reads, and how many it reads at a time.
PROMPT, CHUNK = 1024, 256


@dataclass(frozen=True)
class Result:
    """`ratio` is above 1 where the format is faster than plain; `kv_bytes` is what the context takes."""

    format: str
    context: int
    token_bytes: int
    kv_bytes: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    ratio: float


def run(arguments: argparse.Namespace) -> None:
    names = asked(arguments.format or compared())
    model = bench_model(arguments.model, arguments.dtype)
    results = measure(model, names, arguments.context, arguments.tokens, arguments.rounds)
    print(_format(results))
    if arguments.json:
        how = {"context": arguments.context, "tokens": arguments.tokens, "rounds": arguments.rounds}
        whole = {**about(arguments.model), **how, "results": [asdict(r) for r in results]}
        Path(arguments.json).write_text(json.dumps(whole, indent=2) + "\n")


def measure(model: Module, names: list[str], context: int, tokens: int, rounds: int) -> list[Result]:
    """All `names`, plain first, after `context` random tokens."""
    sides = [_Side(model, name, context, tokens * (rounds + 1) + 1) for name in names]
    for repeat in range(rounds + 1):
        for side in sides:
            side.decode(tokens, timed=repeat > 0)
    median = statistics.median
    return [
        Result(
            side.name,
            context,
            side.token_bytes,
            side.token_bytes * context,
            side.prefill_tokens_per_s,
            tokens / median(side.seconds),
            median(plain / own for plain, own in zip(sides[0].seconds, side.seconds, strict=True)),
        )
        for side in sides
    ]


class _Side:
    def __init__(self, model: Module, name: str, context: int, tokens: int) -> None:
        """Stores the context; `tokens` can be decoded after it."""
        self.name, self._model = name, model
        common: dict[str, Any] = {"kv_format": name, "max_batch": 1, "prefix_cache": False, "prefill_chunk": CHUNK}
        probe = make_plan(model, Settings(kv_memory="1GiB", **common), None)
        self.token_bytes = sum(group.token_bytes for group in probe.layout.groups)
        # Rounded up as the plan rounds down.
        length = -(-(context + tokens) // 256) * 256
        settings = Settings(kv_memory=length * self.token_bytes + probe.state_bytes, **common)
        # Any tokens: the time does not depend on what is found.
        plan = make_plan(model, settings, None, range(1, 65))
        engine = Engine(model, plan, set(), settings)
        self._memory, self._runner = engine.memory, engine.runner
        self._sequence = self._memory.open(context + tokens)
        self.seconds: list[float] = []
        print(f"storing {context} tokens in {name} ...", file=sys.stderr, flush=True)
        prompt = np.random.default_rng(context).integers(0, plan.layout.vocabulary, min(context, PROMPT)).tolist()
        begin = time.perf_counter()
        for start in range(0, len(prompt), CHUNK):
            # As the engine stores chunks of a prompt: without logits.
            self._runner.store([self._sequence], [prompt[start : start + CHUNK]])
        self.prefill_tokens_per_s = len(prompt) / (time.perf_counter() - begin)
        for start in range(len(prompt), context, CHUNK):
            self._fill(min(CHUNK, context - start))
        self._sequence.prefilled()
        self._token = mx.array([[prompt[-1]]])

    def decode(self, tokens: int, timed: bool) -> None:
        begin = time.perf_counter()
        for _ in range(tokens):
            # As the engine decodes: compiled, where it is.
            self._token = self._runner.forward([self._sequence], self._token[0]).argmax(axis=-1)[None]
            mx.eval(self._token, self._memory.arrays())
        if timed:
            self.seconds.append(time.perf_counter() - begin)

    def _fill(self, count: int) -> None:
        """Store `count` tokens of random keys and values."""
        layout = self._memory.layout
        with self._memory.step([self._sequence], count) as caches:
            for leaf, cache in layout.leaves(caches):
                layer = layout.groups[leaf.group].layers[leaf.layer] if leaf.group >= 0 else None
                if layer is not None and layer.heads:
                    shapes = [(1, layer.heads, count, dim) for dim in (layer.k_dim, layer.v_dim)]
                    cache.update_and_fetch(*(mx.random.normal(shape, layer.dtype) for shape in shapes))
        mx.eval(self._memory.arrays())


def _format(results: list[Result]) -> str:
    rows = [
        [
            r.format,
            format_size(r.token_bytes),
            format_size(r.kv_bytes),
            f"{r.prefill_tokens_per_s:.1f}",
            f"{r.decode_tokens_per_s:.2f}",
            f"{r.ratio:.2f}x",
        ]
        for r in results
    ]
    context = f"KV of {results[0].context:,} tokens"
    return table(rows, ["format", "per token", context, "prefill tok/s", "decode tok/s", "against plain"])
