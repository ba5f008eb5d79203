"""What a model can do, tried on the model itself when it is loaded.

Nearly all of mlx-lm's models take one position per row and pass what a cache returns straight to attention. Some need a
plain number, some derive positions from the shape of what they read and would be silently wrong in a batch, some use
what a cache returns elsewhere. Two short sequences, decoded in each way, tell. They are stored as any other sequence:
in chunks of the plan, and shorter where the pool is that small.
"""

from collections.abc import Iterable

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from ..memory.compiled import CompiledDecode
from ..memory.kv import KVMemory
from ..memory.pool import OutOfBlocks
from ..memory.pool.sequence import Sequence
from ..memory.traced import Untraceable

# Tokens stored before the step that is compared.
LENGTHS = (3, 21)
# Chooses what to read by the slot a token lies in, and only in contexts too long to try here.
BY_SLOT = {"mlx_lm.models.minimax_m3_vl"}


def set_direct(model: Module, memory: KVMemory) -> None:
    """Let layers return stand-ins from decode steps if the model uses what they return for attention alone."""
    expected = _decode(model, memory, [1])
    layers = memory.attended
    for direct in (True, False):
        for layer in layers:
            layer.direct = direct
        # A stand-in that was used makes this NaN, which equals nothing.
        if _close(_decode(model, memory, [1]), expected, memory):
            return


def why_one_by_one(model: Module, memory: KVMemory) -> str | None:
    """None if rows of different lengths can be decoded in one call, else the reason."""
    if type(model).__module__ in BY_SLOT:
        return "the model takes the place of a token in memory for its position"
    alone = mx.concatenate([_decode(model, memory, [row]) for row in range(len(LENGTHS))])
    try:
        together = _decode(model, memory, range(len(LENGTHS)))
    except OutOfBlocks:
        return "the KV pool has no room for two sequences to try it with"
    except (TypeError, ValueError) as error:
        return f"the model does not take one position per row ({str(error).splitlines()[0][:80]})"
    if _close(together, alone, memory):
        return None
    return "the model's output for a row depends on the rows beside it"


def compile_decode(model: Module, memory: KVMemory, one_by_one: str | None) -> tuple[CompiledDecode | None, str | None]:
    """The model's decode steps compiled, or None and the reason."""
    if one_by_one is not None:
        return None, one_by_one
    if memory.state_layers:
        return None, "the model has recurrent states"
    expected = _decode(model, memory, [1]) if memory.has_kernels else None
    if expected is None or not memory.by_kernels:
        return None, "attention here is not by a kernel that stores new tokens itself"
    compiled = CompiledDecode(model, memory)
    try:
        logits = _decode(model, memory, [1], compiled)
    except (Untraceable, TypeError, ValueError, RuntimeError) as error:
        return None, f"the model cannot be compiled ({str(error).splitlines()[0][:80]})"
    if _close(logits, expected, memory):
        return compiled, None
    return None, "the model's output is another when it is compiled"


def forward(model: Module, memory: KVMemory, sequences: list[Sequence], inputs: mx.array) -> mx.array:
    """Logits [rows, vocabulary] after one more token of each sequence; lazy."""
    with memory.step(sequences, 1) as caches:
        logits: mx.array = model(inputs[:, None], cache=caches)
    return logits[:, -1]


def _close(logits: mx.array, expected: mx.array, memory: KVMemory) -> bool:
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    tolerance = 0.02 if memory.exact else 0.3
    return bool(mx.abs(logits - expected).max() <= tolerance * expected.std())


def _decode(model: Module, memory: KVMemory, rows: Iterable[int], by: CompiledDecode | None = None) -> mx.array:
    """Logits of one decode step of sequences that have LENGTHS[row] tokens stored, or what the pool can hold."""
    longest = min((p.blocks * p.block_size for p in memory.pools if p.group.rule.span is None), default=2**62)
    sequences: list[Sequence] = []
    inputs = []
    try:
        for row in rows:
            length = min(LENGTHS[row], longest - 1)
            tokens = np.random.default_rng(row).integers(0, memory.layout.vocabulary, length + 1)
            inputs.append(tokens[-1])
            sequences.append(memory.open(len(tokens)))
            for start in range(0, length, memory.chunk):
                count = min(memory.chunk, length - start)
                with memory.step(sequences[-1:], count) as caches:
                    model(mx.array(tokens[None, start : start + count]), cache=caches)
                mx.eval(memory.arrays())
            sequences[-1].prefilled()
        last = mx.array(np.stack(inputs))
        logits = by(sequences, last) if by is not None else forward(model, memory, sequences, last)
        mx.eval(logits, memory.arrays())
        return logits
    finally:
        for sequence in sequences:
            memory.close(sequence)
