"""What a model supports, tested on the model itself when it is loaded.

Nearly all of mlx-lm's models accept one position per row and pass what a cache returns straight to attention. Some need
a plain number, some derive positions from the shape of what they read and would be silently wrong in a batch, some use
what a cache returns elsewhere. Decoding two short sequences in each way reveals this. They are stored like any other
sequence, in chunks of the planned size, and are shorter if the pool is small.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from .. import loops
from ..memory.compiled import CompiledDecode
from ..memory.device import settle
from ..memory.kv import KVMemory
from ..memory.looped import LoopedDecode
from ..memory.pairs import reading_together
from ..memory.pool import OutOfBlocks
from ..memory.pool.sequence import Sequence
from ..memory.traced import Untraceable

# Tokens stored before the step that is compared.
LENGTHS = (3, 21)
# Tokens of one sequence that are tried in one step, and how many come before. On a GPU few and many are multiplied in
# different ways, and a long context is read in other pieces, which are joined in another order.
SEVERAL, SEVERAL_ON_GPU = ((4, LENGTHS[1]),), ((4, LENGTHS[1]), (20, 600))
# The same where they may be exactly those of fewer, of how many each says: of one, and then of those that were.
ALIKE = ((4, LENGTHS[1], 1), (16, 600, 1), (64, 600, 16))
TOO_SMALL = "--prefill-chunk or the KV pool is too small for several tokens in a step"
# Logits of several tokens in a step may be further from those of one at a time than they were when it was tried:
# contexts are longer. By so much; at least so much of their standard deviation, in float32 and else; and at least what
# lies between the largest and the next number, which is much where they have 16 bits.
SAFETY, LEAST_EXACT, LEAST = 4.0, 1e-4, 1e-2
# Chooses what to read by the slot a token lies in, and only in contexts too long to try here.
BY_SLOT = {"mlx_lm.models.minimax_m3_vl"}
BY_SLOT_REASON = "the model uses a token's place in memory as its position"


def set_direct(model: Module, memory: KVMemory) -> None:
    """Let layers return stand-ins from decode steps if the model uses what they return for attention alone."""
    expected = _decode(model, memory, [1])
    layers = memory.attended
    for direct in (True, False):
        for layer in layers:
            layer.direct = direct
        # If a stand-in was used, this is NaN, which equals nothing.
        if _close(_decode(model, memory, [1]), expected, memory):
            return


def why_one_by_one(model: Module, memory: KVMemory) -> str | None:
    """None if rows of different lengths can be decoded in one call, else the reason."""
    if type(model).__module__ in BY_SLOT:
        return BY_SLOT_REASON
    alone = mx.concatenate([_decode(model, memory, [row]) for row in range(len(LENGTHS))])
    try:
        together = _decode(model, memory, range(len(LENGTHS)))
    except OutOfBlocks:
        return "the KV pool has no room for two sequences to test it with"
    except (TypeError, ValueError) as error:
        return _needs_a_number(error)
    if _close(together, alone, memory):
        return None
    return "the model's output for a row depends on the other rows"


def stores_together(model: Module, memory: KVMemory, one_by_one: str | None) -> bool:
    """Whether chunks of two prompts, first and later ones, can be stored in one call."""
    # What is after a row's own tokens would go into its state. Where attention is chunked, a model makes one mask for
    # all rows.
    if one_by_one is not None or memory.state_layers or any(g.rule.chunk is not None for g in memory.layout.groups):
        return False
    rows = range(len(LENGTHS))
    try:
        together = _decode(model, memory, rows, together=True)
    except (OutOfBlocks, TypeError, ValueError):
        return False
    return _close(together, _decode(model, memory, rows), memory)


def compile_decode(
    model: Module, memory: KVMemory, one_by_one: str | None
) -> tuple[CompiledDecode | LoopedDecode | None, str | None]:
    """The model's decode steps compiled, or None and the reason."""
    if one_by_one is not None:
        return None, one_by_one
    if memory.state_layers:
        return None, "the model has recurrent states"
    if not memory.kernels:
        return None, "--kernels is off"
    if memory.sharded:
        return None, "the model is sharded, and its collectives run in MLX's own graphs (tensor parallel)"
    no_loops = loops.why_not() if memory.on_cpu else "attention does not run in a kernel that stores new tokens itself"
    if no_loops is not None and not memory.has_kernels:
        return None, no_loops
    expected = _decode(model, memory, [1])
    compiled = compiled_untested(model, memory)
    if compiled is None:
        return None, no_loops
    try:
        logits = _decode(model, memory, [1], compiled)
    except (Untraceable, TypeError, ValueError, RuntimeError) as error:
        return None, f"the model cannot be compiled ({str(error).splitlines()[0][:80]})"
    if _close(logits, expected, memory):
        return compiled, None
    return None, "the compiled model's output differs"


def compiled_untested(model: Module, memory: KVMemory) -> CompiledDecode | LoopedDecode | None:
    """What compiles the model's decode steps, after one of them has run; None if they are not compiled."""
    if memory.by_kernels:
        return CompiledDecode(model, memory)
    if memory.kernels and memory.on_cpu and loops.why_not() is None:
        return LoopedDecode(model, memory)
    return None


class Several(NamedTuple):
    """Whether several tokens of one sequence can be decoded in one step: how far their logits may then be from those
    of one token at a time, or why not."""

    tolerance: float
    why_not: str | None
    # Steps of up to so many rows are exactly those of one token at a time, unless sequences read a prefix together.
    exact: int = 0


def try_several(
    model: Module, memory: KVMemory, one_by_one: str | None, compiled: CompiledDecode | LoopedDecode | None
) -> Several:
    if memory.state_layers:
        return Several(0.0, "the model has recurrent states, which cannot be rolled back")
    if one_by_one is None and type(model).__module__ in BY_SLOT:
        one_by_one = BY_SLOT_REASON
    if one_by_one is not None:
        return Several(0.0, one_by_one)
    longest = min((p.blocks * p.block_size for p in memory.pools if p.group.rule.span is None), default=2**62)
    tolerance = 0.0
    for count, before in SEVERAL if memory.on_cpu else SEVERAL_ON_GPU:
        count = min(count, memory.chunk)
        length = min(before, longest - count)
        tried = _try_count(model, memory, compiled, count, length) if count > 1 and length > 0 else TOO_SMALL
        if isinstance(tried, str):
            if tolerance and tried == TOO_SMALL:
                # A pool too small for many tokens has room for a few.
                break
            return Several(0.0, tried)
        tolerance = max(tolerance, tried)
    exact = _exact_rows(model, memory, compiled, longest) if isinstance(compiled, CompiledDecode) else 0
    return Several(tolerance, None, exact)


def _exact_rows(model: Module, memory: KVMemory, compiled: CompiledDecode, longest: int) -> int:
    """Steps of up to how many tokens give exactly the logits of one token at a time; 0: none."""
    exact = 0
    for count, before, fewer in ALIKE:
        if count > memory.chunk or before + count > longest or fewer > max(1, exact):
            break
        tokens = np.random.default_rng(0).integers(0, memory.layout.vocabulary, before + count)
        try:
            expected = _after(model, memory, tokens, before, [fewer] * (count // fewer), compiled)
            together = _after(model, memory, tokens, before, [count], compiled)
        except OutOfBlocks:
            break
        if not compiled.exact or not mx.array_equal(together, expected):
            break
        exact = count
    return exact


def _try_count(
    model: Module, memory: KVMemory, compiled: CompiledDecode | LoopedDecode | None, count: int, length: int
) -> float | str:
    """How far logits of `count` tokens in one step, after `length` others, may be from those of one at a time; or why
    that cannot be done. They are read as they would be with other sequences that share a prefix."""
    tokens = np.random.default_rng(0).integers(0, memory.layout.vocabulary, length + count)
    try:
        alone = _after(model, memory, tokens, length, [1] * count, compiled)
        with reading_together():
            together = _after(model, memory, tokens, length, [count], compiled)
    except OutOfBlocks:
        return TOO_SMALL
    except Untraceable as error:
        return str(error)
    except (TypeError, ValueError) as error:
        return _needs_a_number(error)
    if not _close(together, alone, memory):
        return "the model's output for several tokens of a sequence differs from that for one at a time"
    spacing = mx.finfo(alone.dtype).eps * float(mx.abs(alone).max())
    spread = float(alone.astype(mx.float32).std())
    apart = float(mx.abs(together.astype(mx.float32) - alone.astype(mx.float32)).max())
    return max(SAFETY * apart, (LEAST_EXACT if memory.exact else LEAST) * spread, spacing)


def _after(
    model: Module,
    memory: KVMemory,
    tokens: np.ndarray[Any, Any],
    length: int,
    counts: list[int],
    by: CompiledDecode | LoopedDecode | None,
) -> mx.array:
    """Logits after each of the tokens from `length` on, in steps of `counts` tokens."""
    sequence = memory.open(len(tokens))
    try:
        _fill(model, memory, [sequence], [tokens[:length].tolist()], [memory.chunk], max(counts))
        found = []
        for count in counts:
            new = mx.array(tokens[sequence.length : sequence.length + count])
            step = ([sequence], new, [count])
            found.append(by(*step) if by is not None else forward(model, memory, *step))
            settle(found[-1], memory.arrays())
        return mx.concatenate(found)
    finally:
        memory.close(sequence)


def forward(
    model: Module, memory: KVMemory, sequences: list[Sequence], inputs: mx.array, counts: list[int]
) -> mx.array:
    """Logits [rows, vocabulary] after each of `inputs`, of which sequence i has `counts[i]`; lazy."""
    return memory.run(model, inputs[:, None], sequences, counts, spread=True)[:, -1]


def _needs_a_number(error: Exception) -> str:
    return f"the model does not accept one position per row ({str(error).splitlines()[0][:80]})"


def store(model: Module, memory: KVMemory, sequences: list[Sequence], tokens: list[list[int]]) -> None:
    """Compute and store the KV of each row of `tokens`, appended to its sequence."""
    counts = [len(row) for row in tokens]
    width = max(counts)
    padded = [row + [0] * (width - len(row)) for row in tokens]
    # A kernel stores single tokens when its output is computed; otherwise no logits are needed.
    logits = memory.run(model, mx.array(padded), sequences, counts, logits=width == 1)
    settle(memory.arrays(), logits if width == 1 else None)


def _close(logits: mx.array, expected: mx.array, memory: KVMemory) -> bool:
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    tolerance = 0.02 if memory.exact else 0.3
    return bool(mx.abs(logits - expected).max() <= tolerance * expected.std())


def _decode(
    model: Module,
    memory: KVMemory,
    rows: Iterable[int],
    by: CompiledDecode | LoopedDecode | None = None,
    together: bool = False,
) -> mx.array:
    """Logits of one decode step of sequences that have LENGTHS[row] tokens stored, or what the pool can hold.

    These are stored row by row, or `together`, half of each in one pass.
    """
    longest = min((p.blocks * p.block_size for p in memory.pools if p.group.rule.span is None), default=2**62)
    sequences: list[Sequence] = []
    inputs, prompts = [], []
    try:
        for row in rows:
            length = min(LENGTHS[row], longest - 1)
            tokens = np.random.default_rng(row).integers(0, memory.layout.vocabulary, length + 1)
            inputs.append(tokens[-1])
            prompts.append(tokens[:-1].tolist())
            sequences.append(memory.open(len(tokens)))
            if not together:
                _fill(model, memory, sequences[-1:], prompts[-1:], [memory.chunk])
        if together:
            _fill(model, memory, sequences, prompts, [min(-(-len(row) // 2), memory.chunk) for row in prompts])
        last, counts = mx.array(np.stack(inputs)), [1] * len(sequences)
        logits = by(sequences, last, counts) if by is not None else forward(model, memory, sequences, last, counts)
        settle(logits, memory.arrays())
        return logits
    finally:
        for sequence in sequences:
            memory.close(sequence)


def _fill(
    model: Module,
    memory: KVMemory,
    sequences: list[Sequence],
    prompts: list[list[int]],
    sizes: list[int],
    step: int = 1,
) -> None:
    """Store `prompts`, `sizes` tokens of each in one pass; after that, at most `step` at a time."""
    while rows := [row for row, sequence in enumerate(sequences) if sequence.length < len(prompts[row])]:
        starts = {row: sequences[row].length for row in rows}
        tokens = [prompts[row][start : start + sizes[row]] for row, start in starts.items()]
        store(model, memory, [sequences[row] for row in rows], tokens)
    for sequence in sequences:
        sequence.prefilled(step)
