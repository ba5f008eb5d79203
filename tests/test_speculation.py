"""Answers with speculation are, token by token, those without it: whatever is proposed, and whatever happens."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from architectures import VOCAB, build
from onekv.engine import Engine, Request, Sampling
from proposers import Adversary, Oracle, speculate
from stock import engine_of

BLOCK, COUNT = 8, 24
NAMES = ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"]
PROPOSERS = ["adversary", "oracle", "lookup"]
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 0.8, "top_p": 0.7},
    "top_k": {"temperature": 1.5, "top_k": 8},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "all of them": {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.4},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {5: 4.0, 9: -100.0, 11: 3.5}},
    "stops late": {"stop_token_ids": [*range(40)], "min_tokens": 9},
    "logprobs": {"logprobs": 5},
}


@pytest.fixture(scope="module")
def models() -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def model(name: str) -> Any:
        if name not in made:
            made[name] = build(name)
        return made[name]

    return model


# By the id of its model, which it keeps.
PLAIN: dict[int, Engine] = {}


def plain_engine(model: Any) -> Engine:
    if id(model) not in PLAIN:
        alone = {"kv_memory": "2MB", "block_size": BLOCK, "max_batch": 1, "prefill_chunk": 48, "prefix_cache": False}
        PLAIN[id(model)] = engine_of(model, speculate="off", **alone)
    return PLAIN[id(model)]


def engine(model: Any, how: str, always: bool = True, **settings: Any) -> Engine:
    common = {"kv_memory": "2MB", "block_size": BLOCK, "max_batch": 4, "prefill_chunk": 48, "draft_tokens": 7}
    made = engine_of(model, **{**common, **settings})
    proposers = {"adversary": Adversary(VOCAB), "oracle": Oracle(0.8, VOCAB), "lookup": None}
    return speculate(made, proposers[how], always)


def prompt_of(seed: int, length: int = 40) -> list[int]:
    """Some of it repeats, so that there is something to look up."""
    tokens = np.random.default_rng(seed).integers(1, VOCAB, length).tolist()
    return (tokens + tokens[: length // 3])[:length]


def copy(request: Request) -> Request:
    return Request(request.prompt, request.max_tokens, replace(request.sampling, seed=request.seed), request.salt)


def promised(runs: Engine) -> bool:
    """No table holds more than was promised to it, and no sequence more than its worst case."""
    requests = [request for request in runs.scheduler if request.lease is not None]
    tables = [table for request in requests for table in request.sequence.tables]
    return all(len(table.held) <= table._limit for table in tables) and all(
        request.stored <= request.max_length for request in requests
    )


def run(runs: Engine, requests: list[Request], each: Callable[[], None] = lambda: None) -> None:
    for request in requests:
        runs.submit(request)
    while not runs.idle:
        runs.step()
        assert promised(runs)
        each()
        runs.check_integrity()
    assert not any(request.error for request in requests)


def expected(model: Any, requests: list[Request]) -> list[Request]:
    """The same requests alone, uncached and without speculation."""
    alone = [copy(request) for request in requests]
    runs = plain_engine(model)
    for request, own in zip(alone, requests, strict=True):
        if own.constraint is not None:
            request.constraint = own.constraint.copy()
        run(runs, [request])
    return alone


def check(model: Any, runs: Engine, requests: list[Request], wanted: list[Request] | None = None) -> None:
    """Run `requests` together; each gets what it gets alone."""
    wanted = wanted or expected(model, requests)
    if isinstance(runs.speculation.proposer, Oracle):
        for request, answer in zip(requests, wanted, strict=True):
            runs.speculation.proposer.know(request, answer.tokens)
    run(runs, requests)
    for request, answer in zip(requests, wanted, strict=True):
        assert request.tokens == answer.tokens
        assert request.finish_reason == answer.finish_reason
        assert 0 <= request.accepted <= request.proposed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", PROPOSERS)
def test_every_rule_gives_the_same_answer(models, name, how):
    model = models(name)
    runs = engine(model, how)
    requests = [
        Request(prompt_of(number, 30 + 9 * number), COUNT, Sampling(**rule, seed=number))
        for number, rule in enumerate(RULES.values())
    ]
    check(model, runs, requests)
    # A second time, what was said before is looked up.
    check(model, runs, [copy(request) for request in requests], requests)
    stats = runs.speculation.stats()
    assert stats.proposed > 100 and stats.steps > 10
    if how == "oracle":
        assert stats.accepted > stats.proposed / 3
    if how == "adversary":
        assert stats.accepted < stats.proposed / 10


@pytest.mark.parametrize("how", PROPOSERS)
def test_at_its_own_pace(models, how):
    model = models("llama")
    requests = [Request(prompt_of(seed), 60, Sampling(temperature=0.5 * seed, seed=seed)) for seed in range(3)]
    check(model, engine(model, how, always=False), requests)


def test_log_probabilities_are_those_of_single_tokens(models):
    model = models("llama")
    request = Request(prompt_of(1), COUNT, Sampling(logprobs=4))
    (wanted,) = expected(model, [request])
    check(model, engine(model, "oracle"), [request], [wanted])
    assert len(request.logprobs) == COUNT
    for own, other in zip(request.logprobs, wanted.logprobs, strict=True):
        assert own.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [token for token, _ in own.top] == [token for token, _ in other.top]
        assert [log for _, log in own.top] == pytest.approx([log for _, log in other.top], abs=1e-3)


class InTurn:
    """Allows what depends on all tokens so far, ends after so many, and may not be asked after that."""

    def __init__(self, left: int, state: int = 1) -> None:
        self.left, self.state = left, state

    def copy(self) -> "InTurn":
        return InTurn(self.left, self.state)

    def allowed(self):
        assert self.left > 0, "it was asked for one more"
        return np.arange(VOCAB) % 3 == self.state % 3

    def advance(self, token: int) -> None:
        assert token % 3 == self.state % 3, "it was not allowed"
        self.left, self.state = self.left - 1, self.state * 31 + token


@pytest.mark.parametrize("how", PROPOSERS)
def test_a_constraint_is_asked_in_turn(models, how):
    model = models("llama")
    requests = [Request(prompt_of(seed), COUNT, Sampling(temperature=float(seed), seed=seed)) for seed in range(2)]
    for request in requests:
        request.constraint = InTurn(COUNT)
    check(model, engine(model, how), [*requests, Request(prompt_of(7), COUNT)])


@pytest.mark.parametrize("looks_back", [False, True])
@pytest.mark.parametrize("at", [1, 4, 5, 11])
def test_an_answer_ends_inside_what_was_guessed(models, at, looks_back):
    """Nothing behind the token that ends it is kept, and what it leaves behind is right."""
    model = models("llama")
    penalty = 0.01 if looks_back else 0.0
    request = Request(prompt_of(2), COUNT, Sampling(presence_penalty=penalty))
    (whole,) = expected(model, [request])
    stop = whole.tokens[at]
    ends = whole.tokens.index(stop) + 1
    runs = speculate(engine(model, "oracle"), Oracle(1.0, VOCAB))
    stopped = Request(prompt_of(2), COUNT, Sampling(stop_token_ids=[stop], presence_penalty=penalty))
    full = Request(prompt_of(2), at + 1, Sampling(presence_penalty=penalty))
    for each in (stopped, full):
        runs.speculation.proposer.know(each, whole.tokens)
    run(runs, [stopped])
    assert (stopped.tokens, stopped.finish_reason) == (whole.tokens[:ends], "stop")
    run(runs, [full])
    assert (full.tokens, full.finish_reason) == (whole.tokens[: at + 1], "length")
    assert runs.speculation.stats().accepted > 0
    after = Request(prompt_of(2) + whole.tokens[:ends] + prompt_of(3, 20), COUNT)
    check(model, runs, [after])
    assert after.cached_tokens >= len(prompt_of(2)) + ends - 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["adversary", "oracle"])
def test_nothing_that_was_rejected_is_found_later(models, name, how):
    """Hits in the middle of an answer, at its end and behind it, one after the other and at the same time."""
    model = models(name)
    runs = engine(model, how)
    first = Request(prompt_of(4, 60), COUNT)
    check(model, runs, [first])
    whole = first.prompt + first.tokens
    hits = [whole[:70] + prompt_of(5, 20), whole[:-1], whole + prompt_of(6, 30), first.prompt, whole[:77]]
    for prompt in hits:
        request = Request(prompt, COUNT)
        check(model, runs, [request])
        assert request.cached_tokens > 40
    check(model, runs, [Request(prompt, COUNT, Sampling(temperature=0.9, seed=1)) for prompt in hits[:4]])


@pytest.mark.parametrize("how", PROPOSERS)
def test_requests_join_and_leave_and_are_cancelled(models, how):
    model = models("gemma3_text")
    random = np.random.default_rng(5)
    runs = engine(model, how)
    requests = [
        Request(prompt_of(seed % 5, 20 + 3 * seed), 8 + seed, Sampling(temperature=seed % 2, seed=seed))
        for seed in range(12)
    ]
    wanted = expected(model, requests)
    if how == "oracle":
        for request, answer in zip(requests, wanted, strict=True):
            runs.speculation.proposer.know(request, answer.tokens)
    waiting = list(requests)
    while waiting or not runs.idle:
        if waiting and random.random() < 0.4:
            runs.submit(waiting.pop(0))
        runs.step()
        assert promised(runs)
        if random.random() < 0.1 and (running := runs.scheduler.running):
            runs.cancel([running[int(random.integers(len(running)))]])
        runs.check_integrity()
    reasons = [request.finish_reason for request in requests]
    assert reasons.count("cancelled") >= 2 and reasons.count("length") >= 4
    for request, answer in zip(requests, wanted, strict=True):
        assert request.tokens == answer.tokens[: len(request.tokens)]
    # What the cancelled ones have left behind is right, too.
    check(model, runs, [Request(answer.prompt + answer.tokens, 6) for answer in wanted])


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("how", PROPOSERS)
def test_in_a_pool_that_evicts_all_the_time(models, name, how):
    model = models(name)
    runs = engine(model, how, kv_memory=160_000, max_batch=2)
    requests = [Request(prompt_of(seed % 3, 50 + seed), 16) for seed in range(9)]
    check(model, runs, requests)
    assert runs.prefix.stats().evicted_blocks > 0


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@pytest.mark.parametrize("how", PROPOSERS)
def test_after_a_restart_from_disk(models, name, how, tmp_path: Path):
    model = models(name)
    disk = {"disk_cache": str(tmp_path), "disk_limit": "64MB", "disk_policy": "write_through"}
    runs = engine(model, how, **disk)
    first = [Request(prompt_of(seed, 60), COUNT) for seed in range(3)]
    check(model, runs, first)
    runs.close()
    runs = engine(model, how, **disk)
    again = [Request(request.prompt + request.tokens + prompt_of(8, 9), COUNT) for request in first]
    check(model, runs, again)
    assert all(request.cached_tokens >= 72 for request in again)
    runs.close()


@pytest.mark.parametrize("how", PROPOSERS)
def test_memory_is_a_flat_line(models, how):
    model = models("llama")
    runs = engine(model, how)
    addresses = [np.array(array, copy=False).ctypes.data for pool in runs.memory.pools for array in pool.arrays()]
    seen = []
    request = Request(prompt_of(1), COUNT)
    (wanted,) = expected(model, [request])
    for _ in range(6):
        check(model, runs, [copy(request), copy(request)], [wanted, wanted])
        gc.collect()
        mx.clear_cache()
        seen.append(mx.get_active_memory())
    assert max(seen[1:]) - min(seen[1:]) < 10_000
    held = [np.array(array, copy=False).ctypes.data for pool in runs.memory.pools for array in pool.arrays()]
    assert held == addresses
    assert not any(pool.reserved for pool in runs.memory.pools)


def test_tokens_that_are_equally_likely_are_told_apart_by_a_step_of_one_token():
    """Every logit is there twice: what is guessed is never sure, and the answer is the same."""
    model = build("llama")
    weight = model.lm_head.weight
    model.lm_head.weight = mx.concatenate([weight[: VOCAB // 2]] * 2)
    runs = engine(model, "oracle")
    requests = [Request(prompt_of(seed), COUNT) for seed in range(2)]
    check(model, runs, requests)
    stats = runs.speculation.stats()
    assert stats.doubtful > 10 and stats.accepted == 0
    assert all(request.accepted == 0 < request.proposed for request in requests)


def test_nothing_is_guessed_where_a_function_of_the_caller_decides(models):
    """It may make another token of the smallest difference."""
    model = models("llama")

    def sharp(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits * 1e6

    requests = [Request(prompt_of(1), COUNT, Sampling(logits_processors=[sharp])), Request(prompt_of(2), COUNT)]
    check(model, engine(model, "adversary"), requests)
    assert requests[0].proposed == 0 < requests[1].proposed


def test_a_model_that_cannot_is_served_without():
    model = build("mamba2")
    runs = engine_of(model, kv_memory="4MB", block_size=BLOCK, max_batch=2, prefill_chunk=48)
    assert runs.speculation is None and "recurrent states" in runs.runner.several.why_not
    run(runs, [Request(prompt_of(1), 4)])


def test_without_a_prefix_cache_nothing_of_a_request_is_kept():
    model = build("llama")
    for cached in (True, False):
        engine = engine_of(model, kv_memory="8MB", block_size=16, max_batch=1, prefix_cache=cached)
        engine.submit(Request([7 * i % 61 + 1 for i in range(40)], 12))
        while not engine.idle:
            engine.step()
        assert (engine.speculation.proposer.nbytes > 0) == cached
