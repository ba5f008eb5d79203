"""The reference models run on stock mlx-lm caches as the table says, and on OneKV's engine with the same tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from architectures import ARCHITECTURES, VOCAB, build, cache_kind
from onekv.engine import Request
from onekv.errors import UnsupportedLayerError
from stock import engine_of

# Kept in a class of mlx-lm's own that OneKV cannot serve.
REFUSED = {"deepseek_v41"}
PROMPT = 150
TOLERANCE = 1e-4
TOKENS = np.random.default_rng(1).integers(1, VOCAB, (2, PROMPT + 5))


@pytest.fixture(autouse=True)
def plain_cpu() -> Iterator[None]:
    """Full float32 precision, and no minute of compiling kernels when their cache is empty."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    yield
    mx.set_default_device(device)
    if "MLX_DISABLE_COMPILE" not in os.environ:
        mx.enable_compile()


def prefill(model: nn.Module, tokens: np.ndarray, length: int, chunk: int) -> tuple[np.ndarray, list[Any]]:
    """Logits of the first ``length`` tokens and the stock caches holding them."""
    caches = make_prompt_cache(model)
    logits = []
    for start in range(0, length, chunk):
        logits.append(model(mx.array(tokens[None, start : min(start + chunk, length)]), cache=caches))
        mx.eval(logits[-1], [cache.state for cache in caches])
    return np.array(mx.concatenate(logits, axis=1))[0], caches


def decode(model: nn.Module, tokens: list[np.ndarray], caches: list[Any]) -> np.ndarray:
    """Logits of further tokens, one step at a time, one row per list entry."""
    logits = [model(mx.array(np.array(step)[:, None]), cache=caches) for step in zip(*tokens, strict=True)]
    return np.array(mx.concatenate(logits, axis=1))


def generate(model: nn.Module, tokens: np.ndarray, chunk: int) -> np.ndarray:
    """Logits of a prompt in chunks, then of the remaining tokens singly."""
    logits, caches = prefill(model, tokens, PROMPT, chunk)
    return np.concatenate([logits, decode(model, [tokens[PROMPT:]], caches)[0]])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stock_prefill_and_decode(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model = build(name)
    again = dict(tree_flatten(build(name).parameters()))
    for path, value in tree_flatten(model.parameters()):
        assert value.dtype == mx.float32, path
        assert mx.array_equal(value, again[path]), path
    assert tuple(map(cache_kind, make_prompt_cache(model))) == architecture.caches

    tokens = TOKENS[0]
    chunked = generate(model, tokens, 64)
    assert chunked.shape == (len(tokens), VOCAB)
    assert np.isfinite(chunked).all()
    assert 1 <= chunked.std() <= 5

    changed = tokens.copy()
    changed[2] = tokens[2] % (VOCAB - 1) + 1
    assert np.abs(generate(model, changed, 64)[-1] - chunked[-1]).max() > 0.02

    difference = np.abs(generate(model, tokens, PROMPT) - chunked).max()
    if architecture.chunk_exact is not None:
        assert (difference <= TOLERANCE) == architecture.chunk_exact, difference
    assert bool(architecture.reason) != (architecture.chunk_exact is True)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stock_batched_decode(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model = build(name)
    lengths = (PROMPT, PROMPT - 49)
    nexts = [row[n : n + 3] for row, n in zip(TOKENS, lengths, strict=True)]

    def caches() -> list[list[Any]]:
        return [prefill(model, row, n, 64)[1] for row, n in zip(TOKENS, lengths, strict=True)]

    single = [decode(model, [row], c)[0] for row, c in zip(nexts, caches(), strict=True)]
    try:
        merged = [rows[0].merge(list(rows)) for rows in zip(*caches(), strict=True)]
        difference = np.abs(decode(model, nexts, merged) - np.stack(single)).max()
    except (AttributeError, TypeError, ValueError) as error:
        assert architecture.batch_gap, error
    else:
        assert (difference <= TOLERANCE) == (not architecture.batch_gap), difference
        assert not architecture.int_offset


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """With stock caches: all of the prompt but its last token, then one token at a time."""
    caches = make_prompt_cache(model)
    model(mx.array(prompt[:-1])[None], cache=caches)
    tokens = prompt[-1:]
    for _ in range(count):
        tokens.append(int(model(mx.array(tokens[-1:])[None], cache=caches)[0, -1].argmax()))
    return tokens[1:]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_onekv_cold_and_warm(name: str) -> None:
    """Computed, and then again from what that left in the pool: the tokens are those of mlx-lm's own caches."""
    model = build(name)
    block, prompt, count = 16, TOKENS[0][:75].tolist(), 5
    settings = {"kv_memory": "8MB", "block_size": block, "max_batch": 2, "prefill_chunk": 128}
    if name in REFUSED:
        with pytest.raises(UnsupportedLayerError):
            engine_of(model, **settings)
        return
    engine = engine_of(model, **settings)
    expected = greedy(model, prompt, count)
    for cached in (0, (len(prompt) - 1) // block * block):
        request = Request(prompt, count)
        engine.submit(request)
        while not engine.idle:
            engine.step()
        engine.check_integrity()
        assert request.tokens == expected
        assert request.cached_tokens >= cached
        assert bool(request.cached_tokens) == bool(cached)
