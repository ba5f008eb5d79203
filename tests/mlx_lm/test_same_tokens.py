"""Whole generations with mlx-lm's own functions: with OneKV's classes installed the tokens are the same."""

import importlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as caches

from architectures import build
from onekv.mlx_lm import BatchKVCache, BatchRotatingKVCache, KVCache, LRUPromptCache, RotatingKVCache, installed
from onekv.mlx_lm.slabs import SLABS
from onekv.models import load_model

# Dense, windows, hybrid; then keys and values of two widths, sinks, shared layers and lists of caches.
MODELS = ["llama", "gemma3_text", "qwen3_next"]
MORE = ["deepseek_v3", "gpt_oss", "gemma3n", "gemma4_text", "falcon_h1", "gemma2", "recurrent_gemma", "minimax_m3_vl"]


def module() -> Any:
    """The package has a function of the same name."""
    return importlib.import_module("mlx_lm.generate")


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 128, length).tolist()


def both(run: Callable[[], Any]) -> tuple[Any, Any]:
    stock = run()
    assert caches.KVCache is not KVCache
    with installed():
        assert caches.KVCache is KVCache
        ours = run()
    return stock, ours


def generated(model: Any, tokens: list[int], count: int, **options: Any) -> list[int]:
    steps = module().generate_step(mx.array(tokens), model, max_tokens=count, **options)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("name", MODELS + MORE)
@pytest.mark.parametrize("chunk", [2048, 24])
def test_one_sequence(name: str, chunk: int) -> None:
    model = build(name)
    stock, ours = both(lambda: generated(model, prompt(90), 120, prefill_step_size=chunk))
    assert ours == stock


def test_stream_generate_of_the_default_model(smollm2_path: Any) -> None:
    loaded = load_model(str(smollm2_path))

    def run() -> list[tuple[int, str]]:
        pieces = module().stream_generate(loaded.model, loaded.tokenizer, "The three largest rivers are", max_tokens=24)
        return [(piece.token, piece.text) for piece in pieces]

    stock, ours = both(run)
    assert ours == stock and len(ours) == 24


@pytest.mark.parametrize("name", MODELS)
def test_a_maximum_size(name: str) -> None:
    model = build(name)
    if hasattr(model, "make_cache"):
        made = [RotatingKVCache(64, 4) for _ in model.layers]
        if not all(isinstance(cache, caches.KVCache) for cache in caches.make_prompt_cache(model)):
            pytest.skip("the model chooses its caches")
        stock = generated(model, prompt(50), 100, prompt_cache=[caches.RotatingKVCache(64, 4) for _ in model.layers])
        assert generated(model, prompt(50), 100, prompt_cache=made) == stock


@pytest.mark.parametrize("name", [*MODELS, "deepseek_v3", "falcon_h1", "gpt_oss"])
def test_turns_of_a_conversation(name: str) -> None:
    """Each turn is fetched from the prompt cache, continued and stored again; small chunks make several slabs."""
    model = build(name)

    def run() -> list[list[int]]:
        index = caches.LRUPromptCache()
        tokens, answers = prompt(70), []
        for turn in range(5):
            found, rest = index.fetch_nearest_cache("model", tokens)
            found = found or caches.make_prompt_cache(model)
            answers.append(generated(model, rest, 40, prompt_cache=found, prefill_step_size=16))
            tokens = tokens + answers[-1]
            index.insert_cache("model", tokens, found)
            del found
            tokens = tokens + prompt(30, turn + 1)
        return answers

    stock, ours = both(run)
    assert ours == stock


def batched(model: Any, arrivals: dict[int, list[tuple[list[int], int]]], **options: Any) -> dict[int, list[int]]:
    """The tokens of every sequence; `arrivals` says which prompts (and how many tokens of them) come at which step."""
    generator = module().BatchGenerator(model, **options)
    answers: dict[int, list[int]] = {}
    step = finished = 0
    while finished < len(counts(arrivals)):
        for tokens, count in arrivals.get(step, []):
            (uid,) = generator.insert([tokens], [count])
            answers[uid] = []
        step += 1
        for response in generator.next()[1]:
            answers[response.uid].append(response.token)
        finished = sum(len(answers.get(uid, [])) >= count for uid, count in enumerate(counts(arrivals)))
    generator.close()
    return answers


def counts(arrivals: dict[int, list[tuple[list[int], int]]]) -> list[int]:
    return [count for step in sorted(arrivals) for _, count in arrivals[step]]


@pytest.mark.parametrize("name", [*MODELS, "deepseek_v3", "falcon_h1", "gpt_oss", "recurrent_gemma"])
@pytest.mark.parametrize("chunk", [2048, 10])
def test_a_batch_that_others_join_and_leave(name: str, chunk: int) -> None:
    model = build(name)
    arrivals = {
        0: [(prompt(20, 1), 60), (prompt(45, 2), 20)],
        7: [(prompt(3, 3), 40)],
        15: [(prompt(80, 4), 25), (prompt(31, 5), 30), (prompt(2, 6), 50)],
    }
    stock, ours = both(lambda: batched(model, arrivals, prefill_step_size=chunk, prefill_batch_size=2))
    assert ours == stock


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_speculative_decoding(name: str) -> None:
    model, draft = build(name), build(name)
    # Right now and then.
    draft.apply(lambda weight: weight * 1.02 if weight.ndim > 1 else weight)
    length = 20 if name == "gemma3_text" else 60

    def run() -> list[int]:
        steps = module().speculative_generate_step(
            mx.array(prompt(length // 2)), model, draft, max_tokens=length // 4, num_draft_tokens=3
        )
        return [int(token) for token, *_ in steps]

    stock, ours = both(run)
    assert ours == stock
    assert len(ours) == length // 4


def test_quantized_kv() -> None:
    model = build("llama")
    options = {"kv_bits": 8, "kv_group_size": 16, "quantized_kv_start": 40}
    if model.layers[0].self_attn.head_dim % 32:
        pytest.skip("the heads of the small model are too small to be quantized")
    stock, ours = both(lambda: generated(model, prompt(30), 60, **options))
    assert ours == stock


def test_prompts_that_share_a_prefix_at_once() -> None:
    """Several sequences of a batch continue one stored conversation."""
    model = build("llama")

    def run() -> list[list[int]]:
        index = caches.LRUPromptCache()
        stored = caches.make_prompt_cache(model)
        generated(model, prompt(100), 1, prompt_cache=stored)
        for cache in stored:
            cache.trim(cache.offset - 100)
        index.insert_cache("model", prompt(100), stored)
        generator = module().BatchGenerator(model)
        answers: dict[int, list[int]] = {}
        for seed in range(3):
            found, rest = index.fetch_nearest_cache("model", prompt(100) + prompt(9, seed))
            (uid,) = generator.insert([rest], [30], caches=[found])
            answers[uid] = []
        while any(len(tokens) < 30 for tokens in answers.values()):
            for response in generator.next()[1]:
                answers[response.uid].append(response.token)
        return list(answers.values())

    stock, ours = both(run)
    assert ours == stock


def test_names_are_replaced_and_put_back() -> None:
    from mlx_lm.models import gemma3_text, llama

    before = (caches.KVCache, llama.KVCache, llama.scaled_dot_product_attention, caches.LRUPromptCache)
    with installed():
        assert (caches.KVCache, llama.KVCache) == (KVCache, KVCache)
        assert (caches.BatchKVCache, caches.BatchRotatingKVCache) == (BatchKVCache, BatchRotatingKVCache)
        assert (gemma3_text.RotatingKVCache, caches.LRUPromptCache) == (RotatingKVCache, LRUPromptCache)
        with installed():
            pass
        assert caches.KVCache is KVCache
    assert (caches.KVCache, llama.KVCache, llama.scaled_dot_product_attention, caches.LRUPromptCache) == before


def test_full_memory_ends_the_batch_and_the_next_one_runs() -> None:
    """Every sequence is answered; the generator goes on."""
    model = build("llama")
    limit = SLABS._limit
    with installed():
        generator = module().BatchGenerator(model, prefill_batch_size=2)
        try:
            SLABS.set_limit(SLABS.used + 100_000)
            uids = generator.insert([prompt(200, n) for n in range(4)], [300] * 4)
            ended: dict[int, str] = {}
            for _ in range(400):
                for response in generator.next()[1]:
                    if response.finish_reason:
                        ended[response.uid] = response.finish_reason
            assert sorted(ended) == uids
            SLABS._limit = limit
            generator.insert([prompt(20)], [5])
            tokens = [response.token for _ in range(12) for response in generator.next()[1]]
        finally:
            SLABS._limit = limit
            generator.close()
    assert tokens == generated(model, prompt(20), 5)
