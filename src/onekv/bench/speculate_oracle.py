"""Decode speed with proposals of which a known share is right, compared with plain decoding, through the engine.

An answer is recorded without speculation. Then it is proposed, K tokens at a time, each of them right with probability
SHARE and otherwise another token; all of them are verified, whether that pays or not. For every number of sequences
there is an engine without speculation and one with it, and each case runs once per round. A ratio compares speeds of
the same round; figures are medians over the rounds, before which every case runs once to warm up.

With random weights, many tokens are nearly as likely as the best one, and where two are too close to tell apart, the
token is recomputed alone (doubtful): the benchmark would measure little else. Larger output weights would not help,
because the error of the logits grows with them. To make the model as certain as a trained one, each token largely
determines the next (`decided`): embeddings are as large as what the layers add, and each row of the output layer
contains part of the embedding of the token before it in the vocabulary, so that the best logit is some standard
deviations ahead of the next. Nothing else is changed, and every step computes and reads as much as before.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from ..config import Settings
from ..engine import Engine, Request
from ..engine.speculation.control import Speculation
from ..engine.speculation.log import Match
from ..errors import SettingError
from ..memory.plan import make_plan
from ..tables import table
from .decode import about, bench_model

SHARES, PROPOSED, BATCHES = (0.3, 0.5, 0.7, 0.9), (2, 4, 8), (1, 8)
# Standard deviations of the output's weights by which the next token is ahead.
AHEAD = 16.0


@dataclass(frozen=True)
class Result:
    """Medians over the rounds; the counts are of all rounds."""

    batch: int
    share: float
    proposed_at_once: int
    tokens_per_s: float
    tokens_per_s_off: float
    ratio: float
    proposed: int
    accepted: int
    steps: int
    doubtful: int
    # The share of answers that are those without speculation. Sequences that end later are decoded with fewer beside
    # them, and on a GPU the last bits of a row depend on the number of rows.
    same_answers: float


class Oracle:
    """Proposes `count` tokens of the recorded answers, each right with the probability `share`."""

    def __init__(self, vocabulary: int) -> None:
        self.share, self.count = 1.0, 1
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self._random, self._vocabulary = np.random.default_rng(0), vocabulary

    def propose(self, request: Request, limit: int) -> Match | None:
        after = self.answers[tuple(request.prompt)][len(request.tokens) :][: min(limit, self.count)]
        wrong = self._random.random(len(after)) >= self.share
        guess = [(token + int(spoilt)) % self._vocabulary for token, spoilt in zip(after, wrong, strict=True)]
        return Match(len(guess), guess) if guess else None

    def learn(self, request: Request) -> None:
        """It knows all there is."""

    def forget(self, request: Request) -> None:
        """It keeps what it knows."""

    def clear(self) -> None:
        """Nor does it forget that."""


def everything(likely: Iterable[Sequence[float]], rows: int, costs: Any) -> list[int]:
    return [len(chances) for chances in likely]


def run(arguments: argparse.Namespace) -> None:
    shares, counts, batches = (
        arguments.oracle or SHARES,
        arguments.proposed or PROPOSED,
        arguments.batch or BATCHES,
    )
    if not all(0 <= share <= 1 for share in shares):
        raise SettingError(f"--oracle is {shares}; each share must be from 0 to 1")
    model = decided(bench_model(arguments.model, arguments.dtype))
    results = []
    for batch in batches:
        print(f"measuring {batch} x {arguments.context} tokens ...", file=sys.stderr, flush=True)
        cases = [(share, count) for share in shares for count in counts]
        some = measure(model, batch, arguments.context, cases, arguments.tokens, arguments.rounds)
        print(_format(some), file=sys.stderr, flush=True)
        results += some
    print(_format(results))
    if arguments.json:
        how = {name: getattr(arguments, name) for name in ("tokens", "rounds", "context")}
        whole = {**about(arguments.model), **how, "results": [asdict(result) for result in results]}
        Path(arguments.json).write_text(json.dumps(whole, indent=2) + "\n")


def decided(model: Module) -> Module:
    """The model, as sure of its next token as a trained one."""
    head, embedding = getattr(model, "lm_head", None), model.model.embed_tokens
    if head is None or not all(mx.issubdtype(part.weight.dtype, mx.floating) for part in (head, embedding)):
        raise SettingError("--oracle needs a model with its own output layer and weights that are not quantized: 8b")
    weight = embedding.weight.astype(mx.float32)
    # Each row of length 1, then as long as the hidden state is after a norm.
    rows = weight / mx.sqrt(mx.square(weight).sum(axis=-1, keepdims=True))
    before = mx.concatenate([rows[-1:], rows[:-1]])
    spread = head.weight.astype(mx.float32).std()
    head.weight = (head.weight + AHEAD * spread * before).astype(head.weight.dtype)
    embedding.weight = (rows * weight.shape[-1] ** 0.5).astype(embedding.weight.dtype)
    mx.eval(model.parameters())
    return model


def measure(
    model: Module, batch: int, context: int, cases: list[tuple[float, int]], tokens: int, rounds: int
) -> list[Result]:
    """Every case of (share, tokens proposed), compared with plain decoding of `batch` prompts."""
    plain = _engine(model, batch, context + tokens, "off", 1)
    engine = _engine(model, batch, context + tokens, "auto", max(count for _, count in cases))
    if engine.speculation is None:
        raise SettingError(f"this model does not support speculation: {engine.runner.several.why_not}")
    vocabulary = plain.plan.layout.vocabulary
    oracle = Oracle(vocabulary)
    prompts = np.random.default_rng(context).integers(0, vocabulary, (batch, context)).tolist()
    seconds: list[list[float]] = [[] for _ in cases]
    off: list[float] = []
    counts = [np.zeros(4, int) for _ in cases]
    same = [0] * len(cases)
    for repeat in range(rounds + 1):
        answers, took = _decode(plain, prompts, tokens)
        oracle.answers = {tuple(request.prompt): request.tokens for request in answers}
        if repeat:
            off.append(took)
        for number, (oracle.share, oracle.count) in enumerate(cases):
            engine.speculation = Speculation(oracle, engine.speculation.most, allot=everything)
            found, took = _decode(engine, prompts, tokens)
            same[number] += sum(own.tokens == other.tokens for own, other in zip(found, answers, strict=True))
            if repeat:
                seconds[number].append(took)
                stats = engine.speculation.stats()
                counts[number] += [stats.proposed, stats.accepted, stats.steps, stats.doubtful]
    median = statistics.median
    results = []
    for number, (share, count) in enumerate(cases):
        own, (proposed, accepted, steps, doubtful) = seconds[number], counts[number].tolist()
        ratio = median(b / a for a, b in zip(own, off, strict=True))
        speeds = (1 / median(own), 1 / median(off), ratio)
        results.append(
            Result(
                batch, share, count, *speeds, proposed, accepted, steps, doubtful, same[number] / batch / (rounds + 1)
            )
        )
    return results


def _engine(model: Module, batch: int, length: int, how: str, most: int) -> Engine:
    common: dict[str, Any] = {"max_batch": batch, "speculate": how, "draft_tokens": most}
    probe = make_plan(model, Settings(kv_memory="1GiB", **common), None)
    token_bytes = sum(group.token_bytes for group in probe.layout.groups)
    # Twice what is in work: prompts stay cached from round to round.
    memory = 2 * batch * -(-length // 256) * 256 * token_bytes + probe.state_bytes
    settings = Settings(kv_memory=memory, **common)
    return Engine(model, make_plan(model, settings, None), set(), settings)


def _decode(engine: Engine, prompts: list[list[int]], tokens: int) -> tuple[list[Request], float]:
    """The requests, and seconds for each of their tokens while all of them run."""
    requests = [Request(prompt, tokens) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    # All prompts are stored before the clock starts.
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    begin, had = time.perf_counter(), sum(len(request.tokens) for request in requests)
    while not any(request.finished for request in requests):
        engine.step()
    took = (time.perf_counter() - begin) / max(1, sum(len(request.tokens) for request in requests) - had)
    while not engine.idle:
        engine.step()
    return requests, took


def _format(results: list[Result]) -> str:
    rows = [
        [
            str(r.batch),
            f"{r.share:.1f}",
            str(r.proposed_at_once),
            f"{r.tokens_per_s:.1f}",
            f"{r.tokens_per_s_off:.1f}",
            f"{r.ratio:.2f}x",
            f"{r.accepted} of {r.proposed}",
            f"{r.doubtful} in {r.steps} steps",
            f"{r.same_answers:.0%} the same",
        ]
        for r in results
    ]
    return table(rows, ["batch", "right", "proposed", "tok/s", "off", "ratio", "accepted", "doubtful rows", "answers"])
