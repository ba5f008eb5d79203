"""TurboQuantKVCache: encoded in memory, in copies and in files, and the same answers from all of them."""

import copy
import importlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as caches

from architectures import build
from onekv.errors import SettingError
from onekv.memory.formats import parse
from onekv.memory.hook import attention, stock_attention
from onekv.mlx_lm import LRUPromptCache, TurboQuantKVCache, installed, to_turbo
from rise import Rise
from stock import small_llama, stock_logits

LAYERS, HEADS, DIM = 4, 2, 64
BITS = [4, 3, 2]


def random_model() -> Any:
    shape = {"num_hidden_layers": LAYERS, "num_key_value_heads": HEADS, "head_dim": DIM}
    return small_llama(5, intermediate_size=128, **shape)


@pytest.fixture(scope="module")
def model() -> Any:
    """With weights so large that its words change all the time, with every small difference in its KV."""
    model = random_model()
    model.apply(lambda weight: weight * 4 if weight.ndim > 1 else weight)
    return model


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 128, length).tolist()


def made(bits: int = 4) -> list[TurboQuantKVCache]:
    return [TurboQuantKVCache(bits) for _ in range(LAYERS)]


def generated(model: Any, tokens: list[int], count: int, cache: list[Any]) -> list[int]:
    generate_step = importlib.import_module("mlx_lm.generate").generate_step
    return [int(token) for token, _ in generate_step(mx.array(tokens), model, max_tokens=count, prompt_cache=cache)]


def kv(tokens: int, rows: int = 1, key: int = DIM, value: int = DIM, seed: int = 1) -> tuple[mx.array, mx.array]:
    keys = mx.random.split(mx.random.key(seed))
    shape = (rows, HEADS, tokens)
    return mx.random.normal((*shape, key), key=keys[0]), mx.random.normal((*shape, value), key=keys[1])


def filled(tokens: int, bits: int = 4) -> TurboQuantKVCache:
    cache = TurboQuantKVCache(bits)
    cache.update_and_fetch(*kv(tokens))
    mx.eval(cache.state)
    return cache


def arrays(cache: TurboQuantKVCache) -> list[mx.array]:
    keys, values, *_ = cache.state
    return [*keys, *values]


def same(a: list[mx.array], b: list[mx.array]) -> bool:
    return all(bool(mx.array_equal(x, y)) for x, y in zip(a, b, strict=True))


def distance(a: mx.array, b: mx.array) -> float:
    return float(mx.linalg.norm(a - b) / mx.linalg.norm(b))


def encoded_bytes(bits: int, tokens: int, dim: int = DIM) -> int:
    """Of one layer's keys and values, as the codec says."""
    form = parse(f"tq{bits}")
    return tokens * HEADS * (form.keys(dim, mx.float32).token_bytes + form.values(dim, mx.float32).token_bytes)


def saved_and_loaded(cache: list[Any], path: Path) -> list[Any]:
    caches.save_prompt_cache(str(path), cache)
    return caches.load_prompt_cache(str(path))


# Encoded everywhere


@pytest.mark.parametrize("bits", BITS)
def test_it_is_encoded_in_memory_in_copies_and_in_files(tmp_path: Path, bits: int) -> None:
    tokens = 300
    cache = filled(tokens, bits)
    path = tmp_path / "cache.safetensors"
    with installed():
        (loaded,) = saved_and_loaded([cache], path)
    assert type(loaded) is TurboQuantKVCache
    fork = copy.deepcopy(cache)
    for one in (cache, fork, loaded):
        assert [array.dtype for array in arrays(one)] == [mx.uint8, mx.float16, mx.uint8, mx.float16]
        assert sum(array.nbytes for array in arrays(one)) == encoded_bytes(bits, tokens)
        assert same(arrays(one), arrays(cache))
        assert (one.offset, one.size(), one.empty(), one.is_trimmable()) == (tokens, tokens, False, True)
    # Steps of 256 columns are allocated; what is loaded has no free ones.
    assert cache.nbytes == fork.nbytes == encoded_bytes(bits, 512)
    assert loaded.nbytes == encoded_bytes(bits, tokens)
    assert path.stat().st_size < encoded_bytes(bits, tokens) + 2000


@pytest.mark.parametrize("bits", BITS)
def test_bytes_are_bits_per_number_and_a_norm(bits: int) -> None:
    plain = 2 * 256 * HEADS * DIM * 2
    assert filled(256, bits).nbytes * 16 == plain * (bits + 16 / DIM)


def test_what_mlx_lm_loads_without_install_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="TurboQuantKVCache"):
        saved_and_loaded([filled(3)], tmp_path / "cache.safetensors")
    assert not hasattr(caches, "TurboQuantKVCache")


def test_a_file_of_other_bytes_is_refused() -> None:
    *state, name, dtype = filled(3).state
    with pytest.raises(SettingError, match="stored as tq4-r0 tq4-r0, which this version"):
        TurboQuantKVCache.from_state((*state, name.replace("r1", "r0"), dtype))


def test_an_empty_cache(tmp_path: Path) -> None:
    with installed():
        (cache,) = saved_and_loaded([TurboQuantKVCache(3)], tmp_path / "cache.safetensors")
    assert (cache.empty(), cache.offset, cache.nbytes, cache.turbo_bits) == (True, 0, 0, 3)
    cache.update_and_fetch(*kv(7))
    assert same(arrays(cache), arrays(filled(7, 3)))


def test_bits_that_there_are_not() -> None:
    with pytest.raises(SettingError, match="bits is 8; TurboQuantKVCache stores 4, 3, 2 bits"):
        TurboQuantKVCache(bits=8)


# The same bytes and answers


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("cut", [[1] * 20 + [580], [256, 256, 88], [255, 1, 1, 343], [599, 1]])
def test_chunks_give_the_same_bytes(bits: int, cut: list[int]) -> None:
    keys, values = kv(600)
    cache, start = TurboQuantKVCache(bits), 0
    for count in cut:
        cache.update_and_fetch(keys[..., start : start + count, :], values[..., start : start + count, :])
        start += count
    assert same(arrays(cache), arrays(filled(600, bits)))


@pytest.mark.parametrize("bits", BITS)
def test_generation_goes_on_after_a_file_as_without(model: Any, tmp_path: Path, bits: int) -> None:
    with installed():
        cache = made(bits)
        first = generated(model, prompt(270), 20, cache)
        loaded = saved_and_loaded(cache, tmp_path / "cache.safetensors")
        assert generated(model, prompt(9, 1), 60, loaded) == generated(model, prompt(9, 1), 60, cache)
        assert len(set(first)) > 10
    for one, other in zip(loaded, cache, strict=True):
        assert same(arrays(one), arrays(other))


def test_outputs_without_install_are_the_same() -> None:
    """mlx-lm's own attention over what is decoded, against attention over the bytes."""
    model, tokens = random_model(), prompt(220)
    expected = stock_logits(model, tokens, 200, 64, made())
    with installed():
        found = stock_logits(model, tokens, 200, 64, made())
    assert distance(found, expected) < 0.005


@pytest.mark.parametrize(("bits", "error"), [(4, 0.15), (3, 0.3), (2, 0.6)])
def test_outputs_are_near_the_plain_ones(bits: int, error: float) -> None:
    """A row's own error is 0.10, 0.19 or 0.35, and there are four layers."""
    model, tokens = random_model(), prompt(220)
    expected = stock_logits(model, tokens, 200, 64)
    with installed():
        found = stock_logits(model, tokens, 200, 64, made(bits))
    assert distance(found, expected) < error


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3", "gpt_oss", "gemma3n"])
def test_models_of_all_kinds(name: str) -> None:
    model = build(name)
    with installed():
        cache = caches.make_prompt_cache(model)
        before = [type(one) for one in cache]
        to_turbo(cache)
        replaced = [type(one) for one in cache]
        assert replaced == [TurboQuantKVCache if kind is caches.KVCache else kind for kind in before]
        assert TurboQuantKVCache in replaced
        assert len(generated(model, prompt(40), 20, cache)) == 20


# Attention


@pytest.mark.parametrize("tokens", [1, 5, 20])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_over_the_bytes_is_attention_over_what_they_mean(
    tokens: int, rows: int, window: int | None, sinks: bool
) -> None:
    cache = TurboQuantKVCache()
    cache.update_and_fetch(*kv(100, rows, value=96))
    mask = cache.make_mask(tokens, return_array=False, window_size=window)
    keys, values = cache.update_and_fetch(*kv(tokens, rows, value=96, seed=2))
    queries = mx.random.normal((rows, 3 * HEADS, tokens, DIM))
    extra = mx.random.normal((3 * HEADS,)) if sinks else None
    out = attention(queries, keys, values, cache, 0.3, mask, extra)
    expected = stock_attention(queries, keys, values, None, scale=0.3, mask=mask, sinks=extra)
    assert mx.allclose(out, expected, atol=1e-4)


def test_half_precision_comes_back_as_it_was() -> None:
    cache = TurboQuantKVCache()
    keys, values = cache.update_and_fetch(*(array.astype(mx.bfloat16) for array in kv(30)))
    assert (keys.dtype, values.dtype) == (mx.bfloat16, mx.bfloat16)
    queries = mx.random.normal((1, 4, 1, DIM)).astype(mx.bfloat16)
    assert attention(queries, keys, values, cache, 0.1, None).dtype == mx.bfloat16


def test_layers_without_values() -> None:
    cache = TurboQuantKVCache()
    for seed in range(2):
        keys, values = cache.update_and_fetch(*kv(3, value=0, seed=seed))
    assert (keys.shape, values.shape) == ((1, HEADS, 6, DIM), (1, HEADS, 6, 0))
    assert TurboQuantKVCache.from_state(cache.state).keys_and_values()[1].shape == (1, HEADS, 6, 0)


# Trimming, copies, conversion


def test_trimmed_tokens_are_written_over() -> None:
    cache = filled(40)
    assert (cache.trim(15), cache.offset) == (15, 25)
    assert same(arrays(cache), arrays(filled(40))) is False
    keys, values = kv(40)
    cache.update_and_fetch(keys[..., 25:, :], values[..., 25:, :])
    assert same(arrays(cache), arrays(filled(40)))
    assert (cache.trim(100), cache.offset, cache.trim(1)) == (40, 0, 0)
    assert caches.trim_prompt_cache([filled(9), filled(9)], 4) == 4


def test_copies_go_on_by_themselves() -> None:
    cache = filled(20)
    fork = copy.deepcopy(cache)
    fork.update_and_fetch(*kv(2, seed=3))
    cache.update_and_fetch(*kv(5, seed=4))
    assert (cache.offset, fork.offset) == (25, 22)
    for one in (cache, fork):
        one.trim(one.offset - 20)
        assert same(arrays(one), arrays(filled(20)))


@pytest.mark.parametrize("with_install", [False, True])
def test_a_plain_cache_is_encoded_as_if_it_had_been_from_the_start(with_install: bool) -> None:
    with installed() if with_install else nullcontext():
        plain = caches.KVCache()
        plain.update_and_fetch(*kv(300))
        window = caches.RotatingKVCache(8)
        cache = [plain, window, caches.KVCache()]
        to_turbo(cache, bits=3)
    assert same(arrays(cache[0]), arrays(filled(300, 3)))
    assert cache[1] is window
    assert cache[2].empty()


def test_conversations_of_the_prompt_cache_are_lent_and_come_back(model: Any) -> None:
    with installed():
        index, cache, tokens = LRUPromptCache(), made(), prompt(80)
        tokens = tokens + generated(model, tokens, 10, cache)[:-1]
        for one in cache:
            one.trim(one.offset - len(tokens))
        index.insert_cache("model", tokens, cache)
        assert index.nbytes == LAYERS * encoded_bytes(4, 256)
        expected = generated(model, [5, 6], 20, copy.deepcopy(cache))
        found, rest = index.fetch_nearest_cache("model", [*tokens, 5, 6])
        assert rest == [5, 6]
        assert generated(model, rest, 20, found) == expected
        assert index.stats()["copies"] == 0


def test_a_batch_is_refused_by_name(model: Any) -> None:
    with installed():
        generator = importlib.import_module("mlx_lm.generate").BatchGenerator(model)
        generator.insert([prompt(5)], [3], caches=[made()])
        with pytest.raises(ValueError, match=r"TurboQuantKVCache.* does not yet support batching"):
            generator.next()
        generator.close()


# Memory

LONG = 12000
PLAIN_LAYER = 2 * 4 * LONG * HEADS * DIM
# Sizes of buffers are rounded up.
SLACK = 50_000


def step(model: Any, cache: list[Any], tokens: int) -> None:
    mx.eval(model(mx.array([prompt(tokens)]), cache=cache), [one.state for one in cache])


@pytest.fixture
def long_cache(model: Any) -> list[TurboQuantKVCache]:
    cache = made()
    for one, seed in zip(cache, range(LAYERS), strict=True):
        one.update_and_fetch(*kv(LONG, seed=seed))
        mx.eval(one.state)
    return cache


def test_a_step_needs_less_than_a_plain_layer(model: Any, long_cache: list[TurboQuantKVCache]) -> None:
    with installed():
        step(model, long_cache, 1)
        with Rise() as rise:
            for _ in range(5):
                step(model, long_cache, 1)
    assert rise.peak < PLAIN_LAYER
    assert rise.left < 1000


def test_without_install_a_step_needs_some_plain_layers_arrays(model: Any, long_cache: list[TurboQuantKVCache]) -> None:
    step(model, long_cache, 1)
    with Rise() as rise:
        step(model, long_cache, 1)
    assert rise.peak < 2 * PLAIN_LAYER
    assert rise.left < 1000


def test_growth_needs_one_encoded_layer(model: Any, long_cache: list[TurboQuantKVCache]) -> None:
    layer = long_cache[0].nbytes
    step(model, long_cache, 1)
    with Rise() as steady, installed():
        step(model, long_cache, 1)
    room = long_cache[0].keys[0].shape[2] - LONG
    for one in long_cache:
        one.update_and_fetch(*kv(room - 2))
        mx.eval(one.state)
    assert long_cache[0].nbytes == layer
    with Rise() as rise, installed():
        step(model, long_cache, 1)
    grown = long_cache[0].nbytes - layer
    assert layer / 32 < grown < layer / 8
    assert rise.peak - steady.peak < LAYERS * grown + 1.5 * layer
    assert rise.left < LAYERS * grown + SLACK


def test_a_copy_costs_nothing_until_it_is_written(model: Any, long_cache: list[TurboQuantKVCache]) -> None:
    step(model, long_cache, 1)
    with Rise() as rise:
        fork = copy.deepcopy(long_cache)
        mx.eval([one.state for one in fork])
    assert rise.peak < 1000
    with Rise() as rise, installed():
        step(model, fork, 1)
    assert rise.left < sum(one.nbytes for one in long_cache) + SLACK
