"""What lossy formats promise after a hit (docs/formats.md), on the default model."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from extended_hits import FIRST, MODEL, apart, difference, longer_of, prompts_of, run
from onekv import LLM
from onekv.engine import Request

PROMPTS = 4
# Log probabilities of the two likeliest tokens that are further apart than this keep their order.
CLEAR = 0.5


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(MODEL, kv_memory="32MB", prefix_cache=False, progress=False) as llm:
        yield llm


def opened(plain: LLM, kv_format: str, **more: Any) -> LLM:
    settings = {"kv_format": kv_format, "kv_memory": "32MB", "block_size": 16, "max_batch": 4, "progress": False}
    return LLM(plain.model, tokenizer=plain.tokenizer, **settings, **more)


def mean_error(found: list[Request], wanted: list[Request]) -> float:
    """The root mean square difference of log probabilities at the first token."""
    apart_by = [number for pair in zip(found, wanted, strict=True) for number in apart(*pair)]
    return float(np.sqrt(np.mean(np.square(apart_by))))


def test_the_same_prompt_again_gives_the_same_bits(plain):
    (prompt,) = prompts_of(plain, 1)
    with opened(plain, "q4") as warm:
        first, again = run(warm, [prompt, prompt], 6)
    assert first.cached_tokens == 0 and again.cached_tokens == len(prompt) - 1
    assert again.tokens == first.tokens
    assert [own.top for own in again.logprobs] == [own.top for own in first.logprobs]


@pytest.mark.parametrize("kv_format", ["q4", "k8v4"])
def test_an_extended_hit_is_nearer_to_an_uncached_run_than_that_is_to_plain_kv(kv_format, plain):
    prompts = prompts_of(plain, PROMPTS)
    with opened(plain, kv_format) as warm:
        longer = longer_of(plain, run(warm, prompts, FIRST, together=True))
        hits = run(warm, longer, 2, together=True)
    assert all(request.cached_tokens > len(prompt) for request, prompt in zip(hits, prompts, strict=True))
    with opened(plain, kv_format, prefix_cache=False) as cold:
        uncached = run(cold, longer, 2, together=True)
    assert mean_error(hits, uncached) < mean_error(uncached, run(plain, longer, 1))
    for pair in zip(hits, uncached, strict=True):
        found = difference(*pair)
        assert found.at is None or found.margin < CLEAR
