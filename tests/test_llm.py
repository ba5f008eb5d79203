"""The library's front on the real default model: same tokens as mlx-lm, clear errors, nothing left behind."""

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from onekv import LLM, OneKVError
from onekv.errors import MemoryBudgetError, PromptError, SettingError, TooLongError
from onekv.llm import Freed, Probe
from onekv.memory.pool import IntegrityError

PROMPTS = (
    "The capital of France is",
    "Write a short poem about the sea.\n",
    "def fibonacci(n):\n",
    "Q: What is 17 + 25?\nA:",
    "Once upon a time, in a village at the foot of a mountain, there lived an old clockmaker who",
)


@pytest.fixture(scope="module")
def llm(smollm2_path):
    with LLM(kv_memory="128MiB", progress=False) as llm:
        yield llm
        llm.check_integrity()


def mlx_lm_tokens(llm: LLM, prompt: list[int], count: int) -> list[int]:
    tokens = []
    for token, _ in generate_step(mx.array(prompt), llm.model, max_tokens=count):
        tokens.append(int(token))
        if token in llm.stop_tokens:
            break
    return tokens


def test_greedy_tokens_equal_mlx_lm(llm):
    """One by one and as a batch; 32 tokens each."""
    expected = [mlx_lm_tokens(llm, llm.tokenizer.encode(prompt), 32) for prompt in PROMPTS]
    assert [llm.generate(prompt, max_tokens=32).tokens for prompt in PROMPTS] == expected
    assert [c.tokens for c in llm.generate(list(PROMPTS), max_tokens=32)] == expected


def test_completion_tells_what_happened(llm):
    completion = llm.generate("The capital of France is", max_tokens=5)
    assert completion.finish_reason == "length"
    assert len(completion.tokens) == 5
    assert completion.prompt_tokens == len(llm.tokenizer.encode("The capital of France is"))
    assert completion.text == llm.tokenizer.decode(completion.tokens)
    assert completion.timings.first_token >= completion.timings.prefill > 0
    assert completion.timings.decode > 0


def test_stop_token_ends_the_answer_and_is_not_in_the_text(llm):
    completion = llm.chat([{"role": "user", "content": "What is the capital of France? One word."}], max_tokens=40)
    assert completion.finish_reason == "stop"
    assert completion.tokens[-1] in llm.stop_tokens
    assert "Paris" in completion.text
    assert "<|im_end|>" not in completion.text


def test_stream_gives_the_same_text_piece_by_piece(llm):
    whole = llm.generate(PROMPTS[1], max_tokens=24)
    # Under another salt nobody has given this answer before, of which several tokens could be guessed at once.
    stream = llm.stream(PROMPTS[1], max_tokens=24, salt="another")
    pieces = list(stream)
    assert len(pieces) > 5
    assert "".join(pieces) == whole.text
    assert stream.completion.tokens == whole.tokens


def test_streams_may_be_read_in_turns(llm):
    expected = [llm.generate(prompt, max_tokens=12).text for prompt in PROMPTS[:2]]
    first, second = (llm.stream(prompt, max_tokens=12) for prompt in PROMPTS[:2])
    texts = ["", ""]
    for _ in range(40):
        texts[0] += next(first, "")
        texts[1] += next(second, "")
    assert texts == expected


def test_closing_a_stream_releases_everything(llm):
    stream = llm.stream(PROMPTS[4], max_tokens=64)
    next(stream)
    assert llm.stats().pools[0].held > 0
    stream.close()
    assert stream.completion.finish_reason == "cancelled"
    assert llm.stats().pools[0].held == 0
    assert llm.stats().pools[0].reserved == 0
    llm.check_integrity()


def test_a_seed_makes_sampling_repeatable_beside_others(llm):
    options = {"max_tokens": 12, "temperature": 0.9, "top_p": 0.95, "top_k": 50}
    alone = llm.generate(PROMPTS[0], seed=7, **options).tokens
    assert llm.generate(PROMPTS[0], seed=7, **options).tokens == alone
    beside = llm.stream(PROMPTS[3], max_tokens=30, temperature=1.0, seed=3)
    next(beside)
    assert llm.generate(PROMPTS[0], seed=7, **options).tokens == alone
    beside.close()
    others = [llm.generate(PROMPTS[0], seed=seed, **options).tokens for seed in range(5)]
    assert len({tuple(tokens) for tokens in others}) > 1


def test_more_prompts_than_fit_wait_their_turn(llm):
    prompts = [f"{PROMPTS[i % 5]} {i}" for i in range(2 * llm.settings.max_batch + 1)]
    completions = llm.generate(prompts, max_tokens=4)
    assert [c.tokens for c in completions[:3]] == [llm.generate(p, max_tokens=4).tokens for p in prompts[:3]]
    assert all(len(c.tokens) == 4 or c.finish_reason == "stop" for c in completions)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "text"),
    [
        ("", {}, PromptError, "the prompt is empty"),
        ("a\udcffb", {}, PromptError, "lone surrogate"),
        ([], {}, PromptError, "the prompt is empty"),
        ([5, 10**6], {}, PromptError, "token id 1000000 is out of range: the model knows ids 0 to 49151"),
        ([-1], {}, PromptError, "token id -1 is out of range"),
        ([1] * 5000, {}, MemoryBudgetError, "the prompt has 5000 tokens .* raise --kv-memory"),
        ([1.5], {}, PromptError, "the prompt is .*1.5.*; it must be text or a list of token ids"),
        (7, {}, PromptError, "the prompt is 7; it must be text or a list of token ids"),
        (b"Hi", {}, PromptError, "the prompt is b'Hi'; it must be text or a list of token ids"),
        ("Hi", {"max_tokens": 0}, PromptError, "max_tokens is 0"),
        ("Hi", {"max_tokens": -1}, PromptError, "max_tokens is -1; it must be at least 1"),
        ("Hi", {"max_tokens": 1.5}, SettingError, "--max-tokens is 1.5; it must be a whole number"),
        ("Hi", {"temperature": -1}, SettingError, "temperature is -1"),
        ("Hi", {"top_p": 0}, SettingError, "top_p is 0"),
        ("Hi", {"tempreture": 1}, SettingError, "unknown option 'tempreture'"),
    ],
)
def test_bad_requests_are_refused_and_the_next_is_served(llm, prompt, options, error, text):
    with pytest.raises(error, match=text):
        llm.generate(prompt, **options)
    with pytest.raises(error, match=text):
        llm.stream(prompt, **options)
    assert llm.generate("Hi", max_tokens=2).tokens
    llm.check_integrity()


def test_one_bad_prompt_of_a_list_starts_none(llm):
    with pytest.raises(PromptError):
        llm.generate(["Hello", ""], max_tokens=2)
    assert llm.engine.idle


def test_a_closed_llm_says_so(smollm2_path):
    llm = LLM(kv_memory="32MiB", progress=False)
    llm.close()
    llm.close()
    with pytest.raises(OneKVError, match="closed"):
        llm.generate("Hi")


def test_a_model_object_with_its_tokenizer(llm):
    expected = llm.generate(PROMPTS[0], max_tokens=3)
    # mlx-lm's wrapper, or what it wraps.
    for tokenizer in (llm.tokenizer, llm.tokenizer._tokenizer):
        with LLM(llm.model, tokenizer=tokenizer, kv_memory="32MiB") as other:
            completion = other.generate(PROMPTS[0], max_tokens=3)
            assert (completion.tokens, completion.text) == (expected.tokens, expected.text)


@pytest.mark.parametrize("kv_format", ["auto", "q4"])
def test_a_model_object_without_a_tokenizer_takes_token_ids(llm, kv_format):
    prompt = llm.tokenizer.encode(PROMPTS[0])
    with LLM(llm.model, kv_memory="32MiB", kv_format=kv_format) as bare:
        whole = bare.generate(prompt, max_tokens=6)
        if kv_format == "auto":
            assert whole.tokens == llm.generate(prompt, max_tokens=6).tokens
        assert (whole.text, len(whole.tokens), whole.finish_reason) == ("", 6, "length")
        assert [c.tokens for c in bare.generate([prompt, prompt], max_tokens=6)] == [whole.tokens] * 2
        stream = bare.stream(prompt, max_tokens=6, salt="another")
        seen = [list(stream.completion.tokens) for piece in stream if piece == ""]
        assert len(seen) > 3
        assert seen[-1] == whole.tokens
        for call in (bare.generate, bare.stream):
            with pytest.raises(PromptError, match=r"a text prompt needs the model's tokenizer; pass tokenizer=\.\.\."):
                call(PROMPTS[0])
        for call in (bare.chat, bare.stream_chat):
            with pytest.raises(PromptError, match=r"messages need the model's tokenizer; pass tokenizer=\.\.\."):
                call([{"role": "user", "content": "Hi"}])


def test_a_model_may_be_a_path(smollm2_path, llm):
    with LLM(Path(smollm2_path), kv_memory="32MiB", progress=False) as other:
        assert other.generate(PROMPTS[0], max_tokens=2).tokens == llm.generate(PROMPTS[0], max_tokens=2).tokens
    for wrong in (None, 5, b"smollm2-135m"):
        with pytest.raises(SettingError, match="it must be a name, a path or an mlx-lm model"):
            LLM(wrong)


def test_token_ids_of_any_integer_type(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    expected = llm.generate(ids, max_tokens=2).tokens
    for prompt in (tuple(ids), np.array(ids), list(np.array(ids))):
        assert llm.generate(prompt, max_tokens=np.int32(2)).tokens == expected


def test_the_models_context_is_the_limit(smollm2_path):
    """A pool that holds more than the model was made for does not make it longer."""
    with LLM(kv_memory="400MiB", progress=False) as roomy:
        context = roomy.context
        assert context < roomy.plan.longest
        text = f"has {context - 8} tokens and max_tokens is 10: {context + 1} tokens in all, .* context is {context};"
        prompt = [1] * (context - 8)
        for call in (roomy.generate, roomy.stream):
            with pytest.raises(TooLongError, match=text):
                call(prompt, max_tokens=10)
        with pytest.raises(TooLongError, match=f"context is {context};"):
            roomy.chat([{"role": "user", "content": "word " * context}], max_tokens=1)
        with pytest.raises(TooLongError, match=text):
            roomy.generate([[1, 2], prompt], max_tokens=10)
        assert roomy.engine.idle
        roomy.stream(prompt, max_tokens=9).close()
        # Cut to what is kept, a conversation may go on for ever.
        with LLM(roomy.model, kv_memory="32MiB", max_kv_size=64) as ring:
            ring.context = context
            ring.stream(prompt, max_tokens=10).close()


@pytest.mark.parametrize("how", ["generate", "stream", "closed stream"])
def test_with_check_integrity_all_blocks_are_counted_after_a_call(llm, how):
    """On in all tests; a block that nobody holds is noticed by the next call, and only where it is on."""
    for on in (True, False):
        other = LLM(llm.model, tokenizer=llm.tokenizer, kv_memory="32MiB", check_integrity=on)
        other.engine.memory.pools[0].reserve(1)
        other.engine.memory.pools[0].take(1, None, 0)

        def call(other=other) -> None:
            if how == "generate":
                other.generate("Hi", max_tokens=2)
                return
            stream = other.stream("Hi", max_tokens=4)
            next(stream)
            stream.close() if how == "closed stream" else list(stream)

        if on:
            with pytest.raises(IntegrityError):
                call()
        else:
            call()
    assert llm.settings.check_integrity


def test_a_batch_streams_with_the_index_of_each_prompt(llm):
    expected = [completion.text for completion in llm.generate(list(PROMPTS[:3]), max_tokens=10)]
    batch = llm.stream(list(PROMPTS[:3]), max_tokens=10, salt="another")
    texts, order = ["", "", ""], []
    for index, delta in batch:
        texts[index] += delta
        order.append(index)
    assert texts == expected == [completion.text for completion in batch.completions]
    # The first has not ended when the last begins.
    assert len(order) - 1 - order[::-1].index(0) > order.index(2)
    with llm.stream(list(PROMPTS[:3]), max_tokens=64) as batch:
        next(batch)
    assert [completion.finish_reason for completion in batch.completions] == ["cancelled"] * 3
    assert llm.stats().pools[0].held == 0


def test_closing_the_llm_ends_its_streams(llm):
    other = LLM(llm.model, tokenizer=llm.tokenizer, kv_memory="32MiB")
    stream = other.stream(PROMPTS[0], max_tokens=64)
    text = next(stream)
    other.close()
    assert "".join([text, *stream]) == stream.completion.text
    assert stream.completion.finish_reason == "cancelled"
    stream.close()


def test_a_probe_says_what_is_cached_and_clearing_what_was_freed(llm):
    with LLM(llm.model, tokenizer=llm.tokenizer, kv_memory="32MiB", block_size=16) as other:
        prompt = list(range(100, 150))
        assert other.probe(prompt) == Probe(50, 0, 0, "never seen")
        completion = other.generate(prompt, max_tokens=2)
        assert completion.cached_tokens == 0
        found = other.probe([*prompt, 7, 8])
        assert (found.tokens, found.cached, found.cached_in_memory) == (52, 50, 50)
        assert other.probe(prompt, salt="another").cached == 0
        pool = other.stats().pools[0]
        freed = other.clear_cache()
        assert freed == Freed(pool.idle, pool.idle * pool.block_bytes)
        assert freed.blocks == 4
        assert other.probe(prompt).cached == 0
        assert other.clear_cache() == Freed(0, 0)
    with LLM(llm.model, tokenizer=llm.tokenizer, kv_memory="32MiB", prefix_cache=False) as other:
        assert other.probe("Hello").reason == "the prefix cache is off"
        assert other.clear_cache() == Freed(0, 0)


def test_reprs_fit_a_notebook(llm):
    assert re.fullmatch(r"LLM\(smollm2-135m, KV pool [\d.]+ MiB for 2,880 tokens, 8 at a time, on .+\)", repr(llm))
    completion = llm.generate(PROMPTS[4], max_tokens=40)
    shown = repr(completion)
    assert shown.startswith("Completion('") and len(shown) < 160
    assert re.search(r"40 tokens, length, after \d+(, \d+ of them cached)?\)$", shown)
    stats = repr(llm.stats())
    assert 3 < len(stats.splitlines()) < 7
    assert all(len(line) < 120 for line in stats.splitlines())
    for text in ("0 running, 0 waiting", "KV pool ", "full attention: 45 blocks of 2.81 MiB: 0 held", "tokens reused"):
        assert text in stats
    closed = LLM(llm.model, kv_memory="32MiB")
    closed.close()
    assert repr(closed) == "LLM(mlx_lm.models.llama, closed)"
