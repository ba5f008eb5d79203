"""What the KV formats do to a model's answers: perplexity on a fixed text, and numbers found again in a long context.

Both run through the engine's own memory, so what is read is what was stored.

    perplexity   windows of the text from its beginning, each a sequence of its own. Every token but the first of a
                 window is predicted from the stored keys and values of those before it; prompts are read in chunks
    needles      a text in which eight sentences such as "the phone number of Paris is Paris 4817" are hidden at equal
                 distances and asked for one after another: `found` counts those whose number greedy decoding gives,
                 `answers` is the mean log probability of the right numbers, which says more than a count does

The text is "Alice's Adventures in Wonderland", see data/README.md.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..config import Settings
from ..engine import Engine, Request
from ..errors import SettingError
from ..memory.formats import names, parse
from ..memory.layout.calibration import calibration_tokens
from ..memory.plan import make_plan
from ..models import load_model
from ..report import table
from ..units import format_size
from .decode import about

PLAIN = "auto"
FORMATS = (*names(), "k8v4", "ktq4vtq2")
# Tokens at a time; the logits of all of them are kept.
CHUNK = 256
PLACES = ("Paris", "London", "Madrid", "Berlin", "Vienna", "Lisbon", "Moscow", "Dublin")
NUMBERS = ("4817", "9263", "1574", "6038", "7351", "2946", "8402", "3695")
# A small model finds the number with the place right before it; with "the number of Paris is 4817" it finds few.
FACT = "\n\nRemember this: the phone number of {0} is {0} {1}.\n\n"
QUESTION = "\n\nRemember this: the phone number of {0} is {0}"


@dataclass(frozen=True)
class Result:
    """`change` is the perplexity's, against plain, in per cent; `answers` the mean log probability of an answer."""

    format: str
    token_bytes: int
    tokens_per_gib: int
    perplexity: float
    change: float
    found: int
    asked: int
    answers: float


def asked(formats: Sequence[str]) -> list[str]:
    """The formats to measure, plain first; refuses what is none."""
    for name in formats:
        parse(name)
    return [PLAIN, *(name for name in formats if name != PLAIN)]


def run(arguments: argparse.Namespace) -> None:
    names = asked(arguments.format or FORMATS)
    loaded = load_model(arguments.model, dtype=arguments.dtype)
    text = alice()
    tokens = list(loaded.tokenizer.encode(text))
    if arguments.tokens > len(tokens):
        raise SettingError(f"--tokens is {arguments.tokens}, but the text has {len(tokens)} tokens for this model")
    results: list[Result] = []
    for name in names:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        settings = {"plain_layers": arguments.kv_plain_layers, "window": arguments.window, "context": arguments.needle}
        plain = results[0].perplexity if results else None
        results.append(measure(loaded.model, loaded.tokenizer, tokens[: arguments.tokens], name, plain, **settings))
        print(_format(results[-1:]), file=sys.stderr, flush=True)
    print(_format(results))
    if arguments.json:
        how = {"tokens": arguments.tokens, "window": arguments.window, "needle": arguments.needle}
        how["plain_layers"] = arguments.kv_plain_layers
        whole = {**about(arguments.model), **how, "results": [asdict(r) for r in results]}
        Path(arguments.json).write_text(json.dumps(whole, indent=2) + "\n")


def alice() -> str:
    return files(__package__).joinpath("data/alice.txt").read_text(encoding="utf-8")


def measure(
    model: Module,
    tokenizer: Any,
    tokens: list[int],
    name: str,
    plain: float | None,
    plain_layers: int,
    window: int,
    context: int,
) -> Result:
    """One format; `plain` is the perplexity to compare with."""
    engine = make_engine(model, name, max(window, context + 512), plain_layers, calibration_tokens(tokenizer))
    perplexity = text_perplexity(engine, tokens, window)
    found, answers = needles(engine, tokenizer, tokens, context) if context else ([], [0.0])
    engine.check_integrity()
    token_bytes = sum(group.token_bytes for group in engine.plan.layout.groups)
    return Result(
        name,
        token_bytes,
        2**30 // token_bytes,
        perplexity,
        100 * (perplexity / plain - 1) if plain is not None else 0.0,
        sum(found),
        len(found),
        sum(answers) / len(answers),
    )


def make_engine(
    model: Module, name: str, length: int, plain_layers: int = 0, calibration: Sequence[int] = ()
) -> Engine:
    """An engine whose pool holds one sequence of `length` tokens."""
    common: dict[str, Any] = {
        "kv_format": name,
        "kv_plain_layers": plain_layers,
        "max_batch": 1,
        "prefill_chunk": CHUNK,
    }
    probe = make_plan(model, Settings(kv_memory="4GiB", **common), None)
    token_bytes = sum(group.token_bytes for group in probe.layout.groups)
    budget = token_bytes * (length + 2 * probe.block_size) + probe.state_bytes
    settings = Settings(kv_memory=budget, **common)
    return Engine(model, make_plan(model, settings, None, calibration), set())


def text_perplexity(engine: Engine, tokens: list[int], window: int) -> float:
    """Over all whole windows; a part of one at the end counts if it is all there is."""
    starts = range(0, max(1, len(tokens) - window + 1), window)
    losses: list[float] = []
    for start in starts:
        losses += _losses(engine, tokens[start : start + window])
    return math.exp(sum(losses) / len(losses))


def _losses(engine: Engine, tokens: list[int]) -> list[float]:
    """Minus the log probability of every token but the first, given those before it."""
    memory = engine.memory
    sequence = memory.open(len(tokens))
    losses: list[float] = []
    try:
        while sequence.length < len(tokens):
            start, end = sequence.length, min(sequence.length + CHUNK, len(tokens))
            with memory.step([sequence], end - start) as caches:
                logits = engine.runner.model(mx.array(tokens[start:end])[None], cache=caches)[0].astype(mx.float32)
            following = mx.array(tokens[start + 1 : end + 1])
            known = logits[: following.size]
            chunk = mx.logsumexp(known, axis=-1) - mx.take_along_axis(known, following[:, None], axis=-1)[:, 0]
            mx.eval(chunk, memory.arrays())
            losses += chunk.tolist()  # type: ignore[arg-type]
    finally:
        memory.close(sequence)
    return losses


def needles(engine: Engine, tokenizer: Any, tokens: list[int], context: int) -> tuple[list[bool], list[float]]:
    """Whether each number is found in `context` tokens, and the log probability of the right answer.

    The engine's prefix cache keeps the context for all questions.
    """
    prompt = haystack(tokenizer, tokens, context)
    found, answers = [], []
    for place, number in zip(PLACES, NUMBERS, strict=True):
        question = prompt + tokenizer.encode(QUESTION.format(place), add_special_tokens=False)
        answer = tokenizer.encode(f" {number}", add_special_tokens=False)
        request = Request(question, len(answer))
        engine.submit(request)
        while not engine.idle:
            engine.step()
        found.append(request.tokens == answer)
        answers.append(_answer(engine, question, answer))
    return found, answers


def haystack(tokenizer: Any, tokens: list[int], context: int) -> list[int]:
    """The first tokens of the text with the sentences at equal distances in it, `context` tokens in all."""
    facts = [
        tokenizer.encode(FACT.format(place, number), add_special_tokens=False)
        for place, number in zip(PLACES, NUMBERS, strict=True)
    ]
    rest = context - sum(len(fact) for fact in facts)
    if not 0 < rest <= len(tokens):
        raise SettingError(f"--needle is {context}; there must be room for the text, which has {len(tokens)} tokens")
    prompt: list[int] = []
    for index, fact in enumerate(facts):
        prompt += tokens[index * rest // len(facts) : (2 * index + 1) * rest // (2 * len(facts))] + fact
        prompt += tokens[(2 * index + 1) * rest // (2 * len(facts)) : (index + 1) * rest // len(facts)]
    return prompt


def _answer(engine: Engine, question: list[int], answer: list[int]) -> float:
    """The log probability of `answer`."""
    tokens = question + answer[:-1]
    lease = engine.prefix.open(tokens[: len(question)], len(tokens))
    sequence, start = lease.sequence, lease.sequence.length
    lease.grow(len(tokens) - start)
    with engine.memory.step([sequence], len(tokens) - start) as caches:
        logits = engine.runner.model(mx.array(tokens[start:])[None], cache=caches)[0, -len(answer) :].astype(mx.float32)
    logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    total = mx.take_along_axis(logs, mx.array(answer)[:, None], axis=-1).sum()
    mx.eval(total, engine.memory.arrays())
    lease.release()
    return float(total.item())  # type: ignore[arg-type]


def _format(results: list[Result]) -> str:
    rows = [
        [
            r.format,
            format_size(r.token_bytes),
            f"{r.tokens_per_gib:,}",
            f"{r.perplexity:.3f}",
            f"{r.change:+.2f} %",
            f"{r.found} of {r.asked}",
            f"{r.answers:.2f}",
        ]
        for r in results
    ]
    header = ["format", "per token", "tokens per GiB", "perplexity", "change", "needles", "log p of answers"]
    return table(rows, header)
