"""Every sampling option by the name that vLLM and mlx-lm users know, on a small random model and the default one."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from architectures import VOCAB, build
from onekv import LLM, Sampling
from onekv.engine import Request
from onekv.engine import sampling as sampling_module
from onekv.engine.sampling import _first_largest, _peaks, sample
from onekv.errors import PromptError, RequestFailedError, SettingError

PROMPT = [int(token) for token in np.random.default_rng(1).integers(1, VOCAB, 20)]
OTHER = [int(token) for token in np.random.default_rng(2).integers(1, VOCAB, 33)]
COUNT = 16


@pytest.fixture(scope="module")
def tiny():
    """Token ids alone."""
    with LLM(build("llama"), kv_memory="1MB", block_size=16) as llm:
        yield llm
        llm.check_integrity()


@pytest.fixture(scope="module")
def smollm(smollm2_path):
    with LLM(kv_memory="64MiB", progress=False) as llm:
        yield llm


def stock(llm, processors, prompt=PROMPT) -> list[int]:
    """What mlx-lm generates with these logits processors."""
    steps = generate_step(mx.array(prompt), llm.model, max_tokens=COUNT, logits_processors=processors)
    return [int(token) for token, _ in steps]


def ours(llm, **options) -> list[int]:
    return llm.generate(PROMPT, COUNT, **options).tokens


def test_repetition_penalty_is_that_of_mlx_lm(tiny):
    expected = stock(tiny, make_logits_processors(repetition_penalty=1.4, repetition_context_size=10**6))
    assert expected != stock(tiny, [])
    assert ours(tiny, repetition_penalty=1.4) == expected


def test_logit_bias_is_that_of_mlx_lm(tiny):
    first, second = stock(tiny, [])[:2]
    bias = {first: -100.0, second: 2.0}
    expected = stock(tiny, make_logits_processors(logit_bias=bias))
    assert first not in expected
    assert ours(tiny, logit_bias=bias) == expected
    assert ours(tiny, logit_bias=tuple(bias.items())) == expected


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_count_the_tokens_of_the_answer(tiny, name):
    def penalize(tokens, logits):
        counts = np.bincount(np.array(tokens)[len(PROMPT) :], minlength=logits.shape[-1])
        return logits - 0.9 * mx.array(counts if name == "frequency_penalty" else np.minimum(counts, 1))

    expected = stock(tiny, [penalize])
    assert expected != stock(tiny, [])
    assert ours(tiny, **{name: 0.9}) == expected


def test_logits_processors_see_what_those_of_mlx_lm_see(tiny):
    seen: dict[str, list] = {"stock": [], "ours": []}

    def rule(who):
        def processor(tokens, logits):
            seen[who].append((tokens.tolist(), logits.shape))
            # Something that depends on all tokens.
            return mx.roll(logits, int(mx.sum(tokens).item()) % 5, axis=-1)

        return processor

    expected = stock(tiny, [rule("stock")])
    assert expected != stock(tiny, [])
    beside = tiny.stream(OTHER, COUNT)
    assert ours(tiny, logits_processors=[rule("ours")]) == expected
    # mlx-lm computes one token more than it gives.
    assert seen["ours"] == seen["stock"][:COUNT]
    beside.close()
    twice = [lambda tokens, logits: logits + 1, lambda tokens, logits: -logits]
    assert ours(tiny, logits_processors=twice) == stock(tiny, twice)


@pytest.mark.parametrize(
    ("processor", "text"),
    [
        (lambda tokens, logits: 1 // 0, "a logits processor failed: ZeroDivisionError"),
        (lambda tokens, logits: None, r"it returned NoneType and must return an array of \(1, \d+\)"),
        (lambda tokens, logits: logits[0], "it returned an array of"),
    ],
)
def test_a_logits_processor_that_fails_ends_its_own_request_alone(tiny, processor, text):
    expected = tiny.generate(OTHER, COUNT).tokens
    beside = tiny.stream(OTHER, COUNT)
    next(beside)
    with pytest.raises(RequestFailedError, match=text):
        ours(tiny, logits_processors=[processor])
    list(beside)
    assert beside.completion.tokens == expected
    tiny.check_integrity()


def test_top_k_of_0_and_of_minus_1_are_all_tokens(tiny):
    hot = {"temperature": 3.0, "seed": 5}
    free = ours(tiny, **hot)
    assert ours(tiny, top_k=0, **hot) == ours(tiny, top_k=-1, **hot) == free
    assert ours(tiny, top_k=1, **hot) == ours(tiny) != free


@pytest.mark.parametrize("option", [{"top_p": 1e-6}, {"min_p": 1.0}])
def test_what_leaves_one_token_is_greedy(tiny, option):
    assert ours(tiny, temperature=3.0, seed=5, **option) == ours(tiny) != ours(tiny, temperature=3.0, seed=5)


def test_a_stop_token_id_ends_the_answer_and_is_its_last_token(tiny):
    free = ours(tiny)
    at = next(index for index in range(3, COUNT) if free[index] not in free[:index])
    completion = tiny.generate(PROMPT, COUNT, stop_token_ids=[free[at]])
    assert completion.tokens == free[: at + 1]
    assert (completion.finish_reason, completion.stopped_by) == ("stop", None)
    late = tiny.generate(PROMPT, COUNT, stop_token_ids=[free[at]], min_tokens=at + 3)
    assert free[at] not in late.tokens[: at + 3] and len(late.tokens) >= at + 3


def test_logprobs_come_with_the_completion(tiny):
    completion = tiny.generate(PROMPT, 5, logprobs=3)
    logits = tiny.model(mx.array([PROMPT + completion.tokens]))[0, len(PROMPT) - 1 : -1].astype(mx.float32)
    wanted = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    for row, (token, got) in enumerate(zip(completion.tokens, completion.logprobs, strict=True)):
        assert got.logprob == pytest.approx(wanted[row, token], abs=1e-4)
        assert [other for other, _ in got.top] == np.argsort(-wanted[row])[:3].tolist()
    assert [len(each.top) for each in tiny.generate(PROMPT, 2, logprobs=0).logprobs] == [0, 0]
    assert tiny.generate(PROMPT, 2).logprobs is None


def test_a_sampling_object_is_the_same_as_keywords(tiny):
    options = {"temperature": 2.0, "seed": 3, "top_k": 40, "max_tokens": 7}
    expected = tiny.generate(PROMPT, **options).tokens
    assert len(expected) == 7
    assert tiny.generate(PROMPT, sampling=Sampling(**options)).tokens == expected
    # A keyword changes one field.
    assert tiny.generate(PROMPT, 4, sampling=Sampling(**options)).tokens == expected[:4]
    assert tiny.generate(PROMPT, sampling=Sampling(**options | {"seed": 9}), seed=3).tokens == expected
    assert len(tiny.generate(PROMPT).tokens) == 256


def test_each_of_several_prompts_may_have_its_own(tiny):
    several = [Sampling(max_tokens=3), Sampling(max_tokens=5, temperature=2.0, seed=1)]
    completions = tiny.generate([PROMPT, OTHER], sampling=several)
    alone = [tiny.generate(prompt, sampling=each) for prompt, each in zip((PROMPT, OTHER), several, strict=True)]
    assert [c.tokens for c in completions] == [c.tokens for c in alone]
    with pytest.raises(SettingError, match="sampling has 2 entries for 3 prompts"):
        tiny.generate([PROMPT, OTHER, PROMPT], sampling=several)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("tempreture", "temperature"),
        ("temp", "temperature"),
        ("stops", "stop"),
        ("top_logprobs", "logprobs"),
        ("max_new_tokens", "max_tokens"),
        ("logit_processors", "logits_processors"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(tiny, wrong, right):
    for call in (tiny.generate, tiny.stream):
        with pytest.raises(SettingError, match=rf"unknown option '{wrong}'; available: .*; did you mean {right}\?$"):
            call(PROMPT, **{wrong: 1})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"temperature": float("nan")}, "temperature is nan; it must be at least 0"),
        ({"top_k": -2}, "top_k is -2; it must be at least -1"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be a whole number"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, more than max_tokens, which is 8"),
        ({"logprobs": True}, "logprobs is True; it must be a whole number"),
        ({"logprobs": -1}, "logprobs is -1; it must be at least 0"),
        ({"stop": 5}, "stop is 5; it must be a string, or several"),
        ({"stop": ["a", 5]}, "it must be a string, or several"),
        ({"stop_token_ids": ["a"]}, "it must be a list of token ids"),
        ({"stop_token_ids": [10**6]}, f"stop_token_ids has token id 1000000; the model knows ids 0 to {VOCAB - 1}"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias has token id -1; the model knows"),
        ({"logit_bias": {"a": 1.0}}, "it must be numbers by token id"),
        ({"logit_bias": {1: float("inf")}}, "each bias must be a number, or -inf"),
        ({"logits_processors": [5]}, "it must be a list of functions"),
        ({"sampling": 5}, "sampling is 5; it must be a Sampling"),
    ],
)
def test_values_that_cannot_be_used_are_refused(tiny, options, text):
    with pytest.raises(SettingError, match=text):
        tiny.generate(PROMPT, **options)
    assert tiny.engine.idle


def test_stop_strings_end_the_text_before_them(smollm):
    prompt = "Count: one, two, three,"
    free = smollm.generate(prompt, 24)
    stop = free.text[9:13]
    cut = free.text[: free.text.index(stop)]
    for given in (stop, [stop], ("never in it", stop)):
        completion = smollm.generate(prompt, 24, stop=given)
        assert (completion.text, completion.finish_reason, completion.stopped_by) == (cut, "stop", stop)
        assert len(completion.tokens) < 24
    # The others of a batch end at theirs, too, whichever is read first.
    both = smollm.generate(["Once upon a time", prompt], 24, stop=stop)
    assert both[1].text == cut and len(both[1].tokens) < 24
    assert "".join(smollm.stream(prompt, 24, stop=stop)) == cut


def test_ignore_eos_goes_on_and_min_tokens_puts_it_off(smollm):
    messages = [{"role": "user", "content": "What is the capital of France? One word."}]
    short = smollm.chat(messages, 40)
    assert short.finish_reason == "stop"
    on = smollm.chat(messages, 40, ignore_eos=True)
    assert (on.finish_reason, len(on.tokens)) == ("length", 40)
    assert on.tokens[: len(short.tokens)] == short.tokens
    assert "<|im_end|>" not in on.text
    least = len(short.tokens) + 4
    late = smollm.chat(messages, 40, min_tokens=least)
    assert len(late.tokens) >= least
    assert not smollm.stop_tokens & set(late.tokens[:least])


def test_chat_template_kwargs_reach_the_template(smollm):
    messages = [{"role": "user", "content": "Hi"}]
    template = {"chat_template": "{{ greeting }} {{ messages[0].content }}", "greeting": "Well,"}
    tokens = smollm.tokenizer.encode("Well, Hi")
    assert smollm.chat_tokens(messages, template) == tokens
    for completion in (
        smollm.chat(messages, 3, chat_template_kwargs=template),
        (stream := smollm.stream_chat(messages, 3, chat_template_kwargs=template), list(stream))[0].completion,
    ):
        assert completion.prompt_tokens == len(tokens)
    with pytest.raises(SettingError, match="chat_template_kwargs is 5"):
        smollm.chat(messages, chat_template_kwargs=5)
    broken = {"chat_template": "{{ raise_exception('roles must alternate') }}"}
    with pytest.raises(PromptError, match="does not accept these messages: roles must alternate"):
        smollm.chat(messages, chat_template_kwargs=broken)


@pytest.mark.parametrize("vocabulary", [128, 100, 97, 32 * 50])
def test_the_largest_logit_is_found_part_by_part(vocabulary):
    """As MLX finds it in the whole row: of equal ones the first."""
    mx.random.seed(vocabulary)
    # Few different numbers, so that many are the largest.
    logits = mx.random.randint(0, 4, (40, vocabulary)).astype(mx.bfloat16)
    assert mx.array_equal(_first_largest(logits, _peaks(logits)), mx.argmax(logits, axis=-1))
    logits[3, vocabulary // 2] = mx.nan
    assert mx.isnan(_peaks(logits).max(axis=-1)).tolist() == [row == 3 for row in range(40)]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"logprobs": 0},
        {"logit_bias": {5: 100.0}},
        {"min_tokens": 2},
        {"presence_penalty": 9.0},
    ],
    ids=str,
)
def test_the_likeliest_tokens_are_found_at_once_on_a_gpu(monkeypatch, sampling):
    """If no row wants more than that; then as by all that the others may want."""
    mx.random.seed(0)
    logits = mx.random.normal((4, 64)).astype(mx.bfloat16)
    logits[2, 7] = mx.nan
    requests = [Request([1, 2], 5, sampling=Sampling(**some)) for some in ({}, {}, {}, sampling)]
    for request in requests:
        request.tokens.append(3)
        request.stop_at({9})
    at_once = []
    monkeypatch.setattr(
        sampling_module, "_likeliest", lambda logits: at_once.append(1) or sampling_module._find_likeliest(logits)
    )
    expected = sample(logits, requests, [1] * 4)
    monkeypatch.setattr(sampling_module, "kind", lambda: "cuda")
    found = sample(logits, requests, [1] * 4)
    assert found.sound.tolist() == expected.sound.tolist() == [True, True, False, True]
    sound = mx.array([0, 1, 3])
    assert mx.array_equal(found.tokens[sound], expected.tokens[sound])
    assert len(at_once) == (sampling == {})
