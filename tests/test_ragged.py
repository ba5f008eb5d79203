"""Steps whose rows have different numbers of new tokens, and tokens that are taken back: what speculation needs."""

import mlx.core as mx
import numpy as np
import pytest

from architectures import build
from onekv.engine.selftest import set_direct
from onekv.memory.formats import parse
from onekv.memory.kv import KVMemory
from onekv.memory.layout.reader import read_layout
from onekv.memory.layout.stored import encoded
from onekv.memory.pool import IntegrityError
from stock import stock_logits

BLOCK, CHUNK = 8, 16


def make_memory(model, kv_format: str = "auto", blocks: int = 40) -> KVMemory:
    layout = encoded(read_layout(model), parse(kv_format), 0)
    memory = KVMemory(layout, (blocks,) * len(layout.groups), BLOCK, CHUNK)
    set_direct(model, memory)
    return memory


def tokens(count: int, seed: int) -> list[int]:
    return mx.random.randint(1, 90, (count,), key=mx.random.key(seed)).tolist()


def store(model, memory, sequence, new: list[int]) -> None:
    for start in range(0, len(new), CHUNK):
        part = new[start : start + CHUNK]
        with memory.step([sequence], len(part)) as caches:
            model(mx.array([part]), cache=caches)
        mx.eval(memory.arrays())


def ragged(model, memory, sequences, new: list[list[int]]) -> list[mx.array]:
    """Logits of each row's own tokens."""
    width = max(map(len, new))
    padded = mx.array([row + [0] * (width - len(row)) for row in new])
    with memory.step(sequences, [len(row) for row in new]) as caches:
        logits = model(padded, cache=caches)
    mx.eval(logits, memory.arrays())
    return [logits[index, : len(row)] for index, row in enumerate(new)]


def buffers(memory) -> list[int]:
    return [np.array(array, copy=False).ctypes.data for pool in memory.pools for array in pool.arrays()]


def close(ours: mx.array, theirs: mx.array, tolerance: float = 1e-4) -> bool:
    return bool(mx.allclose(ours, theirs, rtol=tolerance, atol=tolerance))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_rows_with_different_numbers_of_tokens_equal_rows_alone(name):
    """Full attention, windows, sinks, latent attention; rows shorter and longer than a window."""
    model = build(name)
    memory = make_memory(model)
    past = [tokens(length, length) for length in (3, 21, 40)]
    sequences = [memory.open(len(row) + 30) for row in past]
    for sequence, row in zip(sequences, past, strict=True):
        store(model, memory, sequence, row)
    addresses = buffers(memory)
    # The second step continues what the first has stored, and nothing that was only padding.
    for counts in ([5, 1, 3], [2, 7, 1], [1, 1, 1]):
        new = [tokens(count, 100 * count + row) for row, count in enumerate(counts)]
        logits = ragged(model, memory, sequences, new)
        for row, own in enumerate(new):
            past[row] = past[row] + own
            assert sequences[row].length == len(past[row])
            expected = stock_logits(model, past[row], len(past[row]) - len(own), CHUNK)
            assert close(logits[row], expected[-len(own) :]), (counts, row)
    memory.check_integrity()
    assert buffers(memory) == addresses
    for sequence in sequences:
        memory.close(sequence)
    memory.check_integrity()


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_tokens_that_were_taken_back_leave_nothing_behind(name):
    model = build(name)
    memory = make_memory(model)
    past = tokens(37, 1)
    sequence = memory.open(80)
    store(model, memory, sequence, past)
    other = memory.open(80)
    store(model, memory, other, past[:5])
    for kept in (0, 1, 4, 9, 11):
        length = len(past)
        draft = tokens(11, 50 + kept)
        ragged(model, memory, [sequence, other], [draft, past[5:6]])
        memory.truncate(sequence, length + kept)
        memory.truncate(other, 5)
        memory.check_integrity()
        past += draft[:kept]
        assert sequence.length == len(past)
    # Of full attention, as many blocks as the tokens that are left.
    full = next(pool for pool in memory.pools if pool.group.rule.span is None)
    assert full.held == -(-len(past) // BLOCK) + 1
    fresh = tokens(6, 99)
    expected = stock_logits(model, past + fresh, len(past), CHUNK)
    ours = ragged(model, memory, [sequence, other], [fresh, past[5:7]])
    assert close(ours[0], expected[-6:])
    assert close(ours[1], stock_logits(model, past[:7], 5, CHUNK)[-2:])
    memory.close(sequence)
    memory.close(other)
    memory.check_integrity()
    assert not any(pool.reserved or pool.held for pool in memory.pools)


def test_what_a_window_has_given_back_cannot_come_back():
    model = build("gemma3_text")
    memory = make_memory(model)
    sequence = memory.open(200)
    store(model, memory, sequence, tokens(120, 1))
    with pytest.raises(IntegrityError, match="was released"):
        memory.truncate(sequence, 20)
    assert sequence.length == 120
    memory.check_integrity()
    store(model, memory, sequence, [5])
    memory.close(sequence)
    memory.check_integrity()


def test_rows_of_different_lengths_are_stored_in_a_format_too():
    model = build("llama")
    memory, alone = make_memory(model, "tq4"), make_memory(model, "tq4")
    past = [tokens(length, length) for length in (3, 21)]
    new = [tokens(4, 7), tokens(1, 8)]
    sequences = [memory.open(60) for _ in past]
    for sequence, row in zip(sequences, past, strict=True):
        store(model, memory, sequence, row)
    logits = ragged(model, memory, sequences, new)
    for row in range(2):
        single = alone.open(60)
        store(model, alone, single, past[row])
        expected = ragged(model, alone, [single], [new[row]])[0]
        assert close(logits[row], expected, 1e-3)
