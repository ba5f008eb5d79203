"""What a user is told of speculation, and what a prediction does: more is guessed, and the answer is the same."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from architectures import build
from onekv import LLM, AsyncLLM, Completion
from onekv.config import Settings
from onekv.engine import Engine, Request, Sampling
from onekv.engine.speculation.log import Match
from onekv.engine.speculation.lookup import Lookup
from onekv.engine.view import look, read_stats
from onekv.errors import PromptError, SettingError
from onekv.memory.plan import make_plan
from stock import small_llama

PROMPT = np.random.default_rng(1).permutation(128)[:40].tolist()
COUNT = 48
# The likeliest tokens of a random model repeat.
DRAWN = Sampling(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def model() -> Any:
    return small_llama(5, num_hidden_layers=2, intermediate_size=64, num_key_value_heads=4, head_dim=16)


def engine_of(model: Any, stop_tokens: tuple[int, ...] = (), **settings: Any) -> Engine:
    """One for which all steps take the same time: what is guessed does not depend on how fast it is."""
    chosen = Settings(**{"kv_memory": "8MB", "max_batch": 2, "prefill_chunk": 64, **settings})
    plan = make_plan(model, chosen, None)
    return Engine(model, plan, set(stop_tokens), chosen, now=lambda: 0.0)


def run(engine: Engine, request: Request) -> Request:
    engine.submit(request)
    while not engine.idle:
        engine.step()
    engine.check_integrity()
    return request


def answer(model: Any, **options: Any) -> list[int]:
    """Without speculation."""
    request = run(engine_of(model, speculate="off"), Request(PROMPT, COUNT, **options))
    assert request.proposed == request.accepted == 0
    return request.tokens


# What cannot be


@pytest.mark.parametrize("name", ["mamba2", "gemma2"])
def test_lookup_by_name_is_refused_with_the_reason(name):
    engine = engine_of(build(name))
    reason = engine.unspeculated
    assert engine.speculation is None and reason == engine.runner.several.why_not is not None
    with pytest.raises(SettingError) as caught:
        engine_of(build(name), speculate="lookup")
    assert str(caught.value).startswith(f"--speculate is 'lookup', which is not possible here: {reason}; auto ")


def test_an_llm_of_a_recurrent_model_runs_with_auto_and_is_refused_with_lookup():
    with LLM(build("mamba2"), kv_memory="8MB") as llm:
        completion = llm.generate(PROMPT, max_tokens=4)
        assert (completion.proposed_tokens, completion.accepted_tokens) == (0, 0)
        stats = llm.stats()
        assert stats.speculation is None
        assert stats.unspeculated == "the model has recurrent states, which cannot be rolled back"
        assert "  no speculation: the model has recurrent states" in repr(stats)
    with pytest.raises(SettingError, match=r"--speculate is 'lookup'.*recurrent states"):
        LLM(build("mamba2"), kv_memory="8MB", speculate="lookup")


def test_off_says_so(model):
    stats = read_stats(engine_of(model, speculate="off"))
    assert (stats.speculation, stats.unspeculated) == (None, "--speculate is off")


# What is counted


def test_stats_requests_and_completions_count_the_same(model):
    engine = engine_of(model)
    first = run(engine, Request(PROMPT, COUNT))
    second = run(engine, Request(PROMPT, COUNT))
    assert first.tokens == second.tokens
    assert 0 < second.accepted <= second.proposed and second.accepted < COUNT
    stats = read_stats(engine)
    assert stats.speculation is not None and stats.unspeculated is None
    assert stats.speculation.proposed == first.proposed + second.proposed
    assert stats.speculation.accepted == first.accepted + second.accepted
    shown = f"  speculation: {stats.speculation.accepted:,} of {stats.speculation.proposed:,} proposed tokens accepted"
    assert shown in repr(stats)


def test_a_running_request_shows_its_guesses(model):
    engine = engine_of(model)
    expected = run(engine, Request(PROMPT, COUNT))
    request = Request(PROMPT, COUNT)
    engine.submit(request)
    while not request.accepted:
        engine.step()
    (view,) = look(engine).requests
    assert (view.proposed_tokens, view.accepted_tokens) == (request.proposed, request.accepted)
    while not engine.idle:
        engine.step()
    assert request.tokens == expected.tokens


def test_what_is_behind_the_end_of_an_answer_is_not_accepted(model):
    """The prediction is right, and goes on behind the token that ends the answer."""
    whole = answer(model, sampling=DRAWN)
    end = next(token for token in whole[4:] if whole.index(token) >= 4)
    request = run(engine_of(model, (end,)), Request(PROMPT, COUNT, DRAWN, prediction=whole))
    assert request.tokens == whole[: whole.index(end) + 1]
    assert request.finish_reason == "stop"
    assert 0 < request.accepted <= len(request.tokens)


# Predictions


@pytest.mark.parametrize("sampling", [DRAWN, replace(DRAWN, min_p=0.01, top_k=100), Sampling(frequency_penalty=2.0)])
def test_a_right_prediction_is_accepted_and_a_wrong_one_changes_nothing(model, sampling):
    expected = answer(model, sampling=sampling)
    wrong = [(token + 1) % 128 for token in expected]
    half = expected[: COUNT // 2] + wrong[COUNT // 2 :]
    accepted = []
    for prediction in ([], wrong, half, expected):
        request = run(engine_of(model), Request(PROMPT, COUNT, sampling, prediction=prediction))
        assert request.tokens == expected
        accepted.append(request.accepted)
    assert accepted[0] < accepted[2] < accepted[3] and accepted[3] > COUNT // 2


def test_a_prediction_is_of_its_own_request_alone():
    lookup = Lookup()
    request = Request([1, 2, 3], 10, prediction=[4, 5, 6, 7])
    assert lookup.propose(request, 3) == Match(3, [4, 5, 6])
    request.tokens += [4, 5, 6]
    assert lookup.propose(request, 3) == Match(6, [7])
    lookup.learn(request)
    lookup.forget(request)
    assert lookup.propose(Request([1, 2, 3, 4, 5, 6], 10), 3) is None


def test_a_request_with_a_prediction_is_followed_token_by_token():
    lookup, request = Lookup(), Request([9, 1, 2, 3, 8], 10, prediction=[1, 2, 3, 4, 5])
    assert lookup.propose(request, 2) == Match(5, [1, 2])
    for token in (1, 2, 3):
        request.tokens.append(token)
        assert lookup.propose(request, 2) == Lookup().propose(request, 2)
    assert lookup.propose(request, 2) == Match(8, [4, 5])


def test_token_ids_of_a_prediction_are_checked(model):
    with pytest.raises(PromptError, match="token id 128 of the prediction is out of range"):
        engine_of(model).submit(Request(PROMPT, 4, prediction=[1, 128]))


@pytest.fixture(scope="module")
def llm(smollm2_path):
    with LLM(str(smollm2_path), kv_memory="64MiB", prefix_cache=False) as llm:
        llm.engine.now = lambda: 0.0
        yield llm


QUESTION = "Write down the names of the planets in order, starting at the sun:"


def test_the_library_takes_a_prediction_as_text_or_tokens(llm):
    plain = llm.generate(QUESTION, max_tokens=24)
    for prediction in (plain.text, plain.tokens):
        told = llm.generate(QUESTION, max_tokens=24, salt=str(type(prediction)), prediction=prediction)
        assert told.tokens == plain.tokens
        assert plain.accepted_tokens < told.accepted_tokens <= told.proposed_tokens
    for nothing in (None, "", []):
        assert llm.generate(QUESTION, max_tokens=4, prediction=nothing).tokens == plain.tokens[:4]


def test_a_stop_string_ends_an_answer_at_the_same_token(llm):
    """The prediction is right, and goes on behind the stop string: a step gives tokens on both sides of it."""
    whole = llm.generate(QUESTION, max_tokens=24, salt="whole", logprobs=0)
    stop = whole.text[20:23]
    plain, told = (
        llm.generate(QUESTION, max_tokens=24, salt=salt, stop=stop, logprobs=0, prediction=prediction)
        for salt, prediction in (("plain", ""), ("told", whole.text))
    )
    assert plain.accepted_tokens == 0 < told.accepted_tokens <= len(told.tokens) < 20
    assert (told.text, told.tokens, told.stopped_by) == (plain.text, plain.tokens, stop)
    assert len(told.logprobs) == len(told.tokens)


def test_predictions_of_several_prompts(llm):
    prompts = [QUESTION, "The capital of France is"]
    plain = llm.generate(prompts, max_tokens=12, salt="a")
    told = llm.generate(prompts, max_tokens=12, salt="b", prediction=["", plain[1].text])
    assert [each.tokens for each in told] == [each.tokens for each in plain]
    with pytest.raises(SettingError, match="prediction has 1 entries for 2 prompts; pass one, or one for each"):
        llm.generate(prompts, prediction=["one"])
    with pytest.raises(PromptError, match="the prediction is 5; it must be text or a list of token ids"):
        llm.generate(QUESTION, prediction=5)


def test_in_an_event_loop(smollm2_path):
    async def ask() -> list[Completion]:
        async with AsyncLLM(str(smollm2_path), kv_memory="64MiB") as llm:
            await llm.call(lambda llm: setattr(llm.engine, "now", lambda: 0.0))
            plain = await llm.generate(QUESTION, max_tokens=16, salt="a")
            return [plain, await llm.generate(QUESTION, max_tokens=16, salt="b", prediction=plain.text)]

    plain, told = asyncio.run(ask())
    assert told.tokens == plain.tokens and told.accepted_tokens > plain.accepted_tokens
