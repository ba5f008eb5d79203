"""Every architecture gives the same logits on the pool as with mlx-lm's own caches."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache

from architectures import ARCHITECTURES, VOCAB, build
from onekv.engine.selftest import set_direct, why_one_by_one
from onekv.errors import UnsupportedLayerError
from onekv.memory.layout.reader import KEEP, read_layout
from stock import forward, make_memory, paged_logits, pieces, stock_logits, worst

TOLERANCE = 1e-4
DECODED = 40
CHUNK = 48
# Cross several blocks of 16 and every window in the table; none is a multiple of the block size.
PROMPTS = (150, 61, 97)
# Kept in a class of mlx-lm's own that has no protocol to serve.
REFUSED = {"deepseek_v41"}
SERVED = [name for name in ARCHITECTURES if name not in REFUSED]
# mlx-lm itself is wrong or fails for rows of different lengths; OneKV must find out and decode row by row.
ROW_BY_ROW = {"gemma2", "afm7", "minimax_m3_vl", "llama4", "gpt_bigcode", "llama-dynamic-rope"}


@pytest.fixture(autouse=True)
def _plain_kernels():
    """MLX on CPU compiles fused kernels with g++; for these small models that takes longer than the tests."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def random_tokens(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


@pytest.mark.parametrize("name", SERVED)
def test_one_sequence_equals_stock(name):
    model = build(name)
    tokens = random_tokens(PROMPTS[0] + DECODED, seed=1)
    expected = stock_logits(model, tokens, PROMPTS[0], CHUNK)
    memory = make_memory(model)
    set_direct(model, memory)
    assert worst(paged_logits(model, memory, tokens, PROMPTS[0], CHUNK), expected) < TOLERANCE
    memory.check_integrity()


@pytest.mark.parametrize("name", [name for name in SERVED if name not in ROW_BY_ROW])
def test_ragged_batch_equals_stock(name):
    model = build(name)
    memory = make_memory(model)
    set_direct(model, memory)
    assert why_one_by_one(model, memory) is None
    rows = [random_tokens(prompt + DECODED, seed=prompt) for prompt in PROMPTS]
    sequences = [memory.open(len(row)) for row in rows]
    for sequence, row, prompt in zip(sequences, rows, PROMPTS, strict=True):
        for start, end in pieces(prompt, prompt, CHUNK):
            forward(model, memory, [sequence], [row[start:end]])
        sequence.prefilled()
    steps = []
    for step in range(DECODED):
        inputs = [[row[prompt + step]] for row, prompt in zip(rows, PROMPTS, strict=True)]
        steps.append(forward(model, memory, sequences, inputs)[:, 0])
    logits = mx.stack(steps, axis=1)
    for index, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
        expected = stock_logits(model, row, prompt, CHUNK)[prompt:]
        assert worst(logits[index], expected) < TOLERANCE
    for sequence in sequences:
        memory.close(sequence)
    memory.check_integrity()


@pytest.mark.parametrize("name", sorted(ROW_BY_ROW))
def test_models_that_cannot_take_ragged_rows_are_found(name):
    model = build(name)
    assert why_one_by_one(model, make_memory(model)) is not None


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unknown_layer_kind_is_refused_by_name(name):
    with pytest.raises(UnsupportedLayerError, match=r"layer 0 keeps its state in a LayerCache"):
        read_layout(build(name))


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_next", "gemma3_text"])
def test_max_kv_size_equals_a_rotating_cache(name):
    """Past the maximum mlx-lm agrees with itself only token by token, so that is the reference there."""
    model, size = build(name), 50
    tokens = random_tokens(size + 90, seed=3)
    caches = [
        RotatingKVCache(max_size=size, keep=KEEP) if type(cache).__name__ == "KVCache" else cache
        for cache in (model.make_cache() if hasattr(model, "make_cache") else [None] * len(model.layers))
    ]
    caches = [RotatingKVCache(max_size=size, keep=KEEP) if cache is None else cache for cache in caches]
    expected = stock_logits(model, tokens, prompt=32, chunk=32, caches=caches)
    memory = make_memory(model, max_kv_size=size)
    for prompt, chunk in ((32, 32), (len(tokens), 32), (100, 7)):
        assert worst(paged_logits(model, memory, tokens, prompt, chunk), expected) < TOLERANCE
    memory.check_integrity()
