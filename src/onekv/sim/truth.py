"""The hashes that represent KV, and the answers of a model without a cache.

A prefix of tokens has a hash of 64 bits, made from the hash of the prefix before it and its last token. What an array
of the pool stores for a token is that hash and the array's number, repeated to the length of its rows. The next token
is chosen by a hash over all rows that the last token may read, in every array, and over the recurrent states.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import xxhash

from ..memory.layout import Layout, Rule

MASK = 2**64 - 1
VOCABULARY = 24
# Ends an answer.
STOP = 0
# Odd numbers, one per token: a hash times these gives the logits.
_FACTORS = np.random.default_rng(24).integers(0, 2**63, VOCABULARY, np.uint64) * np.uint64(2) + np.uint64(1)

Rows = np.ndarray[Any, np.dtype[np.uint8]]
Hashes = np.ndarray[tuple[int], np.dtype[np.uint64]]
Scores = np.ndarray[Any, np.dtype[np.float32]]
Allowed = Callable[[Sequence[int]], np.ndarray[tuple[int], np.dtype[np.bool_]]]


def first(model: int) -> int:
    """The hash of no tokens at all: models differ in it."""
    return xxhash.xxh3_64_intdigest(b"model %d" % model)


def follow(prefix: int, token: int) -> int:
    """The hash of a prefix with one token more."""
    mixed = ((prefix ^ (token * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019)) * 0xBF58476D1CE4E5B9) & MASK
    return mixed ^ (mixed >> 31)


def chain(prefix: int, tokens: Iterable[int]) -> list[int]:
    """The hashes after each of `tokens`."""
    hashes = []
    for token in tokens:
        prefix = follow(prefix, token)
        hashes.append(prefix)
    return hashes


def tag(group: int, array: int) -> int:
    """What makes the rows of one array differ from those of all others; STATES are group -1."""
    return xxhash.xxh3_64_intdigest(b"%d %d" % (group, array))


def as_rows(hashes: Hashes, mark: int, width: int) -> Rows:
    """What an array with rows of `width` bytes stores for tokens with these prefix hashes."""
    marked = (hashes ^ np.uint64(mark)).view(np.uint8).reshape(-1, 8)
    rows: Rows = marked[:, :width] if width <= 8 else marked[:, _places(width)]
    return rows


@cache
def _places(width: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which byte of a hash each byte of a row repeats."""
    return np.arange(width) % 8


@lru_cache(4096)
def readable(rule: Rule, position: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The positions before `position` that a query there reads, in order."""
    oldest = rule.first(position)
    return np.concatenate((np.arange(min(rule.keep, oldest)), np.arange(oldest, position)))


def logits(digest: int) -> Scores:
    """One number per token of the vocabulary, all of them different."""
    scores: Scores = ((np.uint64(digest) * _FACTORS) >> np.uint64(41)).astype(np.float32)
    return scores


class Truth:
    """What a layout's rows are for a sequence of tokens, as a model without a cache would have them."""

    def __init__(self, layout: Layout, model: int) -> None:
        self.start = first(model)
        self.rules = [group.rule for group in layout.groups]
        # Per group, the (tag, row width in bytes, heads) of each array that stores something.
        self.arrays: list[list[tuple[int, int, int]]] = []
        for number, group in enumerate(layout.groups):
            widths = [
                (part.width * part.dtype.size, layer.heads)
                for layer in group.layers
                for part in (*layer.keys.planes, *layer.values.planes)
            ]
            stored = [(width, heads) for width, heads in widths if width and heads]
            self.arrays.append([(tag(number, i), width, heads) for i, (width, heads) in enumerate(stored)])
        self.states = sum(len(state.parts) for state in layout.states)
        self.marks = [tag(-1, number) for number in range(self.states)]

    def digest(self, hashes: Hashes, position: int) -> int:
        """Of all that a query at `position` reads: earlier rows, its own, and the states before it."""
        digest = xxhash.xxh3_64()
        for rule, arrays in zip(self.rules, self.arrays, strict=True):
            read = hashes[np.append(readable(rule, position), position)]
            for mark, width, _ in arrays:
                digest.update(as_rows(read, mark, width).tobytes())
        before = int(hashes[position - 1]) if position else self.start
        for state in range(self.states):
            digest.update(self.state(before, state))
        return digest.intdigest()

    def state(self, prefix: int, number: int) -> bytes:
        """The recurrent state number `number` after a prefix."""
        return (prefix ^ self.marks[number]).to_bytes(8, "little")

    def answer(self, prompt: Sequence[int], max_tokens: int, allowed: Allowed | None = None) -> list[int]:
        """The tokens that follow `prompt`, the stop token with them."""
        hashes, answer = chain(self.start, prompt), list[int]()
        while len(answer) < max_tokens:
            scores = logits(self.digest(np.array(hashes, np.uint64), len(hashes) - 1))
            if allowed is not None:
                scores[~allowed(answer)] = -np.inf
            answer.append(int(scores.argmax()))
            if answer[-1] == STOP:
                break
            hashes.append(follow(hashes[-1], answer[-1]))
        return answer
