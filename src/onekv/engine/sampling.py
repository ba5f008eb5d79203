"""Choosing tokens for all rows of a batch.

Every request draws from its own stream of random numbers (its seed and the number of the token), so what it gets does
not depend on the requests beside it.
"""

from dataclasses import replace

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from .request import Request, Sampling


def sample(logits: mx.array, requests: list[Request], drawn: list[int]) -> mx.array:
    """One token per row of `logits` [rows, vocabulary]; for request i `drawn[i]` tokens were chosen before."""
    rows_by_rule: dict[Sampling, list[int]] = {}
    for row, request in enumerate(requests):
        rows_by_rule.setdefault(replace(request.sampling, seed=None), []).append(row)
    parts, order = [], []
    for rule, rows in rows_by_rule.items():
        some = logits if len(rows) == len(requests) else logits[mx.array(rows)]
        parts.append(_choose(some, rule, [(requests[row].seed, drawn[row]) for row in rows]))
        order += rows
    tokens = mx.concatenate(parts)
    return tokens if len(parts) == 1 else tokens[mx.array(np.argsort(order))]


def _choose(logits: mx.array, rule: Sampling, keys: list[tuple[int, int]]) -> mx.array:
    if rule.temperature == 0:
        return mx.argmax(logits, axis=-1)
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if rule.top_p < 1:
        logprobs = apply_top_p(logprobs, rule.top_p)
    if rule.min_p > 0:
        logprobs = apply_min_p(logprobs, rule.min_p)
    if 0 < rule.top_k < logits.shape[-1]:
        logprobs = apply_top_k(logprobs, rule.top_k)
    # The largest of (log probability + Gumbel noise) is a draw from the distribution.
    noise = [mx.random.gumbel(logits.shape[-1:], key=_key(seed, number)) for seed, number in keys]
    return mx.argmax(logprobs / rule.temperature + mx.stack(noise), axis=-1)


def _key(seed: int, number: int) -> mx.array:
    return mx.array([seed % 2**32, number], mx.uint32)
