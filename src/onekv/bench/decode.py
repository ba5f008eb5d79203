"""Prefill and decode speed of OneKV and mlx-lm, on one model object, in one process.

Both sides hold their KV of the same prompts at the same time and take turns: a round is N tokens of one, then N tokens
of the other. mlx-lm runs through its own entry points: `generate_step` for one sequence, `BatchGenerator` for several.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import llama

from ..config import Settings
from ..engine import Engine, Request
from ..errors import SettingError
from ..memory.plan import make_plan
from ..models import load_model
from ..report import table
from ..units import format_size

# Shape of an 8B Llama: enough to measure speed with, no weights to fetch.
SHAPE_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Result:
    """Medians over the rounds; a ratio is of OneKV's speed to mlx-lm's, above 1 where OneKV is faster."""

    batch: int
    context: int
    prefill_tokens_per_s: float
    prefill_mlx_lm: float
    prefill_ratio: float
    decode_tokens_per_s: float
    decode_mlx_lm: float
    decode_ratio: float
    kv_bytes: int


def run(arguments: argparse.Namespace) -> None:
    cases = [_case(text) for text in arguments.case or ["1x2048", "4x1024"]]
    model = bench_model(arguments.model, arguments.dtype)
    results = []
    for batch, context in cases:
        print(f"measuring {batch} x {context} tokens ...", file=sys.stderr, flush=True)
        results.append(measure(model, batch, context, arguments.tokens, arguments.rounds, arguments.block_size))
        print(_format(results[-1:]), file=sys.stderr, flush=True)
    print(_format(results))
    if arguments.json:
        how = {"tokens": arguments.tokens, "rounds": arguments.rounds, "block_size": arguments.block_size}
        text = json.dumps({**about(arguments.model), **how, "results": [asdict(r) for r in results]}, indent=2)
        Path(arguments.json).write_text(text + "\n")


def measure(model: Module, batch: int, context: int, tokens: int, rounds: int, block_size: int) -> Result:
    """Both sides on `batch` random prompts of `context` tokens, `rounds` times `tokens` tokens decoded."""
    total = tokens * (rounds + 1)
    ours = _OneKV(model, batch, context + total, block_size)
    vocabulary = ours.engine.plan.layout.vocabulary
    generator = np.random.default_rng(context)
    prompts = generator.integers(0, vocabulary, (batch, context)).tolist()
    sides: tuple[Callable[..., Iterator[None]], ...] = (ours.start, lambda p, n: stock(model, p, n))

    prefill: list[list[float]] = [[], []]
    decode: list[list[float]] = [[], []]
    # The last prefill's iterators go on to decode; the others are dropped. The first round warms up.
    repeats = 3 if batch * context <= 8192 else 2
    for repeat in range(repeats):
        running = []
        for side, start in enumerate(sides):
            begin = time.perf_counter()
            running.append(start(prompts, total))
            next(running[-1])
            if repeat:
                prefill[side].append(time.perf_counter() - begin)
    for repeat in range(rounds + 1):
        for side, steps in enumerate(running):
            begin = time.perf_counter()
            for _ in range(tokens - (repeat == 0)):
                next(steps)
            if repeat:
                decode[side].append(time.perf_counter() - begin)
    del running
    median = statistics.median
    return Result(
        batch,
        context,
        prefill_tokens_per_s=batch * context / median(prefill[0]),
        prefill_mlx_lm=batch * context / median(prefill[1]),
        prefill_ratio=median(b / a for a, b in zip(*prefill, strict=True)),
        decode_tokens_per_s=batch * tokens / median(decode[0]),
        decode_mlx_lm=batch * tokens / median(decode[1]),
        decode_ratio=median(b / a for a, b in zip(*decode, strict=True)),
        kv_bytes=ours.engine.plan.pool_bytes,
    )


class _OneKV:
    def __init__(self, model: Module, batch: int, length: int, block_size: int) -> None:
        settings = Settings(max_batch=batch, block_size=block_size, kv_memory="1GiB")
        token_bytes = sum(g.token_bytes for g in make_plan(model, settings, None).layout.groups)
        # Rounded up as the plan rounds down.
        blocks = -(-batch * -(-length // block_size) * block_size // 256) * 256 // block_size
        settings = Settings(
            max_batch=batch,
            block_size=block_size,
            prefix_cache=False,
            kv_memory=max(1, blocks * block_size * token_bytes),
        )
        # Without the prefix cache, so that every round computes its prompts.
        self.engine = Engine(model, make_plan(model, settings, None), set(), settings)

    def start(self, prompts: list[list[int]], tokens: int) -> Iterator[None]:
        """Yields each time all sequences have one token more."""
        requests = [Request(prompt, tokens) for prompt in prompts]
        try:
            for request in requests:
                self.engine.submit(request)
            for count in range(1, tokens + 1):
                while min(len(request.tokens) for request in requests) < count:
                    self.engine.step()
                yield
        finally:
            self.engine.cancel(requests)


def stock(model: Module, prompts: list[list[int]], tokens: int) -> Iterator[None]:
    """The same with mlx-lm."""
    if len(prompts) == 1:
        for _ in generate_step(mx.array(prompts[0]), model, max_tokens=tokens):
            yield
        return
    batch = len(prompts)
    # With all prompts at once mlx-lm runs out of 139 GiB at 8 x 16384 tokens: its masked attention makes all scores.
    together = max(1, min(batch, 32768 // len(prompts[0])))
    generator = BatchGenerator(model, completion_batch_size=batch, prefill_batch_size=together)
    generator.insert(prompts, max_tokens=[tokens] * batch)
    produced = 0
    while produced < batch * tokens:
        before = produced // batch
        produced += len(generator.next_generated())
        if produced // batch > before:
            yield


def about(model: str) -> dict[str, Any]:
    """What every recorded result says of itself."""
    return {
        "date": date.today().isoformat(),
        "model": model,
        "device": str(mx.device_info().get("device_name", mx.default_device())),
        "versions": {name: version(name) for name in ("onekv", "mlx", "mlx-lm")},
    }


def bench_model(name: str, dtype: str | None) -> Module:
    if name != "8b":
        return load_model(name, dtype=dtype).model
    mx.random.seed(0)
    model: Module = llama.Model(llama.ModelArgs.from_dict(SHAPE_8B))
    model.set_dtype(getattr(mx, dtype or "bfloat16"))
    mx.eval(model.parameters())
    return model


def _case(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise SettingError(f"--case is {text!r}; write it like 4x1024 (sequences x tokens)")
    return int(parts[0]), int(parts[1])


def _format(results: list[Result]) -> str:
    rows = [
        [
            f"{r.batch} x {r.context}",
            f"{r.prefill_tokens_per_s:.1f}",
            f"{r.prefill_mlx_lm:.1f}",
            f"{r.prefill_ratio:.2f}x",
            f"{r.decode_tokens_per_s:.1f}",
            f"{r.decode_mlx_lm:.1f}",
            f"{r.decode_ratio:.2f}x",
            format_size(r.kv_bytes),
        ]
        for r in results
    ]
    header = ["batch x context", "prefill tok/s", "mlx-lm", "ratio", "decode tok/s", "mlx-lm", "ratio", "KV pool"]
    return table(rows, header)
