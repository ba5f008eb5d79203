"""Peak memory of mlx-lm's caches and of OneKV's replacements, as multiples of one conversation's KV.

A small random model with a large KV is used, in one process, each case first with mlx-lm's classes, then with OneKV's.
A figure is the maximum rise of active memory above the level before the case, divided by the KV bytes of one entry.
Activations and attention scores are included, on both sides.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.generate  # noqa: F401  (the package has a function of this name)
import numpy as np
from mlx_lm.models import cache as caches
from mlx_lm.models import llama

from ..mlx_lm import installed
from ..tables import table
from ..units import format_size
from .decode import about

LAYERS, HEADS, DIM, VOCABULARY = 8, 8, 64, 512
SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 128,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": DIM,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
}
JOINING = 3


@dataclass(frozen=True)
class Result:
    """Peaks, in parts of `entry` bytes."""

    case: str
    entry: int
    mlx_lm: float
    onekv: float


def run(arguments: argparse.Namespace) -> None:
    results = measure(arguments.tokens)
    rows = [[r.case, format_size(r.entry), f"{r.mlx_lm:.2f}", f"{r.onekv:.2f}"] for r in results]
    print(table(rows, ["peak above the level before, in parts of one entry", "entry", "mlx-lm", "OneKV"]))
    Path(arguments.plot).write_text(plot(results))
    print(f"\nplot: {arguments.plot}")
    if arguments.json:
        text = json.dumps({**about("random llama"), "results": [asdict(r) for r in results]}, indent=2)
        Path(arguments.json).write_text(text + "\n")


def measure(tokens: int) -> list[Result]:
    tokens = tokens // 256 * 256
    mx.random.seed(0)
    model: Any = llama.Model(llama.ModelArgs.from_dict(SHAPE))
    mx.eval(model.parameters())
    entry = tokens * 2 * 4 * LAYERS * HEADS * DIM
    results = []
    for name, case in CASES.items():
        sides: list[AbstractContextManager[None]] = [nullcontext(), installed()]
        rises = []
        for side in sides:
            with side:
                rises.append(case(model, tokens) / entry)
        results.append(Result(name, entry, *rises))
    return results


# The cases. Each gives the bytes that active memory rose.


def _rise(work: Callable[[], Any]) -> int:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    level = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    mx.synchronize()
    return mx.get_peak_memory() - level


def _prompt(tokens: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, tokens).tolist()
    return ids


def _filled(model: Any, tokens: int) -> list[Any]:
    """Caches of `model` that hold this many tokens, whatever they are: nothing is computed."""
    made: list[Any] = caches.make_prompt_cache(model)
    for cache in made:
        shape = (1, HEADS, tokens, DIM)
        cache.update_and_fetch(mx.zeros(shape), mx.zeros(shape))
        mx.eval(cache.state)
    return made


def _step(model: Any, made: list[Any], tokens: int = 1) -> None:
    mx.eval(model(mx.zeros((1, tokens), mx.int32), cache=made))
    mx.eval([cache.state for cache in made])


def _fetch(model: Any, tokens: int, held: int) -> int:
    index = caches.LRUPromptCache()
    index.insert_cache("model", _prompt(held), _filled(model, held))

    def work() -> None:
        found, _ = index.fetch_nearest_cache("model", [*_prompt(tokens), 1])
        assert found is not None
        _step(model, found)

    return _rise(work)


def fetch_and_step(model: Any, tokens: int) -> int:
    return _fetch(model, tokens, tokens - 100)


def fetch_longer_and_step(model: Any, tokens: int) -> int:
    """The entry diverges from the prompt after its first tokens."""
    index = caches.LRUPromptCache()
    index.insert_cache("model", _prompt(tokens - 100), _filled(model, tokens - 100))

    def work() -> None:
        found, _ = index.fetch_nearest_cache("model", [*_prompt(tokens - 200), 1])
        assert found is not None
        _step(model, found)

    return _rise(work)


def fetch_and_grow(model: Any, tokens: int) -> int:
    """The entry's arrays are full."""
    return _fetch(model, tokens, tokens)


def three_at_once(model: Any, tokens: int) -> int:
    index = caches.LRUPromptCache()
    index.insert_cache("model", _prompt(tokens - 100), _filled(model, tokens - 100))

    def work() -> None:
        found = [index.fetch_nearest_cache("model", [*_prompt(tokens - 100), n])[0] for n in range(3)]
        for made in found:
            assert made is not None
            _step(model, made)

    return _rise(work)


def rotate(model: Any, tokens: int) -> int:
    """From the first update to the maximum by chunks, then past it one by one."""
    made = [caches.RotatingKVCache(tokens) for _ in model.layers]
    _step(model, made, 64)

    def work() -> None:
        # Small chunks, so that their scores are no large part of it.
        for count in [*[16] * ((tokens - 64) // 16), *[1] * 20]:
            _step(model, made, count)

    return _rise(work)


def join(model: Any, tokens: int) -> int:
    """A cached conversation joins three that are being generated."""
    generator = sys.modules["mlx_lm.generate"].BatchGenerator(model)
    for seed in range(JOINING):
        generator.insert([[1, 2]], [100], caches=[_filled(model, tokens)], all_tokens=[_prompt(tokens, seed)])
    for _ in range(6):
        generator.next()
    joining = _filled(model, tokens)

    def work() -> None:
        nonlocal joining
        generator.insert([[1, 2]], [16], caches=[joining], all_tokens=[_prompt(tokens, 9)])
        joining = []
        for _ in range(4):
            generator.next()

    rise = _rise(work)
    generator.close()
    return rise


def join_from_one(model: Any, tokens: int) -> int:
    """Three requests continue one cached conversation in one batch."""
    index = caches.LRUPromptCache()
    index.insert_cache("model", _prompt(tokens - 100), _filled(model, tokens - 100))
    generator = sys.modules["mlx_lm.generate"].BatchGenerator(model)

    def work() -> None:
        for n in range(JOINING):
            found, rest = index.fetch_nearest_cache("model", [*_prompt(tokens - 100), n, n])
            generator.insert([rest], [16], caches=[found], all_tokens=[_prompt(tokens - 100)])
            del found
        for _ in range(6):
            generator.next()

    rise = _rise(work)
    generator.close()
    return rise


CASES: dict[str, Callable[[Any, int], int]] = {
    "fetch a conversation, first step": fetch_and_step,
    "fetch a longer one, trim, first step": fetch_longer_and_step,
    "fetch one whose arrays are full, first step": fetch_and_grow,
    "three requests on one conversation": three_at_once,
    "rotating cache, first update to past its maximum": rotate,
    "three requests on one conversation, in a batch": join_from_one,
    "another conversation joins a batch of 3": join,
}


def plot(results: list[Result]) -> str:
    """Two bars for each case, as SVG."""
    width, left, row, top = 760, 330, 46, 40
    most = max([1.0, *(max(r.mlx_lm, r.onekv) for r in results)])
    scale = (width - left - 60) / most
    parts = [f'<text x="{left}" y="20" font-weight="bold">peak, in parts of one conversation\'s KV</text>']
    for i, result in enumerate(results):
        y = top + i * row
        parts.append(f'<text x="{left - 8}" y="{y + 20}" text-anchor="end">{result.case}</text>')
        for line, (value, color, side) in enumerate(
            [(result.mlx_lm, "#c0504d", "mlx-lm"), (result.onekv, "#4f81bd", "OneKV")]
        ):
            at = y + line * 16
            parts.append(
                f'<rect x="{left}" y="{at}" width="{max(1.0, value * scale):.1f}" height="13" fill="{color}"/>'
            )
            parts.append(
                f'<text x="{left + value * scale + 5:.1f}" y="{at + 11}" font-size="11">{side} {value:.2f}</text>'
            )
    height = top + len(results) * row
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="13">\n<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
