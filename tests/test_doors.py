"""Doors of the memory: a KV format and an attention backend are added here, and no file of OneKV knows of them."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from onekv import LLM
from onekv.errors import SettingError
from onekv.memory import attention, formats
from onekv.memory.attention import Backend
from onekv.memory.formats import Codec, Factors, Plane, parse
from stock import small_llama

LAYERS, HEADS, DIM, COUNT = 3, 2, 64, 24
PROMPTS = [[7 * i % 61 + 1 for i in range(n)] for n in (90, 37)]
SETTINGS = {"kv_memory": "4MB", "block_size": 16, "max_batch": 2, "prefill_chunk": 32}


@pytest.fixture(scope="module")
def model():
    """One whose answers change with every detail of its KV."""
    made = small_llama(7, num_hidden_layers=LAYERS, intermediate_size=64, num_key_value_heads=HEADS, head_dim=DIM)
    for layer in made.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.o_proj):
            projection.weight = 10 * projection.weight
    mx.eval(made.parameters())
    return made


def generated(model, **settings) -> list[list[int]]:
    with LLM(model, **SETTINGS, **settings) as llm:
        tokens = [done.tokens for done in llm.generate(PROMPTS, max_tokens=COUNT)]
        llm.check_integrity()
    return tokens


def greedy(model, make_cache) -> list[list[int]]:
    """What mlx-lm's own model and attention give with such caches."""
    answers = []
    for prompt in PROMPTS:
        caches, tokens, fed = [make_cache() for _ in range(LAYERS)], [], prompt
        while len(tokens) < COUNT:
            tokens.append(int(model(mx.array([fed]), cache=caches)[0, -1].argmax()))
            fed = tokens[-1:]
        answers.append(tokens)
    return answers


class Absmax(Codec):
    """A row as bytes, of which the largest is 127 or -127; nothing is rotated."""

    def __init__(self, dim: int) -> None:
        self.name, self.dim = "absmax8-1", dim
        self.planes = (Plane("q", dim, mx.int8), Plane("scale", 1, mx.float16))

    def encode(self, rows):
        scale = mx.maximum(mx.abs(rows.astype(mx.float32)).max(axis=-1, keepdims=True) / 127, 1e-6)
        scale = scale.astype(mx.float16)
        return mx.clip(mx.round(rows / scale.astype(mx.float32)), -127, 127).astype(mx.int8), scale

    def read(self, planes, dtype):
        return planes[0].astype(dtype)

    def factors(self, planes):
        return Factors(planes[1][..., 0].astype(mx.float32))

    def rotate(self, rows):
        return rows

    def unrotate(self, rows):
        return rows


@pytest.fixture
def absmax8(monkeypatch):
    monkeypatch.setattr(formats, "registered", dict(formats.registered))
    formats.register("absmax8", lambda dim, dtype, for_keys: Absmax(dim), bits=8)


class RoundTrip(KVCache):
    """mlx-lm's cache, of what is left of rows once they were encoded."""

    def update_and_fetch(self, keys, values):
        codec = Absmax(DIM)
        return super().update_and_fetch(*(codec.decode(codec.encode(rows), rows.dtype) for rows in (keys, values)))


def test_a_registered_format_stores_and_answers(absmax8, model):
    expected = greedy(model, RoundTrip)
    assert expected != greedy(model, KVCache)
    assert generated(model, kv_format="absmax8") == expected
    with LLM(model, **SETTINGS, kv_format="absmax8") as llm:
        pool = llm.engine.memory.pools[0]
        assert {str(array.dtype) for array in pool.arrays()} == {"mlx.core.int8", "mlx.core.float16"}
        assert sum(array.nbytes for array in pool.arrays()) == llm.plan.pool_bytes
        assert pool.block_bytes == 16 * LAYERS * HEADS * 2 * (DIM + 2)


def test_a_registered_format_can_be_that_of_one_side(absmax8, model):
    assert str(parse("kabsmax8vq4")) == "kabsmax8vq4" and parse("k8vabsmax8").value == "absmax8"
    with LLM(model, **SETTINGS, kv_format="kautovabsmax8") as llm:
        assert llm.engine.memory.pools[0].block_bytes == 16 * LAYERS * HEADS * (4 * DIM + DIM + 2)


def test_names_of_formats_are_told_and_taken_once(absmax8):
    with pytest.raises(SettingError, match=r"tq2, absmax8,"):
        parse("q7")
    with pytest.raises(ValueError, match="'absmax8' cannot be a format"):
        formats.register("absmax8", lambda dim, dtype, for_keys: Absmax(dim))
    with pytest.raises(ValueError, match="'K-1' cannot be a format"):
        formats.register("K-1", lambda dim, dtype, for_keys: Absmax(dim))


class Naive(Backend):
    """Copies what a row reads and writes attention out, in numpy."""

    eager = True
    calls = 0

    @classmethod
    def supports(cls, layer, block_size, device):
        return layer.plain

    def decode(self, call, new):
        Naive.calls += 1
        step, arrays, outputs = call.step, self.kv.arrays.all, []
        mx.eval(call.queries, arrays)
        for row, position in enumerate(step.lengths):
            slots = (step.grid.numbers[0][row][:, None] * step.block_size + np.arange(step.block_size)).reshape(-1)
            seen = mx.array(slots[step.grid.positions(row) <= position])
            keys, values = (np.array(array[:, seen]) for array in arrays)
            queries = np.array(call.queries[row]).reshape(HEADS, -1, DIM)
            scores = queries @ keys.swapaxes(1, 2) * call.scale
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            outputs.append((weights @ values / weights.sum(axis=-1, keepdims=True)).reshape(-1, 1, DIM))
        return mx.array(np.stack(outputs))


def test_a_backend_before_the_others_decodes(model, monkeypatch):
    expected = greedy(model, KVCache)
    monkeypatch.setattr(Naive, "calls", 0)
    assert generated(model) == expected and Naive.calls == 0
    monkeypatch.setattr(attention, "backends", [Naive, *attention.backends])
    assert generated(model) == expected
    # Every layer, for every token but the first of the longer answer.
    assert Naive.calls >= LAYERS * (COUNT - 1)


def test_a_backend_is_not_used_for_what_it_does_not_support(model, monkeypatch):
    monkeypatch.setattr(Naive, "calls", 0)
    monkeypatch.setattr(attention, "backends", [Naive, *attention.backends])
    generated(model, kv_format="q8")
    assert Naive.calls == 0
