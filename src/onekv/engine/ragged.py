"""Whether a model can decode several sequences of different lengths in one call.

Nearly all of mlx-lm's models take one position per row. Some need a plain number, some derive positions from the shape
of what they read and would be silently wrong. So it is tried when the model is loaded, on the model itself: two short
sequences, decoded together and each alone. A model that fails is decoded row by row.
"""

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from ..memory.kv import KVMemory
from ..memory.pool import OutOfBlocks
from ..memory.sequence import Sequence

LENGTHS = (3, 21)


def why_not_ragged(model: Module, memory: KVMemory) -> str | None:
    """None if rows of different lengths can be decoded in one call, else the reason."""
    try:
        alone = mx.concatenate([_decode(model, memory, [row]) for row in range(len(LENGTHS))])
        together = _decode(model, memory, range(len(LENGTHS)))
    except OutOfBlocks:
        return "the pool holds one short sequence only"
    except (TypeError, ValueError) as error:
        return f"the model does not take one position per row ({str(error).splitlines()[0][:80]})"
    alone, together = alone.astype(mx.float32), together.astype(mx.float32)
    tolerance = 0.02 if memory.exact else 0.3
    if bool(mx.abs(alone - together).max() <= tolerance * alone.std()):
        return None
    return "the model's output for a row depends on the rows beside it"


def _decode(model: Module, memory: KVMemory, rows: "list[int] | range") -> mx.array:
    """Logits of one decode step of sequences that have LENGTHS[row] tokens stored."""
    sequences: list[Sequence] = []
    try:
        for row in rows:
            sequences.append(memory.open(LENGTHS[row] + 1))
            with memory.step(sequences[-1:], LENGTHS[row]) as caches:
                model(_tokens(memory, row)[None, :-1], cache=caches)
            mx.eval(memory.arrays())
        with memory.step(sequences, 1) as caches:
            logits: mx.array = model(mx.stack([_tokens(memory, row)[-1:] for row in rows]), cache=caches)
        mx.eval(logits, memory.arrays())
        return logits[:, -1]
    finally:
        for sequence in sequences:
            memory.close(sequence)


def _tokens(memory: KVMemory, row: int) -> mx.array:
    generator = np.random.default_rng(row)
    return mx.array(generator.integers(0, memory.layout.vocabulary, LENGTHS[row] + 1))
