"""Rows that begin with the same blocks read them together: the same numbers as when each reads them for itself."""

import mlx.core as mx
import numpy as np
import pytest

from architectures import build
from onekv.memory.attention import shared
from stock import forward, make_memory, small_llama, stock_logits, worst

BLOCK = 16


@pytest.fixture
def used(monkeypatch):
    """How many rows read shared blocks together, call by call."""
    calls = []
    stock = shared._of_prefix

    def counted(q, arrays, prefix, size, by):
        calls.append((len(q), prefix.run is not None))
        return stock(q, arrays, prefix, size, by)

    monkeypatch.setattr(shared, "_of_prefix", counted)
    monkeypatch.setattr(shared, "LEAST", 2 * BLOCK)
    return calls


def fork(memory, parent, tokens, length):
    """A sequence on the first `tokens` tokens of another."""
    prefixes = [table.blocks[: tokens // BLOCK] for table in parent.tables]
    sequence = memory.open(length, prefixes)
    sequence.length = tokens
    return sequence


def store(model, memory, sequence, tokens):
    for start in range(sequence.length, len(tokens), memory.chunk):
        forward(model, memory, [sequence], [tokens[start : start + memory.chunk]])
    sequence.prefilled()


def run(model, forks, steps=20, scattered=False):
    """Logits of decode steps of rows, and of mlx-lm's own caches. Row i is `forks[i]`: (parent, shared, own) tokens."""
    memory = make_memory(model, blocks=200)
    rng = np.random.default_rng(3)
    sequences, texts = [], []
    holes = []
    for parent, common, own in forks:
        text = (texts[parent][:common] if common else []) + rng.integers(1, 100, own + steps).tolist()
        length = len(text) - steps
        sequence = fork(memory, sequences[parent], common, len(text)) if common else memory.open(len(text))
        if scattered:
            # Another sequence takes a block after each of its own.
            for start in range(0, length, BLOCK):
                stop = min(length, start + BLOCK)
                if stop > sequence.length:
                    forward(model, memory, [sequence], [text[sequence.length : stop]])
                    holes.append(memory.open(BLOCK))
                    forward(model, memory, holes[-1:], [[1] * BLOCK])
            sequence.prefilled()
        store(model, memory, sequence, text[:length])
        sequences.append(sequence)
        texts.append(text)
    found = []
    for step in range(steps):
        rows = [[text[len(text) - steps + step]] for text in texts]
        found.append(forward(model, memory, sequences, rows)[:, -1])
    for sequence in [*sequences, *holes]:
        memory.close(sequence)
    memory.check_integrity()
    expected = [stock_logits(model, text, len(text) - steps, 48)[-steps:] for text in texts]
    return mx.stack(found, axis=1), mx.stack(expected)


def llama(**shape):
    common = {"num_hidden_layers": 2, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 32}
    return small_llama(5, **{**common, **shape})


FORKS = {
    "one prefix": [(0, 0, 80), (0, 64, 5), (0, 64, 33), (0, 64, 20)],
    "branches of branches": [(0, 0, 100), (0, 32, 90), (1, 96, 30), (1, 112, 1), (0, 96, 7)],
    "one alone, and long": [(0, 0, 60), (0, 48, 1), (0, 0, 400), (0, 48, 2)],
}


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("forks", FORKS.values(), ids=FORKS)
def test_rows_that_share_blocks(used, forks, scattered):
    found, expected = run(llama(), forks, scattered=scattered)
    assert worst(found, expected) < 1e-4
    assert used and any(adjacent is not scattered for _, adjacent in used)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "qwen3_moe", "phi3"])
def test_other_models(used, name):
    """With windows beside full attention, sinks, experts."""
    model = build(name)
    found, expected = run(model, FORKS["one prefix"])
    assert worst(found, expected) < 1e-3
    assert used


def test_rows_that_share_nothing_or_little_are_as_before(used):
    run(llama(), [(0, 0, 80), (0, 16, 30), (0, 0, 20)])
    assert used == []


def test_it_can_be_switched_off(used, monkeypatch):
    monkeypatch.setattr(shared, "LEAST", 0)
    found, expected = run(llama(), FORKS["one prefix"])
    assert worst(found, expected) < 1e-4 and used == []


def test_rows_that_leave_end_the_sharing(used):
    model = llama()
    memory = make_memory(model, blocks=100)
    text = list(range(1, 90))
    first = memory.open(120)
    store(model, memory, first, text)
    second = fork(memory, first, 64, 120)
    store(model, memory, second, text)
    forward(model, memory, [first, second], [[1], [2]])
    assert len(used) == 2
    memory.close(first)
    third = memory.open(120)
    store(model, memory, third, text)
    forward(model, memory, [second, third], [[1], [2]])
    assert len(used) == 2
    for sequence in (second, third):
        memory.close(sequence)
    memory.check_integrity()
