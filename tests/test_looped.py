"""Decode steps by programs and compiled loops: what the model gives, whatever is stored and whoever shares it."""

import contextlib

import mlx.core as mx
import pytest

from architectures import build
from onekv.config import Settings
from onekv.engine import Engine, Request
from onekv.engine.selftest import compile_decode, set_direct
from onekv.memory import looped
from onekv.memory.attention.numba import plain
from onekv.memory.looped import LoopedDecode
from onekv.memory.plan import make_plan
from onekv.memory.traced import Untraceable
from stock import check_writes_in_place, make_memory, small_llama, stock_logits

MODELS = ("llama", "gemma3_text", "qwen3", "cohere2", "olmo2", "llama-sliding", "minicpm3")


def llama(**more):
    return small_llama(7, num_hidden_layers=3, intermediate_size=64, num_key_value_heads=2, head_dim=32, **more)


def decode(model, memory, lengths, steps):
    """Logits [rows, steps, vocabulary] of decode steps after random prompts; and all tokens."""
    set_direct(model, memory)
    looped = LoopedDecode(model, memory)
    mx.random.seed(3)
    tokens = [mx.random.randint(0, 128, (length + steps,)).tolist() for length in lengths]
    sequences = [memory.open(length + steps) for length in lengths]
    for sequence, row, length in zip(sequences, tokens, lengths, strict=True):
        for start in range(0, length, memory.chunk):
            count = min(memory.chunk, length - start)
            with memory.step([sequence], count) as caches:
                model(mx.array([row[start : start + count]]), cache=caches)
            mx.eval(memory.arrays())
        sequence.prefilled()
    found = []
    for step in range(steps):
        found.append(
            looped(
                sequences,
                mx.array([row[length + step] for row, length in zip(tokens, lengths, strict=True)]),
                [1] * len(sequences),
            )
        )
        assert not memory.writes
    for sequence in sequences:
        memory.close(sequence)
    memory.check_integrity()
    return mx.stack(found, axis=1), tokens


@pytest.mark.parametrize("lengths", [(40,), (5, 90, 33)])
@pytest.mark.parametrize("name", MODELS)
def test_steps_give_what_the_model_gives(name, lengths):
    model = build(name)
    logits, tokens = decode(model, make_memory(model), lengths, 20)
    for row, length in enumerate(lengths):
        expected = stock_logits(model, tokens[row], length, 48)[length:]
        assert mx.abs(logits[row] - expected).max() < 1e-4 * expected.std()


def test_the_pool_is_written_in_place_afterwards():
    model = llama()
    memory = make_memory(model, blocks=2000)
    decode(model, memory, (40,), 3)
    check_writes_in_place(model, memory)


def make_engine(model, **settings):
    settings = Settings(kv_memory="2MiB", block_size=16, **settings)
    return Engine(model, make_plan(model, settings, None), set(), settings)


def answers(engine, prompts, tokens=24):
    requests = [Request(prompt, tokens) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()
    return [request.tokens for request in requests]


def test_rows_of_a_batch_and_shared_prefixes_give_the_same_tokens(monkeypatch):
    model = build("llama")
    prefix = mx.random.randint(0, 128, (96,)).tolist()
    prompts = [[*prefix, row, 5] for row in range(5)]
    alone = [answers(make_engine(model), [prompt])[0] for prompt in prompts]
    engine = make_engine(model, max_batch=5, speculate="off")
    assert isinstance(engine.runner.compiled, LoopedDecode) and engine.runner.uncompiled is None
    # The prefix is there when the others come, and is read once for all of them.
    answers(engine, prompts[:1])
    together = []
    make = plain._make
    monkeypatch.setattr(
        plain, "_make", lambda grid, segments, *rest: together.append(segments) or make(grid, segments, *rest)
    )
    assert answers(engine, prompts) == alone
    assert any(len(segment.rows) == 5 for segments in together for segment in segments)


@pytest.mark.parametrize("kv_format", ["q8", "k8v4", "tq4"])
def test_encoded_kv_gives_the_same_tokens_without_a_program(kv_format):
    model = llama()
    prompts = [mx.random.randint(0, 128, (length,)).tolist() for length in (50, 21)]
    engine = make_engine(model, max_batch=2, kv_format=kv_format)
    assert isinstance(engine.runner.compiled, LoopedDecode)
    looped = answers(engine, prompts)
    engine = make_engine(model, max_batch=2, kv_format=kv_format)
    engine.runner.compiled = None
    assert answers(engine, prompts) == looped


def test_what_cannot_be_looped_says_why_and_is_decoded_by_mlx():
    for name, reason in (("mixtral", "GatherMM"), ("starcoder2", "Erf")):
        model = build(name)
        engine = make_engine(model)
        assert engine.runner.compiled is None and reason in engine.runner.uncompiled
        assert len(answers(engine, [[1, 2, 3]])[0]) == 24


def test_a_model_that_uses_its_mask_is_not_looped(monkeypatch):
    model = llama()
    memory = make_memory(model)
    set_direct(model, memory)
    stock = type(model).__call__

    def looks(self, tokens, cache):
        mask = cache[0].make_mask(1, return_array=True)
        return stock(self, tokens, cache) + (mask.astype(mx.float32).sum() * 0 if mask is not None else 0)

    monkeypatch.setattr(type(model), "__call__", looks)
    sequence = memory.open(10)
    with pytest.raises(Untraceable, match="mask"):
        LoopedDecode(model, memory)([sequence], mx.array([1]), [1])
    memory.close(sequence)
    compiled, why = compile_decode(model, memory, None)
    assert compiled is None and "mask" in why
    memory.check_integrity()


def test_an_interrupted_step_is_made_again(monkeypatch):
    """Some layers have stored the new token, others not."""
    model = build("llama")
    prompts = [mx.random.randint(0, 128, (length,)).tolist() for length in (30, 45)]
    expected = answers(make_engine(model, max_batch=2), prompts)
    engine = make_engine(model, max_batch=2)
    requests = [Request(prompt, 24) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    attend, calls = looped._attend, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) % 5 == 4:
            raise KeyboardInterrupt
        return attend(*arguments)

    monkeypatch.setattr(looped, "_attend", interrupted)
    for _ in range(400):
        if engine.idle:
            break
        with contextlib.suppress(KeyboardInterrupt):
            engine.step()
        engine.check_integrity()
    monkeypatch.setattr(looped, "_attend", attend)
    assert engine.idle and len(calls) > 30
    assert [request.tokens for request in requests] == expected
    assert answers(engine, prompts) == expected
