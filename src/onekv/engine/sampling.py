"""Choosing tokens for all rows of a batch.

Every request samples from its own stream of random numbers (its seed and the token's index), so its tokens do not
depend on the other requests in the batch. Reported log probabilities are the model's own, before any rule is applied.

Logits that were not computed one token at a time may differ by rounding. With such a `tolerance`, each row also reports
whether any logits within it would have given the same token: its `margin` is the distance, as a change of all logits,
at which another token could win.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from ..errors import OneKVError, RequestFailedError
from ..memory.device import kind
from .params import Rule
from .request import Logprob, Request

log = logging.getLogger("onekv.engine")
Numbers = np.ndarray[Any, Any]


@dataclass
class Drawn:
    """Lazy: a token per row, whether the row's logits are numbers at all, and log probabilities if any row wants them.

    `top` has the ids [rows, n] and log probabilities of the likeliest tokens, likeliest first.
    """

    tokens: mx.array
    sound: mx.array
    chosen: mx.array | None = None
    top: tuple[mx.array, mx.array] | None = None
    # Whether the token is the same within the tolerance, if one was given.
    sure: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        optional = [self.chosen, *(self.top or ()), self.sure]
        return [self.tokens, self.sound, *[array for array in optional if array is not None]]

    def logprobs(self, row: int, wanted: int) -> Logprob:
        assert self.chosen is not None
        top: list[tuple[int, float]] = []
        if self.top is not None and wanted:
            ids, values = (array[row, :wanted].tolist() for array in self.top)
            top = list(zip(ids, values, strict=True))  # type: ignore[arg-type]
        return Logprob(self.chosen[row].item(), top)  # type: ignore[arg-type]


def sample(logits: mx.array, requests: list[Request], drawn: list[int], tolerance: float | None = None) -> Drawn:
    """One token per row of `logits` [rows, vocabulary]; for request i `drawn[i]` tokens were chosen before."""
    if tolerance is None and kind() != "cpu" and all(map(_wants_likeliest, requests, drawn)):
        return Drawn(*_likeliest(logits))
    # A NaN anywhere makes the largest NaN.
    peaks = _peaks(logits)
    sound = mx.isfinite(peaks.max(axis=-1))
    processed = _process(logits, requests)
    if processed is not logits:
        sound &= mx.isfinite(processed.max(axis=-1))
    adjusted = _adjust(processed, requests, drawn)
    if any(request.error is not None for request in requests):
        sound &= mx.array([request.error is None for request in requests])
    rows_by_rule: dict[tuple[Rule, float | None], list[int]] = {}
    for row, request in enumerate(requests):
        within = tolerance * _stretch(request) if tolerance is not None else None
        rows_by_rule.setdefault((request.sampling.rule, within), []).append(row)
    parts, sure, order = [], [], []
    for (rule, within), rows in rows_by_rule.items():
        some = adjusted if len(rows) == len(requests) else adjusted[mx.array(rows)]
        keys = [(requests[row].seed, drawn[row]) for row in rows]
        chosen, certain = _choose(some, rule, keys, within, peaks if some is logits else None)
        parts.append(chosen)
        sure += [certain] if certain is not None else []
        order += rows
    in_turn = mx.array(np.argsort(order)) if len(parts) > 1 else slice(None)
    result = Drawn(mx.concatenate(parts)[in_turn], sound)
    if tolerance is not None:
        result.sure = mx.concatenate(sure)[in_turn]
    wanted = [request.sampling.logprobs for request in requests if request.sampling.logprobs is not None]
    if wanted:
        _report(result, logits, max(wanted))
    return result


def _wants_likeliest(request: Request, drawn: int) -> bool:
    """Whether it gets the likeliest token, and nothing else is asked of its logits."""
    sampling = request.sampling
    asked = sampling.logits_processors or sampling.logprobs is not None or _adjusted(request, drawn)
    return sampling.rule.temperature == 0 and request.error is None and not asked


def _find_likeliest(logits: mx.array) -> tuple[mx.array, mx.array]:
    """The likeliest token of each row, and whether its logits are numbers."""
    peaks = _peaks(logits)
    return _first_largest(logits, peaks), mx.isfinite(peaks.max(axis=-1))


# On a GPU, each of these small operations takes longer to launch than to run.
_likeliest = mx.compile(_find_likeliest)


def guess(logits: mx.array, requests: list[Request], drawn: list[int]) -> mx.array:
    """What `sample` would give, except for rules that look at earlier tokens: for a draft model's guesses."""
    rows = []
    for row, (request, number) in enumerate(zip(requests, drawn, strict=True)):
        rows.append(_choose(logits[row : row + 1], request.sampling.rule, [(request.seed, number)], None)[0])
    return mx.concatenate(rows)


def scores(logits: mx.array, tokens: list[int], top: int) -> list[Logprob]:
    """The log probability of each of `tokens` by its row of `logits` [tokens, vocabulary], with the `top` likeliest."""
    found = Drawn(mx.array(tokens), mx.array(True))
    _report(found, logits, top)
    mx.eval(found.arrays())
    return [found.logprobs(row, top) for row in range(len(tokens))]


def _stretch(request: Request) -> float:
    """The most by which its rules amplify a difference between logits."""
    return max(request.sampling.repetition_penalty, 1 / request.sampling.repetition_penalty)


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
    """Logits after the callers' own functions. A request whose function fails has an `error`."""
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
    if not any(map(_adjusted, requests, drawn)):
        return logits
    vocabulary = logits.shape[-1]
    added = np.zeros((len(requests), vocabulary), np.float32)
    factor = np.ones((len(requests), vocabulary), np.float32)
    for row, request in enumerate(requests):
        add_rules(request, _early(request, drawn[row]), added[row], factor[row])
    scale = mx.array(factor)
    logits = logits.astype(mx.float32)
    return mx.where(logits > 0, logits / scale, logits * scale) + mx.array(added)


def _early(request: Request, drawn: int) -> bool:
    return drawn < request.sampling.min_tokens


def _adjusted(request: Request, drawn: int) -> bool:
    """Whether its rules change its logits."""
    return request.looks_back or bool(request.sampling.logit_bias) or _early(request, drawn)


def add_rules(request: Request, early: bool, added: Numbers, factor: Numbers) -> None:
    """What one request's rules add to its logits, and divide them by. If they fail, the request has an `error`."""
    try:
        _rules(request, early, added, factor)
    except Exception as error:
        log.exception("the rules of a request failed; it ends with an error")
        request.error = error if isinstance(error, OneKVError) else RequestFailedError.internal(error)


def _rules(request: Request, early: bool, added: Numbers, factor: Numbers) -> None:
    rule = request.sampling
    if rule.looks_back and request.tokens:
        seen, counts = np.unique(np.array(request.tokens), return_counts=True)
        added[seen] -= rule.presence_penalty + rule.frequency_penalty * counts
    if rule.repetition_penalty != 1:
        factor[list(set(request.all_tokens))] = rule.repetition_penalty
    for token, bias in dict(rule.logit_bias).items():
        added[token] += bias
    # A tokenizer may know more ids than the model has logits.
    if early:
        added[[token for token in request.stop_tokens if token < added.size]] = -np.inf
    if request.constraint is not None:
        allowed = request.constraint.allowed()[: added.size]
        added[: allowed.size][~allowed] = -np.inf
        added[allowed.size :] = -np.inf


def _peaks(logits: mx.array) -> mx.array:
    """The largest logit of each of several parts of a row, [rows, parts].

    One row does not fill a GPU: a whole row at a time takes ten times as long.
    """
    rows, vocabulary = logits.shape
    parts = next(count for count in (32, 16, 8, 4, 2, 1) if vocabulary % count == 0)
    return logits.reshape(rows, parts, -1).max(axis=-1)


def _first_largest(logits: mx.array, peaks: mx.array) -> mx.array:
    """The token with the largest logit of each row; the first of several. `peaks` are those of `logits`."""
    rows, parts = peaks.shape
    size = logits.shape[-1] // parts
    part = mx.argmax(peaks, axis=-1)
    here = logits.reshape(rows * parts, size)[mx.arange(rows, dtype=mx.uint32) * parts + part]
    return part * size + mx.argmax(here, axis=-1)


def _choose(
    logits: mx.array,
    rule: Rule,
    keys: list[tuple[int, int]],
    tolerance: float | None,
    peaks: mx.array | None = None,
) -> tuple[mx.array, mx.array | None]:
    """A token per row; with a tolerance, also whether it is certain. `peaks` are those of `logits`, if known."""
    if rule.temperature == 0:
        tokens = _first_largest(logits, _peaks(logits) if peaks is None else peaks)
        return tokens, None if tolerance is None else _gap(logits, tokens) > 2 * tolerance
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    # The largest of (log probability + Gumbel noise) is a draw from the distribution.
    noise = mx.stack([mx.random.gumbel(logits.shape[-1:], key=_key(seed, number)) for seed, number in keys])
    tokens = mx.argmax(_filtered(logprobs, rule) / rule.temperature + noise, axis=-1)
    if tolerance is None:
        return tokens, None
    # Whoever passes the filters for such logits: of all that might, the winner must be the same, and surely pass.
    within = 2 * tolerance
    loose, strict = (mx.isfinite(_filtered(logprobs, _moved(rule, by))) for by in (within, -within))
    lowest = mx.where(loose, logprobs, mx.inf).min(axis=-1, keepdims=True)
    highest = mx.where(strict, -mx.inf, logprobs).max(axis=-1)
    scores = mx.where(logprobs >= lowest - within, logprobs, -mx.inf) / rule.temperature + noise
    sure = (mx.argmax(scores, axis=-1) == tokens) & (_gap(scores, tokens) * rule.temperature > within)
    return tokens, sure & (mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0] > highest + within)


def _filtered(logprobs: mx.array, rule: Rule) -> mx.array:
    """-inf for what top_p, min_p and top_k leave out."""
    kept = logprobs
    if rule.top_p < 1:
        kept = apply_top_p(kept, rule.top_p)
    if rule.min_p > 0:
        kept = apply_min_p(kept, rule.min_p)
    if 0 < rule.top_k < logprobs.shape[-1]:
        kept = apply_top_k(kept, rule.top_k)
    return kept


def _moved(rule: Rule, by: float) -> Rule:
    """Filters with the limits that they have, at most, for logits of which any two are `by` further apart or closer:
    looser above 0, stricter below. Whose rank is near a limit is not moved by it: others of its size may pass it."""
    top_p = min(1.0, rule.top_p * math.exp(by)) if rule.top_p < 1 else 1.0
    return Rule(rule.temperature, top_p, rule.top_k, min(1.0, rule.min_p * math.exp(-by)))


def _gap(scores: mx.array, tokens: mx.array) -> mx.array:
    """How far the best of each row is ahead of the next one; `tokens` are the best."""
    best = mx.take_along_axis(scores, tokens[:, None], axis=-1)
    others = mx.put_along_axis(scores, tokens[:, None], mx.array(-mx.inf, scores.dtype), axis=-1)
    return (best[:, 0] - others.max(axis=-1)).astype(mx.float32)


def _key(seed: int, number: int) -> mx.array:
    return mx.array([seed % 2**32, number], mx.uint32)
