"""Encoded KV in the engine: the same tokens however they came into the pool, and no more bytes than planned."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from architectures import KINDS, build
from onekv.config import Settings
from onekv.engine import Engine, Sampling
from onekv.errors import SettingError, UnsupportedLayerError
from onekv.memory.attention.turns import UNIT
from onekv.memory.formats import names
from onekv.memory.formats.centre import centre_bytes
from onekv.memory.pool.blocks import block_tensors
from stock import engine_of, small_llama, stock_logits
from test_prefix_exact import hits, run, tokens

FORMATS = [name for name in names() if name != "auto"]


@pytest.fixture(autouse=True)
def _plain_kernels():
    mx.disable_compile()
    yield
    mx.enable_compile()


def make_engine(model, kv_format: str, prefix_cache: bool = True, folder: Path | None = None, **settings) -> Engine:
    values = {"kv_memory": "8MB", "block_size": 16, "max_batch": 3, "prefill_chunk": 48, **settings}
    if folder is not None:
        values = {"disk_cache": str(folder), "disk_limit": "256MB", **values}
    return engine_of(model, kv_format=kv_format, prefix_cache=prefix_cache, **values)


@pytest.fixture(scope="module")
def llama():
    return small_llama(5, num_hidden_layers=3, intermediate_size=64, num_key_value_heads=2, head_dim=64)


@pytest.mark.parametrize("name", KINDS)
def test_hits_give_the_tokens_of_an_uncached_run_in_the_same_format(name, tmp_path):
    """After a hit, after a share, after a restart from disk; tq4 fits all their head dims."""
    model = build(name)
    cold, engine = make_engine(model, "tq4", prefix_cache=False), make_engine(model, "tq4", folder=tmp_path)
    base = tokens(100, 1)
    (first,) = run(engine, [base])
    assert first.tokens == run(cold, [base])[0].tokens
    for kind, prompt in hits(base, first.tokens).items():
        (after,) = run(engine, [prompt])
        assert after.tokens == run(cold, [prompt])[0].tokens, kind
    together = [base[:80] + tokens(11, 8), base[:80] + tokens(30, 9)]
    assert [r.tokens for r in run(engine, together)] == [run(cold, [p])[0].tokens for p in together]
    engine.close()
    engine = make_engine(model, "tq4", folder=tmp_path)
    (again,) = run(engine, [base + first.tokens + tokens(9, 4)])
    assert again.cached_tokens >= 96
    assert again.tokens == run(cold, [again.prompt])[0].tokens
    engine.close()


@pytest.mark.parametrize("kv_format", [*FORMATS, "k8v4", "k5v4", "ktq4vtq2", "kautov4"])
def test_every_format_is_exact_with_respect_to_itself(kv_format, llama, tmp_path):
    cold, engine = make_engine(llama, kv_format, False), make_engine(llama, kv_format, folder=tmp_path)
    base = tokens(100, 1)
    (first,) = run(engine, [base], count=20)
    assert first.tokens == run(cold, [base], count=20)[0].tokens
    turn = [base + first.tokens + tokens(20, 2), base[:70] + tokens(40, 3)]
    for prompt, request in zip(turn, run(engine, turn, count=20), strict=True):
        assert request.cached_tokens >= 64
        assert request.tokens == run(cold, [prompt], count=20)[0].tokens
    engine.close()
    engine = make_engine(llama, kv_format, folder=tmp_path)
    (again,) = run(engine, [turn[0]], count=20)
    assert again.cached_tokens >= 96 and again.tokens == run(cold, [turn[0]], count=20)[0].tokens
    engine.close()


@pytest.mark.parametrize(
    "kv_format, tolerance",
    [("q8", 0.01), ("q6", 0.06), ("q5", 0.1), ("q4", 0.2), ("tq4", 0.2), ("tq3", 0.5), ("tq2", 0.6)],
)
def test_logits_are_near_those_of_plain_kv(kv_format, tolerance, llama):
    """Relative to the spread of the logits; a format that lost its rotation or its norm would be far off."""
    prompt = tokens(200, 3)
    expected = stock_logits(llama, prompt, len(prompt), 64)[-1]
    engine = make_engine(llama, kv_format)
    (request,) = run(engine, [prompt], count=1, sampling=Sampling(logprobs=20))
    probabilities = mx.softmax(expected)
    logs = mx.log(probabilities)
    shown = request.logprobs[0].top
    error = max(abs(logprob - logs[token].item()) for token, logprob in shown)
    assert error <= tolerance * float(expected.std()) + 1e-4, (error, float(expected.std()))


@pytest.mark.parametrize("kv_format", ["auto", *FORMATS, "k8v4", "k6v4"])
def test_the_pool_has_the_bytes_of_the_plan(kv_format, llama):
    level = mx.get_active_memory()
    engine = make_engine(llama, kv_format)
    pool, layer = engine.memory.pools[0], engine.plan.layout.groups[0].layers[0]
    stored = sum(array.nbytes for array in pool.arrays())
    assert stored == engine.plan.pool_bytes == pool.nbytes
    assert stored == pool.blocks * pool.block_size * 3 * 2 * (layer.keys.token_bytes + layer.values.token_bytes)
    centres = 3 * centre_bytes(2, 64) + UNIT * 64 * 4 if layer.centre is not None else 0
    assert stored <= mx.get_active_memory() - level <= stored + centres + 2**18
    tensors = block_tensors(engine.plan.layout.groups[0], 16)
    assert sum(tensor.nbytes for tensor in tensors) == pool.block_bytes


def test_formats_hold_more_tokens(llama):
    held = {name: make_engine(llama, name).plan.longest for name in names()}
    # Of float32, 32 bits a number.
    for name, bits in {"q8": 8.5, "q6": 6.5, "q5": 5.5, "q4": 4.5, "tq4": 4.25, "tq3": 3.25, "tq2": 2.25}.items():
        assert held[name] / held["auto"] == pytest.approx(32 / bits, rel=0.03)


def test_encoded_bytes_are_the_same_in_memory_and_on_disk(llama, tmp_path):
    engine = make_engine(llama, "k8v4", folder=tmp_path)
    run(engine, [tokens(40, 1)])
    nodes = {node.key.hex(): node for node in engine.prefix.index.nodes.values()}
    pool = engine.memory.pools[0]
    blocks = {key: [np.array(pool.gather(a, node.blocks[0])) for a in pool.arrays()] for key, node in nodes.items()}
    engine.close()
    seen = 0
    for file in tmp_path.glob("*/*/*.safetensors"):
        arrays = mx.load(str(file))
        content = blocks[file.name.split("-")[0]]
        assert len(arrays) == len(content) == 3 * 6
        ordered = [arrays[tensor.name] for tensor in block_tensors(pool.group, 16)]
        for own, stored in zip(content, ordered, strict=True):
            assert own.dtype == np.array(stored).dtype and np.array_equal(own, np.array(stored))
        seen += 1
    assert seen == 3


def test_another_format_finds_nothing_on_disk(llama, tmp_path):
    engine = make_engine(llama, "q8", folder=tmp_path)
    run(engine, [tokens(100, 1)])
    engine.close()
    engine = make_engine(llama, "q4", folder=tmp_path)
    assert run(engine, [tokens(100, 1)])[0].cached_tokens == 0
    engine.close()


def test_peak_of_decoding_is_below_encoded_bytes_and_one_plain_layer():
    model = small_llama(6, num_hidden_layers=8, intermediate_size=64, num_key_value_heads=4, head_dim=64)
    engine = make_engine(model, "q4", kv_memory="24MB", block_size=64, max_batch=1, prefill_chunk=512)
    prompt = tokens(4000, 1)
    from onekv.engine import Request

    request = Request(prompt, 12)
    engine.submit(request)
    while len(request.tokens) < 2:
        engine.step()
    level = mx.get_active_memory()
    mx.reset_peak_memory()
    while not engine.idle:
        engine.step()
    one_layer = 4000 * 4 * 64 * 2 * 4
    assert mx.get_peak_memory() - level < one_layer
    assert mx.get_active_memory() <= level + 2**20


def test_first_and_last_layers_may_stay_plain(llama):
    engine = make_engine(llama, "q4", kv_plain_layers=1)
    layers = engine.plan.layout.groups[0].layers
    assert [str(layer.format) for layer in layers] == ["auto", "q4", "auto"]
    cold = make_engine(llama, "q4", prefix_cache=False, kv_plain_layers=1)
    prompt = tokens(70, 4)
    assert run(engine, [prompt])[0].tokens == run(cold, [prompt])[0].tokens


def test_what_cannot_be_stored_is_refused():
    odd = small_llama(7, num_hidden_layers=1, intermediate_size=64, num_key_value_heads=2, head_dim=20)
    with pytest.raises(UnsupportedLayerError, match="--kv-format"):
        make_engine(odd, "q4")
    with pytest.raises(SettingError, match="--kv-format is 'q7'"):
        make_engine(odd, "q7")
    with pytest.raises(SettingError, match="--kv-plain-layers is -1"):
        Settings(kv_plain_layers=-1)
