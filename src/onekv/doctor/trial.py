"""Runs a model on OneKV's memory with a single attention backend, or with compiled decode steps.

Two rows of different lengths are decoded, in one batch if the model supports it. Where possible the second row shares
its first blocks with the first, so that shared reads are covered. Prefill does not depend on the backend, so backends
are compared over the same stored bytes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from ..engine.selftest import compiled_untested, forward, set_direct, store, why_one_by_one
from ..memory import attention
from ..memory.attention import Backend, Call
from ..memory.attention.decoded import Stock
from ..memory.attention.layer import Pair
from ..memory.kv import KVMemory
from ..memory.layout import Layout
from ..memory.pool.sequence import Sequence
from ..memory.traced import Untraceable
from .reference import attention_error

BLOCK, CHUNK, STEPS = 64, 128, 4
# Prompt lengths, and the length of the shared prefix: `Shared` needs at least 256 tokens.
LENGTHS, SHARED = (300, 330), 256
# Blocks per group: enough for two rows and for the self-tests.
BLOCKS = 20


@dataclass(frozen=True)
class Trial:
    """Logits [rows, steps, vocabulary] of the decode steps, and the error of each attention call of the backend."""

    logits: mx.array
    errors: list[float]


def texts(vocabulary: int) -> list[list[int]]:
    """Tokens of both rows: prompts and decoded tokens."""
    rng = np.random.default_rng(3)
    first, second = (rng.integers(1, vocabulary, length + STEPS).tolist() for length in LENGTHS)
    return [first, first[:SHARED] + second[SHARED:]]


def try_backend(model: Module, layout: Layout, backend: type[Backend], kernels: bool) -> Trial:
    """With `backend` where it applies, otherwise mlx-lm's attention; `kernels` is about prefill."""
    errors: list[float] = []
    with _only(_watched(backend, errors)):
        memory = KVMemory(layout, (BLOCKS,) * len(layout.groups), BLOCK, CHUNK, kernels)
    logits = _run(model, memory, compiled=False)
    return Trial(logits, errors)


def try_compiled(model: Module, layout: Layout) -> Trial | None:
    """With compiled decode steps; None if the model cannot be compiled."""
    memory = KVMemory(layout, (BLOCKS,) * len(layout.groups), BLOCK, CHUNK)
    try:
        return Trial(_run(model, memory, compiled=True), [])
    except Untraceable:
        return None


def _watched(backend: type[Backend], errors: list[float]) -> type[Backend]:
    """`backend` with every output compared to the reference."""

    class Watched(backend):  # type: ignore[valid-type, misc]
        def decode(self, call: Call, new: Pair | None) -> mx.array | None:
            out: mx.array | None = super().decode(call, new)
            if out is not None:
                # Kernels store the new token when their output is evaluated.
                mx.eval(out, self.kv.arrays.all)
                errors.append(attention_error(self.kv, call, out))
            return out

    return Watched


@contextmanager
def _only(backend: type[Backend]) -> Iterator[None]:
    before = attention.backends
    attention.backends = [backend, Stock]
    try:
        yield
    finally:
        attention.backends = before


def _run(model: Module, memory: KVMemory, compiled: bool) -> mx.array:
    rows = texts(memory.layout.vocabulary)
    set_direct(model, memory)
    alone = why_one_by_one(model, memory) is not None
    by = None
    if compiled:
        by = None if alone or memory.state_layers else compiled_untested(model, memory)
        if by is None:
            raise Untraceable("decode steps of this model are not compiled")
    sequences: list[Sequence] = []
    try:
        for text, length in zip(rows, LENGTHS, strict=True):
            sequences.append(_open(memory, sequences, len(text)))
            for start in range(sequences[-1].length, length, CHUNK):
                store(model, memory, sequences[-1:], [text[start : min(start + CHUNK, length)]])
            sequences[-1].prefilled()
        found = []
        for step in range(STEPS):
            batches = [[row] for row in range(len(rows))] if alone else [list(range(len(rows)))]
            logits = []
            for batch in batches:
                new = mx.array([rows[row][LENGTHS[row] + step] for row in batch])
                given = ([sequences[row] for row in batch], new, [1] * len(batch))
                logits.append(by(*given) if by is not None else forward(model, memory, *given))
                mx.eval(logits[-1], memory.arrays())
            found.append(mx.concatenate(logits).astype(mx.float32))
        return mx.stack(found, axis=1)
    finally:
        for sequence in sequences:
            memory.close(sequence)


def _open(memory: KVMemory, others: list[Sequence], length: int) -> Sequence:
    """A new sequence, sharing the first blocks of another one if the model has full attention only."""
    spans = any(pool.group.rule.span is not None for pool in memory.pools)
    if not others or memory.state_layers or spans:
        return memory.open(length)
    sequence = memory.open(length, [table.blocks[: SHARED // BLOCK] for table in others[0].tables])
    sequence.length = SHARED
    return sequence
