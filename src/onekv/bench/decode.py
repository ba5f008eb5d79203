"""Prefill and decode speed of OneKV and mlx-lm, with the same weights, in one process.

Both sides hold their KV of the same prompts at the same time and take turns: a round is N tokens of one, then N tokens
of the other. mlx-lm runs through its own entry points: `generate_step` for one sequence, `BatchGenerator` for several.
Sequences that are prefilled first decode while the others are prefilled. Answers are long enough that none ends before
the last round, and every measured step has all rows.
"""

import argparse
import json
import os
import platform
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
from ..memory import pairs
from ..memory.attention import shared
from ..memory.attention.numba import plain
from ..memory.plan import make_plan
from ..memory.plan.device import read_device
from ..models import load_model
from ..models.joined import fuse
from ..tables import table
from ..units import format_size
from .roofline import bandwidth, step_bytes

# Tokens that rows must begin with to read them together.
TOGETHER = 256

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
    """Medians over the rounds; a ratio is of OneKV's speed to the peer's, above 1 where OneKV is faster.

    The peer is mlx-lm; where prompts share their first `shared` tokens, it is OneKV with every row reading for itself.
    """

    batch: int
    context: int
    shared: int
    prefill_tokens_per_s: float
    prefill_peer: float
    prefill_ratio: float
    decode_tokens_per_s: float
    decode_peer: float
    decode_ratio: float
    kv_bytes: int
    # What a step must read over the bandwidth of this machine, as a share of the time it took.
    roofline: float


def run(arguments: argparse.Namespace) -> None:
    cases = [_case(text) for text in arguments.case or ["1x2048", "4x1024"]]
    own = bench_model(arguments.model, arguments.dtype)
    peer = own if arguments.shared else bench_model(arguments.model, arguments.dtype, own=False)
    per_second = bandwidth()
    results = []
    for batch, context in cases:
        print(f"measuring {batch} x {context} tokens ...", file=sys.stderr, flush=True)
        results.append(measure(own, peer, batch, context, per_second, arguments))
        print(_format(results[-1:]), file=sys.stderr, flush=True)
    print(_format(results))
    print(f"roofline: bytes that a step must read at {format_size(int(per_second))}/s, measured here")
    if arguments.json:
        how = {name: getattr(arguments, name) for name in ("tokens", "rounds", "block_size", "shared")}
        how["bandwidth"] = per_second
        text = json.dumps({**about(arguments.model), **how, "results": [asdict(r) for r in results]}, indent=2)
        Path(arguments.json).write_text(text + "\n")


def measure(
    own: Module, peer: Module, batch: int, context: int, per_second: float, arguments: argparse.Namespace
) -> Result:
    """Both sides on `batch` random prompts of `context` tokens, `rounds` times `tokens` tokens decoded."""
    tokens, rounds, common = arguments.tokens, arguments.rounds, min(arguments.shared, context - 1)
    # What the first sequence decodes while the others are prefilled, in chunks of at least 256 tokens.
    total = tokens * (rounds + 1) + batch * (1 + context // 256 if batch > 1 else 0)
    ours = _OneKV(own, batch, context + total, arguments.block_size, common)
    generator = np.random.default_rng(context)
    prompts = generator.integers(0, ours.engine.plan.layout.vocabulary, (batch, context))
    prompts[:, :common] = prompts[0, :common]
    starts: list[Callable[[], Iterator[None]]] = [lambda: ours.start(prompts.tolist(), total)]
    if common:
        apart = _OneKV(own, batch, context + total, arguments.block_size, common, together=False)
        starts.append(lambda: apart.start(prompts.tolist(), total))
    else:
        starts.append(lambda: stock(peer, prompts.tolist(), total))

    prefill: list[list[float]] = [[], []]
    decode: list[list[float]] = [[], []]
    # The last prefill's iterators continue to decode; the others are dropped. The first round warms up.
    repeats = 3 if batch * context <= 8192 else 2
    for repeat in range(repeats):
        running = []
        for side, start in enumerate(starts):
            begin = time.perf_counter()
            running.append(start())
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
    # On average over what was measured.
    read = ours.stored() - batch * tokens * rounds // 2 - (batch - 1) * common
    del running
    median = statistics.median
    token_bytes = sum(group.token_bytes for group in ours.engine.plan.layout.groups)
    return Result(
        batch,
        context,
        common,
        prefill_tokens_per_s=batch * context / median(prefill[0]),
        prefill_peer=batch * context / median(prefill[1]),
        prefill_ratio=median(b / a for a, b in zip(*prefill, strict=True)),
        decode_tokens_per_s=batch * tokens / median(decode[0]),
        decode_peer=batch * tokens / median(decode[1]),
        decode_ratio=median(b / a for a, b in zip(*decode, strict=True)),
        kv_bytes=ours.engine.plan.pool_bytes,
        roofline=step_bytes(own, token_bytes, read) / per_second / (median(decode[0]) / tokens),
    )


class _OneKV:
    def __init__(
        self, model: Module, batch: int, length: int, block_size: int, common: int, together: bool = True
    ) -> None:
        # A token per step on both sides. Without the prefix cache, every round computes its prompts.
        options: dict[str, Any] = {
            "max_batch": batch,
            "block_size": block_size,
            "speculate": "off",
            "prefix_cache": common > 0,
        }
        probe = make_plan(model, Settings(kv_memory="1GiB", **options), None)
        token_bytes = sum(g.token_bytes for g in probe.layout.groups)
        # What is shared is stored once. Rounded up as the plan rounds down.
        common_blocks = common // block_size
        blocks = common_blocks + batch * (-(-length // block_size) - common_blocks)
        blocks = -(-blocks * block_size // 256) * 256 // block_size
        settings = Settings(kv_memory=max(1, blocks * block_size * token_bytes), **options)
        self.engine = Engine(model, make_plan(model, settings, None), set(), settings)
        self._common, self._together = common, together
        self._requests: list[Request] = []

    def start(self, prompts: list[list[int]], tokens: int) -> Iterator[None]:
        """Yields each time all sequences have one token more."""
        if self._common:
            # What is shared is there before the others come.
            self.engine.submit(Request(prompts[0][: self._common + 1], 1))
            while not self.engine.idle:
                self._step()
        requests = self._requests = [Request(prompt, tokens) for prompt in prompts]
        try:
            for request in requests:
                self.engine.submit(request)
            for count in range(1, tokens + 1):
                while min(len(request.tokens) for request in requests) < count:
                    self._step()
                yield
        finally:
            self.engine.cancel(requests)

    def stored(self) -> int:
        """Tokens of all sequences."""
        return sum(len(request.all_tokens) for request in self._requests)

    def _step(self) -> None:
        # Of CUDA kernels, of MLX's operations and of compiled loops.
        kept = pairs.SHARED, shared.LEAST, plain.LEAST
        pairs.SHARED = shared.LEAST = plain.LEAST = TOGETHER if self._together else 0
        try:
            self.engine.step()
        finally:
            pairs.SHARED, shared.LEAST, plain.LEAST = kept


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
    produced = dict.fromkeys(generator.insert(prompts, max_tokens=[tokens] * batch), 0)
    for count in range(1, tokens + 1):
        while min(produced.values()) < count:
            for response in generator.next_generated():
                produced[response.uid] += 1
        yield


def about(model: str) -> dict[str, Any]:
    """What every recorded result says of itself; bytes of memory are those that the process may use on the device."""
    device = read_device()
    return {
        "date": date.today().isoformat(),
        "model": model,
        "device": device.name,
        "cores": os.cpu_count(),
        "memory": device.total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("onekv", "mlx", "mlx-lm")},
    }


def bench_model(name: str, dtype: str | None, own: bool = True) -> Module:
    """As OneKV runs it, or as mlx-lm does, in its fastest form: unpacked on CPU, nothing joined."""
    if name != "8b":
        return load_model(name, dtype=dtype, join=own, packed=own).model
    mx.random.seed(0)
    model: Module = llama.Model(llama.ModelArgs.from_dict(SHAPE_8B))
    model.set_dtype(getattr(mx, dtype or "bfloat16"))
    mx.eval(model.parameters())
    if own and mx.default_device() == mx.gpu:
        fuse(model)
    return model


def _case(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise SettingError(f"--case is {text!r}; write it like 4x1024 (sequences x tokens)")
    return int(parts[0]), int(parts[1])


def _format(results: list[Result]) -> str:
    rows = [
        [
            f"{r.batch} x {r.context}" + (f", {r.shared} shared" if r.shared else ""),
            f"{r.prefill_tokens_per_s:.1f}",
            f"{r.prefill_peer:.1f}",
            f"{r.prefill_ratio:.2f}x",
            f"{r.decode_tokens_per_s:.1f}",
            f"{r.decode_peer:.1f}",
            f"{r.decode_ratio:.2f}x",
            f"{r.roofline:.0%}",
            format_size(r.kv_bytes),
        ]
        for r in results
    ]
    peer = "apart" if any(r.shared for r in results) else "mlx-lm"
    speeds = ["prefill tok/s", peer, "ratio", "decode tok/s", peer, "ratio"]
    header = ["batch x context", *speeds, "of roofline", "KV pool"]
    return table(rows, header)
