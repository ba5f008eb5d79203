"""How far a model with encoded KV diverges from the same model with plain KV, token by token.

All formats read the same tokens in turn, a chunk at a time, so that only the logits of one chunk of plain KV are kept:
those of a whole text would take gigabytes. Per position, over the whole vocabulary:

    KL          divergence of the distribution with the format from that with plain KV, in nats: 0 where they agree
    agreement   whether the likeliest token is the same
    loss        minus the log probability of the token that follows
"""

import math
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..engine import Engine
from ..engine.divergence import divergences, log_probabilities

# Tokens read at a time, and rows of logits compared at a time: some vocabularies are large.
CHUNK, ROWS = 256, 64
# Of the positions of a text: one in a thousand is further away.
TAIL = 99.9


@dataclass
class Tally:
    """What was seen of one format; of plain KV, only losses."""

    losses: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    agreed: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(sum(self.losses) / len(self.losses))

    @property
    def mean(self) -> float:
        return sum(self.divergences) / len(self.divergences) if self.divergences else 0.0

    @property
    def tail(self) -> float:
        return float(np.percentile(self.divergences, TAIL)) if self.divergences else 0.0

    @property
    def agreement(self) -> float:
        """In per cent of all positions."""
        return 100 * self.agreed / len(self.divergences) if self.divergences else 100.0


def read_together(plain: Engine, others: list[Engine], tokens: list[int], window: int) -> list[Tally]:
    """One tally for `plain`, then one each for `others`, over all whole windows; a part of one at the end counts if it
    is all there is.
    """
    tallies = [Tally() for _ in range(1 + len(others))]
    for start in range(0, max(1, len(tokens) - window + 1), window):
        _read_window([plain, *others], tallies, tokens[start : start + window])
    return tallies


def _read_window(engines: list[Engine], tallies: list[Tally], tokens: list[int]) -> None:
    sequences = [engine.memory.open(len(tokens)) for engine in engines]
    try:
        for start in range(0, len(tokens), CHUNK):
            chunk, following = tokens[start : start + CHUNK], mx.array(tokens[start + 1 : start + CHUNK + 1])
            reference = None
            for engine, sequence, tally in zip(engines, sequences, tallies, strict=True):
                with engine.memory.step([sequence], len(chunk)) as caches:
                    logits = engine.runner.model(mx.array(chunk)[None], cache=caches)[0, : following.size]
                mx.eval(logits, engine.memory.arrays())
                _count(tally, logits, reference, following)
                reference = logits if reference is None else reference
    finally:
        for engine, sequence in zip(engines, sequences, strict=True):
            engine.memory.close(sequence)


def _count(tally: Tally, logits: mx.array, reference: mx.array | None, following: mx.array) -> None:
    for at in range(0, following.size, ROWS):
        rows = slice(at, at + ROWS)
        logs = log_probabilities(logits[rows])
        losses = -mx.take_along_axis(logs, following[rows, None], axis=-1)[:, 0]
        tally.losses += losses.tolist()  # type: ignore[arg-type]
        if reference is not None:
            wanted = log_probabilities(reference[rows])
            tally.divergences += divergences(wanted, logs).tolist()  # type: ignore[arg-type]
            same = mx.argmax(wanted, axis=-1) == mx.argmax(logs, axis=-1)
            tally.agreed += sum(same.tolist())  # type: ignore[arg-type]
