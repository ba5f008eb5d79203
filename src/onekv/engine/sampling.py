"""Choosing tokens for all rows of a batch.

Every request draws from its own stream of random numbers (its seed and the number of the token), so what it gets does
not depend on the requests beside it. Log probabilities that are reported are the model's own, before any rule.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from ..errors import RequestFailedError
from .params import Rule
from .request import Logprob, Request


@dataclass
class Drawn:
    """Lazy: a token per row, whether the row's logits are numbers at all, and log probabilities if any row wants them.

    `top` has the ids [rows, n] and log probabilities of the likeliest tokens, likeliest first.
    """

    tokens: mx.array
    sound: mx.array
    chosen: mx.array | None = None
    top: tuple[mx.array, mx.array] | None = None

    def arrays(self) -> list[mx.array]:
        optional = [self.chosen, *(self.top or ())]
        return [self.tokens, self.sound, *[array for array in optional if array is not None]]

    def logprobs(self, row: int, wanted: int) -> Logprob:
        assert self.chosen is not None
        top: list[tuple[int, float]] = []
        if self.top is not None and wanted:
            ids, values = (array[row, :wanted].tolist() for array in self.top)
            top = list(zip(ids, values, strict=True))  # type: ignore[arg-type]
        return Logprob(self.chosen[row].item(), top)  # type: ignore[arg-type]


def sample(logits: mx.array, requests: list[Request], drawn: list[int]) -> Drawn:
    """One token per row of `logits` [rows, vocabulary]; for request i `drawn[i]` tokens were chosen before."""
    # A NaN anywhere makes the largest NaN.
    sound = mx.isfinite(logits.max(axis=-1))
    processed = _process(logits, requests)
    if processed is not logits:
        sound &= mx.isfinite(processed.max(axis=-1))
    adjusted = _adjust(processed, requests, drawn)
    rows_by_rule: dict[Rule, list[int]] = {}
    for row, request in enumerate(requests):
        rows_by_rule.setdefault(request.sampling.rule, []).append(row)
    parts, order = [], []
    for rule, rows in rows_by_rule.items():
        some = adjusted if len(rows) == len(requests) else adjusted[mx.array(rows)]
        parts.append(_choose(some, rule, [(requests[row].seed, drawn[row]) for row in rows]))
        order += rows
    tokens = mx.concatenate(parts)
    if len(parts) > 1:
        tokens = tokens[mx.array(np.argsort(order))]
    result = Drawn(tokens, sound)
    wanted = [request.sampling.logprobs for request in requests if request.sampling.logprobs is not None]
    if wanted:
        _report(result, logits, max(wanted))
    return result


def _report(result: Drawn, logits: mx.array, top: int) -> None:
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    result.chosen = mx.take_along_axis(logprobs, result.tokens[:, None], axis=-1)[:, 0]
    if top:
        ids = mx.argpartition(-logprobs, kth=min(top, logits.shape[-1] - 1), axis=-1)[:, :top]
        values = mx.take_along_axis(logprobs, ids, axis=-1)
        order = mx.argsort(-values, axis=-1)
        result.top = (mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(values, order, axis=-1))


def _process(logits: mx.array, requests: list[Request]) -> mx.array:
    """Logits after the callers' own functions. Who has one that fails gets NaN, and its `error`."""
    if not any(request.sampling.logits_processors for request in requests):
        return logits
    rows = []
    for index, request in enumerate(requests):
        row = logits[index : index + 1]
        if request.sampling.logits_processors:
            try:
                row = _processed(row, request)
            except Exception as error:  # noqa: BLE001  it is the request's own, and ends it alone
                request.error = RequestFailedError(f"a logits processor failed: {error!r}")
                request.error.__cause__ = error
                row = mx.full(row.shape, mx.nan, row.dtype)
        rows.append(row.astype(mx.float32))
    return mx.concatenate(rows)


def _processed(row: mx.array, request: Request) -> mx.array:
    tokens, result = mx.array(request.all_tokens), row
    for processor in request.sampling.logits_processors:
        result = processor(tokens, result)
    if not isinstance(result, mx.array) or result.shape != row.shape:
        got = f"an array of {result.shape}" if isinstance(result, mx.array) else f"{type(result).__name__}"
        raise TypeError(f"it returned {got} and must return an array of {row.shape}")
    return result


def _adjust(logits: mx.array, requests: list[Request], drawn: list[int]) -> mx.array:
    """Logits after penalties, biases, constraints and stop tokens that come too early; other rows are as they were."""
    early = [count < request.sampling.min_tokens for request, count in zip(requests, drawn, strict=True)]
    if not any(early) and not any(r.looks_back or r.sampling.logit_bias for r in requests):
        return logits
    vocabulary = logits.shape[-1]
    added = np.zeros((len(requests), vocabulary), np.float32)
    factor = np.ones((len(requests), vocabulary), np.float32)
    for row, request in enumerate(requests):
        rule = request.sampling
        if rule.looks_back and request.tokens:
            seen, counts = np.unique(np.array(request.tokens), return_counts=True)
            added[row, seen] -= rule.presence_penalty + rule.frequency_penalty * counts
        if rule.repetition_penalty != 1:
            factor[row, list(set(request.all_tokens))] = rule.repetition_penalty
        for token, bias in dict(rule.logit_bias).items():
            added[row, token] += bias
        if early[row]:
            added[row, list(request.stop_tokens)] = -np.inf
        if request.constraint is not None:
            # A tokenizer may know more ids than the model has logits.
            allowed = request.constraint.allowed()[:vocabulary]
            added[row, : len(allowed)][~allowed] = -np.inf
            added[row, len(allowed) :] = -np.inf
    scale = mx.array(factor)
    logits = logits.astype(mx.float32)
    return mx.where(logits > 0, logits / scale, logits * scale) + mx.array(added)


def _choose(logits: mx.array, rule: Rule, keys: list[tuple[int, int]]) -> mx.array:
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
