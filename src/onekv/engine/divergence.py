"""How far a model with encoded KV diverges from the same model with plain KV: the Kullback-Leibler divergence of its
next-token distributions, in nats.

At load, the beginning of the calibration text is read twice, side by side: with the engine's own memory, and with
mlx-lm's caches. Some small models fail outright with 4-bit keys; most lose little. The centres of keys come from the
same text, and it is short: the loss may be larger on other texts. So this detects models that fail; it does not measure
quality.

It stays within the workspace of the plan: logits of a few tokens at a time, and plain KV of `LENGTH` tokens.
"""

from collections.abc import Sequence

import mlx.core as mx

from ..errors import UnsupportedLayerError
from ..memory.device import settle
from ..memory.formats import PLAIN, KVFormat, larger, parse
from ..memory.layout import Layout
from ..memory.layout.reader import stock_caches
from ..memory.plan.workspace import scored_tokens
from .engine import Engine
from .known import Known

# Tokens of the text that are read.
LENGTH = 128
# Of the mean over all tokens. SmolLM2 has 0.02 with q4, which costs 2 % of perplexity, and 0.1 with tq3, which costs 9.
BOUND = 0.05


def measure(engine: Engine, tokens: Sequence[int]) -> float:
    """The mean divergence over the first of `tokens`: as many as the pool has room for, up to LENGTH."""
    layout, memory, model = engine.plan.layout, engine.memory, engine.runner.model
    read = list(tokens[: min(LENGTH, engine.plan.longest)])
    # Logits of both sides, in float32, their logarithms and products: a quarter each of what a step may have.
    chunk = max(1, min(scored_tokens(layout) // 4, engine.plan.prefill_chunk))
    plain, sequence, total = stock_caches(model), memory.open(len(read)), 0.0
    try:
        for start in range(0, len(read), chunk):
            part = mx.array(read[start : start + chunk])[None]
            wanted = log_probabilities(model(part, cache=plain)[0])
            found = log_probabilities(memory.run(model, part, [sequence], [part.size])[0])
            apart = divergences(wanted, found).sum()
            settle(apart, memory.arrays())
            total += float(apart.item())  # type: ignore[arg-type]
    finally:
        memory.close(sequence)
    return total / len(read)


def check(engine: Engine, kv_format: KVFormat, tokens: Sequence[int], known: Known) -> str | None:
    """Measures and records the divergence (`Stats.divergence`), unless it is `known`; returns a warning if it is
    beyond the bound.
    """
    if known.divergence is None:
        known.divergence = measure(engine, tokens)
        # What was computed is not needed again.
        mx.clear_cache()
    engine.divergence = found = known.divergence
    # NaN is not below it.
    if found <= BOUND:
        return None
    better = _fitting(engine.plan.layout, kv_format)
    return (
        f"--kv-format {kv_format} is a poor fit for this model: on a short text, its predictions diverge from those "
        f"with plain KV by {found:.2g} nats per token, more than {BOUND:g}; the next larger format is {better}"
    )


def _fitting(layout: Layout, kv_format: KVFormat) -> str:
    """The next larger format that can store all layers."""
    layers = [layer for group in layout.groups for layer in group.layers]
    for name in larger(kv_format):
        each = parse(name)
        try:
            for layer in layers:
                each.keys(layer.k_dim, layer.dtype)
                each.values(layer.v_dim, layer.dtype)
        except UnsupportedLayerError:
            continue
        return name
    return str(PLAIN)


def log_probabilities(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def divergences(wanted: mx.array, found: mx.array) -> mx.array:
    """KL of the log probabilities `wanted` [rows, vocabulary] to `found`; rounding makes none of them negative."""
    apart = mx.where(mx.isfinite(wanted), mx.exp(wanted) * (wanted - found), 0)
    return mx.maximum(apart.sum(axis=-1), 0)
