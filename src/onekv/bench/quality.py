"""The effect of KV formats on a model's answers: perplexity and divergence from plain KV on three kinds of text, and
numbers retrieved from a long context.

All run through the engine's own memory, so what is read is what was stored.

    texts        prose, code and JSON (`texts`), in windows from the beginning, each a sequence of its own. Every token
                 but the first of a window is predicted from the stored keys and values of those before it; prompts are
                 read in chunks. Perplexity measures how well a text is predicted; KL and agreement (`divergence`) how
                 far predictions are from those with plain KV, so that errors in both directions do not cancel out
    needles      a text in which eight sentences such as "the phone number of Paris is Paris 4817" are hidden at equal
                 distances and asked for one after another: `found` counts the numbers that greedy decoding retrieves,
                 `answers` is the mean log probability of the right numbers, which is more informative than a count
"""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..config import Settings
from ..engine import Engine, Request
from ..errors import SettingError
from ..memory.formats import compared, parse
from ..memory.layout.calibration import calibration_tokens
from ..memory.plan import make_plan
from ..models import load_model
from ..tables import table
from ..units import format_size
from .decode import about
from .divergence import CHUNK, read_together
from .texts import TEXTS

PLAIN = "auto"
PLACES = ("Paris", "London", "Madrid", "Berlin", "Vienna", "Lisbon", "Moscow", "Dublin")
NUMBERS = ("4817", "9263", "1574", "6038", "7351", "2946", "8402", "3695")
# A small model finds the number with the place right before it; with "the number of Paris is 4817" it finds few.
FACT = "\n\nRemember this: the phone number of {0} is {0} {1}.\n\n"
QUESTION = "\n\nRemember this: the phone number of {0} is {0}"


@dataclass(frozen=True)
class Text:
    """What a format did to one text. `change` is the perplexity's against plain, `agreement` of the likeliest token
    with plain's, both in per cent; KL in nats per token, `tail_kl` exceeded by one token in a thousand.
    """

    text: str
    tokens: int
    perplexity: float
    change: float
    mean_kl: float
    tail_kl: float
    agreement: float


@dataclass(frozen=True)
class Result:
    """One format; `answers` is the mean log probability of an answer, if any were requested."""

    format: str
    token_bytes: int
    tokens_per_gib: int
    texts: list[Text]
    found: int
    asked: int
    answers: float | None


def asked(formats: Sequence[str]) -> list[str]:
    """The formats to measure, plain first; refuses what is none."""
    for name in formats:
        parse(name)
    return [PLAIN, *(name for name in formats if name != PLAIN)]


def run(arguments: argparse.Namespace) -> None:
    names = asked(arguments.format or (*compared(), "ktq4vtq2"))
    loaded = load_model(arguments.model, dtype=arguments.dtype)
    if arguments.needle < 0:
        raise SettingError(f"--needle is {arguments.needle}; it must be at least 0")
    wanted = dict.fromkeys(arguments.text or TEXTS)
    texts = {kind: _tokens(loaded.tokenizer, kind, arguments.tokens) for kind in wanted}
    length = max(arguments.window, arguments.needle + 512)
    calibration = calibration_tokens(loaded.tokenizer)
    engines = [make_engine(loaded.model, name, length, arguments.kv_plain_layers, calibration) for name in names]
    found: list[list[Text]] = [[] for _ in names]
    for kind, tokens in texts.items():
        print(f"reading {kind} ...", file=sys.stderr, flush=True)
        for own, text in zip(found, compare(engines, kind, tokens, arguments.window), strict=True):
            own.append(text)
        print(_format_texts(names, found), file=sys.stderr, flush=True)
    # Needles are hidden in prose.
    hay = texts.get("prose") or _tokens(loaded.tokenizer, "prose", 0)
    results: list[Result] = []
    for name, engine, own in zip(names, engines, found, strict=True):
        print(f"looking for needles with {name} ...", file=sys.stderr, flush=True)
        results.append(measure(engine, loaded.tokenizer, name, own, hay, arguments.needle))
    print(_format(results), _format_texts(names, found), sep="\n\n")
    if arguments.json:
        how = {"tokens": arguments.tokens, "window": arguments.window, "needle": arguments.needle}
        how["plain_layers"] = arguments.kv_plain_layers
        about_code = {"python": platform.python_version()}
        whole = {**about(arguments.model), **about_code, **how, "results": [asdict(r) for r in results]}
        Path(arguments.json).write_text(json.dumps(whole, indent=2) + "\n")


def _tokens(tokenizer: Any, kind: str, count: int) -> list[int]:
    """The first `count` tokens of a text; with 0, all."""
    tokens = list(tokenizer.encode(TEXTS[kind]()))
    if count > len(tokens):
        raise SettingError(f"--tokens is {count}, but {kind} has {len(tokens)} tokens for this model")
    return tokens[: count or None]


def compare(engines: list[Engine], kind: str, tokens: list[int], window: int) -> list[Text]:
    """One text, read by all engines; the first of them is plain."""
    tallies = read_together(engines[0], engines[1:], tokens, window)
    plain = tallies[0].perplexity
    return [
        Text(
            kind,
            len(tally.losses),
            tally.perplexity,
            100 * (tally.perplexity / plain - 1),
            tally.mean,
            tally.tail,
            tally.agreement,
        )
        for tally in tallies
    ]


def measure(engine: Engine, tokenizer: Any, name: str, texts: list[Text], tokens: list[int], context: int) -> Result:
    """What a format did to `texts`, and needles hidden in `tokens`."""
    found, answers = needles(engine, tokenizer, tokens, context) if context else ([], [])
    engine.check_integrity()
    token_bytes = sum(group.token_bytes for group in engine.plan.layout.groups)
    mean = sum(answers) / len(answers) if answers else None
    return Result(name, token_bytes, 2**30 // token_bytes, texts, sum(found), len(found), mean)


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
    """The first tokens of the text with the sentences at equal distances in it, `context` tokens in total."""
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
            f"{r.found} of {r.asked}",
            f"{r.answers:.2f}" if r.answers is not None else "",
        ]
        for r in results
    ]
    return table(rows, ["format", "per token", "tokens per GiB", "needles", "log p of answers"])


def _format_texts(names: list[str], found: list[list[Text]]) -> str:
    rows = [
        [
            name,
            text.text,
            f"{text.perplexity:.3f}",
            f"{text.change:+.2f} %",
            f"{text.mean_kl:.5f}",
            f"{text.tail_kl:.4f}",
            f"{text.agreement:.2f} %",
        ]
        for index in range(len(found[0]))
        for name, text in zip(names, (own[index] for own in found), strict=True)
    ]
    return table(rows, ["format", "text", "perplexity", "change", "mean KL", "99.9 % KL", "same top token"])
