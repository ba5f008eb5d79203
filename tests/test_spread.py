"""Several tokens of one sequence as rows of one decode step: what they give is what they give one at a time."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from architectures import ARCHITECTURES, build
from onekv import loops
from onekv.engine.runner import Runner
from onekv.memory.formats import parse
from onekv.memory.kv import KVMemory
from onekv.memory.layout.reader import read_layout
from onekv.memory.layout.stored import encoded
from onekv.memory.looped import LoopedDecode
from onekv.memory.work import find_segments
from stock import small_llama, stock_logits
from test_ragged import buffers, close, tokens

BLOCK, CHUNK = 16, 48
STATES = "recurrent states"
BESIDE = "depends on the other rows"
NUMBER = "does not accept one position per row"
# Why a model cannot; all others can.
REFUSED = {
    **dict.fromkeys(["mamba", "mamba2", "rwkv7", "qwen3_next", "qwen3_5", "nemotron_h", "lfm2", "jamba"], STATES),
    **dict.fromkeys(["granitemoehybrid", "kimi_linear", "recurrent_gemma", "gear", "falcon_h1"], STATES),
    **dict.fromkeys(["baichuan_m1", "longcat_flash_ngram"], STATES),
    **dict.fromkeys(["gemma2", "afm7"], BESIDE),
    **dict.fromkeys(["llama-dynamic-rope", "gpt_bigcode", "llama4"], NUMBER),
    "minimax_m3_vl": "place in memory as its position",
}
# A cache of its own, which OneKV does not hold.
SERVED = [name for name in ARCHITECTURES if name != "deepseek_v41"]
ALLOWED = [name for name in SERVED if name not in REFUSED]


@dataclass
class Bench:
    """A model on a memory, and its decode steps as the engine makes them."""

    model: Any
    runner: Runner

    @property
    def memory(self) -> KVMemory:
        return self.runner.memory

    def open(self, past: list[int], more: int = 60):
        sequence = self.memory.open(len(past) + more)
        for start in range(0, len(past), CHUNK):
            self.runner.store([sequence], [past[start : start + CHUNK]])
        sequence.prefilled(CHUNK)
        return sequence

    def step(self, sequences, new: list[list[int]]) -> list[mx.array]:
        """Logits after each token of each sequence."""
        counts = [len(some) for some in new]
        logits = self.runner.forward(sequences, mx.array([token for some in new for token in some]), counts)
        mx.eval(logits, self.memory.arrays())
        return mx.split(logits, np.cumsum(counts)[:-1].tolist())

    def one_by_one(self, past: list[int], new: list[int]) -> mx.array:
        """The same tokens in steps of their own, in a sequence that nobody shares a step with."""
        sequence = self.open(past)
        try:
            return mx.concatenate([self.step([sequence], [[token]])[0] for token in new])
        finally:
            self.memory.close(sequence)


def bench(name: str, kv_format: str = "auto", block: int = BLOCK) -> Bench:
    # Formats of groups need wider heads.
    wide = {"num_hidden_layers": 2, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 32}
    model = build(name) if kv_format == "auto" else small_llama(5, **wide)
    layout = encoded(read_layout(model), parse(kv_format), 0)
    blocks = 1400 // block
    return Bench(model, Runner(model, KVMemory(layout, (blocks,) * len(layout.groups), block, CHUNK), 3))


def same(ours: mx.array, theirs: mx.array, tolerance: float = 1e-4) -> bool:
    return close(ours, theirs, tolerance) and bool((ours.argmax(-1) == theirs.argmax(-1)).all())


@pytest.mark.parametrize("name", SERVED)
def test_a_model_that_cannot_is_refused_with_the_reason(name):
    several = bench(name).runner.several
    if name in REFUSED:
        assert several.why_not is not None and REFUSED[name] in several.why_not
    else:
        assert several.why_not is None and 0 < several.tolerance < 1e-3


@pytest.mark.parametrize("length", [5, 58, 75, 270])
@pytest.mark.parametrize("name", ALLOWED)
def test_tokens_in_one_step_equal_tokens_one_at_a_time(name, length):
    """Across a border of blocks; contexts that are read together from 64 or 256 tokens on, and longer than windows."""
    some = bench(name)
    past, new = tokens(length, length), tokens(9, 7)
    addresses = buffers(some.memory)
    sequence = some.open(past)
    (logits,) = some.step([sequence], [new])
    assert sequence.length == length + len(new)
    assert same(logits, some.one_by_one(past, new))
    assert same(logits, stock_logits(some.model, past + new, length, CHUNK)[length:])
    assert buffers(some.memory) == addresses
    some.memory.close(sequence)
    some.memory.check_integrity()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "minicpm3"])
@pytest.mark.parametrize("compiled", [True, False])
def test_sequences_with_different_numbers_of_tokens(name, compiled, monkeypatch):
    """Full attention, windows, sinks, latent attention; by compiled loops where a model allows it, and by MLX's
    operations; tokens are taken back after each step."""
    if not compiled:
        monkeypatch.setattr(loops, "why_not", lambda: "no")
    some = bench(name)
    if name in ("llama", "gemma3_text", "minicpm3"):
        assert isinstance(some.runner.compiled, LoopedDecode) == compiled
    pasts = [tokens(length, length) for length in (3, 290, 70)]
    sequences = [some.open(past) for past in pasts]
    for number, (counts, kept) in enumerate([((1, 8, 3), (1, 2, 3)), ((6, 1, 1), (0, 1, 1)), ((4, 12, 9), (4, 1, 9))]):
        new = [tokens(count, 100 * number + row) for row, count in enumerate(counts)]
        for row, logits in enumerate(some.step(sequences, new)):
            assert same(logits, some.one_by_one(pasts[row], new[row])), (counts, row)
            some.memory.truncate(sequences[row], len(pasts[row]) + kept[row])
            pasts[row] += new[row][: kept[row]]
        some.memory.check_integrity()
    for sequence in sequences:
        some.memory.close(sequence)
    some.memory.check_integrity()


@pytest.mark.parametrize("kv_format", ["q8", "q4", "tq4"])
@pytest.mark.parametrize("compiled", [True, False])
def test_tokens_in_an_encoded_format(kv_format, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(loops, "why_not", lambda: "no")
    some = bench("llama", kv_format)
    pasts = [tokens(length, length) for length in (29, 280)]
    sequences = [some.open(past) for past in pasts]
    new = [tokens(5, 1), tokens(11, 2)]
    for row, logits in enumerate(some.step(sequences, new)):
        assert same(logits, some.one_by_one(pasts[row], new[row]), some.runner.several.tolerance), row
    # What is taken back is not read any more, and what comes in its place is.
    for row, sequence in enumerate(sequences):
        some.memory.truncate(sequence, len(pasts[row]) + 1)
        pasts[row] += new[row][:1]
    new = [tokens(3, 3), tokens(4, 4)]
    for row, logits in enumerate(some.step(sequences, new)):
        assert same(logits, some.one_by_one(pasts[row], new[row]), some.runner.several.tolerance), row


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("shared", [64, 256, 320])
def test_rows_beside_others_that_share_a_prefix(shared, compiled, monkeypatch):
    """Blocks that are read together, by rows of one sequence and of others; those of one sequence end differently."""
    if not compiled:
        monkeypatch.setattr(loops, "why_not", lambda: "no")
    some = bench("llama")
    prefix = tokens(shared, 1)
    owner = some.open(prefix)
    blocks = [list(table.blocks) for table in owner.tables]
    pasts, sequences = [], []
    for own in (2, 14, 30):
        pasts.append(prefix + tokens(own, own))
        sequence = some.memory.open(shared + 60, blocks)
        sequence.length = shared
        some.runner.store([sequence], [pasts[-1][shared:]])
        sequence.prefilled(CHUNK)
        sequences.append(sequence)
    for number, counts in enumerate([(5, 1, 4), (1, 7, 1), (3, 3, 3)]):
        new = [tokens(count, 10 * number + row) for row, count in enumerate(counts)]
        for row, logits in enumerate(some.step(sequences, new)):
            assert same(logits, some.one_by_one(pasts[row], new[row])), (counts, row)
            some.memory.truncate(sequences[row], len(pasts[row]) + 1)
            pasts[row].append(new[row][0])
    some.memory.check_integrity()


def test_one_block_for_a_whole_context():
    """A token of the step that another does not see lies in the block that both read."""
    some = bench("llama", block=128)
    for length in (1, 100, 126, 260):
        past, new = tokens(length, length), tokens(6, length)
        sequence = some.open(past)
        assert same(some.step([sequence], [new])[0], some.one_by_one(past, new)), length
        some.memory.close(sequence)


@st.composite
def tables(draw):
    """Rows that branch from each other, some several times in it, and how much each may share."""
    rows: list[list[int]] = []
    fresh = iter(range(1, 10_000))
    for _ in range(draw(st.integers(1, 6))):
        base = rows[draw(st.integers(0, len(rows) - 1))] if rows and draw(st.booleans()) else []
        kept = base[: draw(st.integers(0, len(base)))]
        row = kept + [next(fresh) for _ in range(draw(st.integers(0 if kept else 1, 5)))]
        rows += [row] * draw(st.integers(1, 3))
    shareable = [draw(st.integers(0, len(row))) for row in rows]
    return rows, shareable, draw(st.integers(1, 4))


@given(tables())
def test_segments_have_every_block_of_every_row_once(case):
    rows, shareable, least = case
    counts = np.array([len(row) for row in rows])
    ids = np.array([row + [row[-1]] * (counts.max() - len(row)) for row in rows])
    read: list[list[int]] = [[] for _ in rows]
    for segment in find_segments(ids, counts, least, np.array(shareable)):
        assert segment.first < segment.end
        for row in segment.rows:
            assert read[row] == list(range(segment.first)), "in order"
            read[row] += range(segment.first, segment.end)
            assert rows[row][segment.first : segment.end] == rows[segment.rows[0]][segment.first : segment.end]
        if len(segment.rows) > 1:
            assert segment.end - segment.first >= least
            assert segment.end <= min(shareable[row] for row in segment.rows)
    assert read == [list(range(len(row))) for row in rows]
