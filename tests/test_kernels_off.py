"""`--kernels off`: answers are the same, and nothing of OneKV's own is compiled or called for them."""

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from architectures import build
from onekv import LLM, loops
from onekv.bench.clients import save
from onekv.config import Settings
from onekv.cuda import products
from onekv.loops import prompts
from onekv.memory.attention import Backend, backends
from onekv.models import load_for
from onekv.models.gguf import load_gguf
from onekv.models.joined import fuse
from onekv.models.packed import is_eager
from stock import small_llama

SETTINGS = {"kv_memory": "8MB", "block_size": 16, "max_batch": 2, "prefill_chunk": 64}
PROMPTS = [[7 * i % 61 + 1 for i in range(n)] for n in (90, 37)]


@pytest.fixture
def no_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that is called is an error."""

    def refuse(loop: Any, message: str, *arguments: Any) -> None:
        raise AssertionError(f"{loop} was called")

    for module in (loops, prompts):
        monkeypatch.setattr(module, "call", refuse)


def answers(model: Any, **settings: Any) -> list[list[int]]:
    with LLM(model, **SETTINGS, **settings) as llm:
        return [done.tokens for done in llm.generate(PROMPTS, max_tokens=12)]


@pytest.mark.parametrize("kv_format", ["auto", "q8", "tq4"])
def test_answers_are_the_same_without_loops(kv_format: str, request: pytest.FixtureRequest) -> None:
    model = small_llama(7, num_hidden_layers=2, intermediate_size=64, num_key_value_heads=2, head_dim=32)
    expected = answers(model, kv_format=kv_format)
    request.getfixturevalue("no_loops")
    with pytest.raises(AssertionError, match="was called"):
        answers(model, kv_format=kv_format)
    assert answers(model, kv_format=kv_format, kernels="off") == expected


def test_so_are_those_of_half_precision(request: pytest.FixtureRequest) -> None:
    model = build("gemma3_text")
    model.set_dtype(mx.bfloat16)
    expected = answers(model)
    request.getfixturevalue("no_loops")
    assert answers(model, kernels="off") == expected


def test_the_reason_is_told(no_loops: None) -> None:
    with LLM(build("llama"), **SETTINGS, kernels="off") as llm:
        assert llm.stats().uncompiled == "--kernels is off"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Any) -> str:
    """A small quantized model with the default model's tokenizer."""
    _, tokenizer, _ = load_gguf(smollm2_path, None, dequantize=False, lazy=True)
    shape = {"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 49152, "num_key_value_heads": 8}
    model = small_llama(3, **shape)
    nn.quantize(model, group_size=32, bits=4)
    place = tmp_path_factory.mktemp("model")
    config = {"model_type": "llama", "hidden_size": 64, "rms_norm_eps": 1e-5, "num_attention_heads": 8, **shape}
    save(place, model, {**config, "quantization": {"group_size": 32, "bits": 4}}, tokenizer)
    return str(place)


def test_packed_weights_are_unpacked(folder: str, request: pytest.FixtureRequest) -> None:
    assert is_eager(load_for(folder, Settings(), lazy=True).model)
    expected = answers(folder)
    request.getfixturevalue("no_loops")
    assert not is_eager(load_for(folder, Settings(kernels="off"), lazy=True).model)
    assert answers(folder, kernels="off") == expected


def test_every_backend_of_a_kernel_says_so() -> None:
    """Those that MLX's operations are not enough for have a folder."""
    own: dict[type[Backend], bool] = {
        each: each.__module__.split(".")[-2] in ("cuda", "metal", "numba") for each in backends
    }
    assert {each: each.kernel for each in backends} == own


@pytest.mark.parametrize("kernels", [True, False])
def test_products_of_few_rows_on_cuda(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are joined in any case; whose few rows a kernel would multiply is decided by the setting."""
    monkeypatch.setattr("onekv.models.joined.on_cuda", lambda: True)
    replaced: list[Any] = []
    monkeypatch.setattr(products, "few_rows", lambda layer: replaced.append(layer) or layer)
    monkeypatch.setattr(products, "supports", lambda *_: True)
    model = small_llama(3, num_hidden_layers=1, intermediate_size=64)
    fuse(model, kernels)
    joint = model.layers[0].self_attn.q_proj._joint
    assert bool(replaced) is kernels
    assert (joint._few is not None) is kernels
