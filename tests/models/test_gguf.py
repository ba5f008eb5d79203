"""GGUF files become mlx-lm models with exactly the file's weights, or a clear refusal."""

import importlib
import random
import struct
from pathlib import Path
from typing import Any

import gguf_files
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import Spec, as_mlx, config, write
from mlx.utils import tree_flatten

from onekv.errors import ModelFormatError
from onekv.models.gguf import load_gguf
from onekv.models.gguf_header import read_header

KINDS = [Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1]
TOKENS = mx.array([[5, 17, 200, 3, 3, 99, 250, 41, 8, 8, 120, 7]])


def reference(spec: Spec, held: dict[str, np.ndarray], **changes: Any) -> Any:
    """mlx-lm's model in the original order of q and k, with the same weights."""
    settings = config(spec) | changes
    module = importlib.import_module(f"mlx_lm.models.{settings['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(settings))
    model.load_weights(as_mlx(held), strict=True)
    return model


def check_same(model: Any, other: Any, tolerance: float = 1e-4) -> None:
    found, expected = model(TOKENS).astype(mx.float32), other(TOKENS)
    assert mx.abs(expected).max().item() > 0.5
    assert mx.abs(found - expected).max().item() < tolerance


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_logits_equal_the_original_model(tmp_path: Path, architecture: str, kind: Kind) -> None:
    spec = Spec(architecture, kind, head_dim=32 if architecture == "qwen3" else 16)
    held = write(tmp_path / "m.gguf", spec)
    model, _, _ = load_gguf(tmp_path / "m.gguf")
    check_same(model, reference(spec, held))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_dequantized_weights_are_bit_exact(tmp_path: Path, kind: Kind) -> None:
    spec = Spec("qwen2", kind)
    held = write(tmp_path / "m.gguf", spec)
    model, _, _ = load_gguf(tmp_path / "m.gguf", mx.float32, dequantize=True)
    loaded = dict(tree_flatten(model.parameters()))
    for name, expected in held.items():
        assert np.array_equal(np.array(loaded[name]), expected), name


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_packed_weights_stay_packed_and_agree(tmp_path: Path, kind: Kind) -> None:
    spec = Spec("llama", kind, tied=False)
    held = write(tmp_path / "m.gguf", spec)
    model, _, settings = load_gguf(tmp_path / "m.gguf", mx.float32, dequantize=False)
    assert model.layers[0].self_attn.q_proj.weight.dtype == mx.uint32
    assert model.layers[0].self_attn.q_proj.bits == settings["quantization"]["bits"]
    assert model.lm_head.group_size == model.model.embed_tokens.group_size == 32
    check_same(model, reference(spec, held))


def test_packed_default_is_float16(tmp_path: Path) -> None:
    held = write(tmp_path / "m.gguf", Spec("llama", Kind.Q8_0))
    model, _, _ = load_gguf(tmp_path / "m.gguf", dequantize=False)
    dtypes = {array.dtype for _, array in tree_flatten(model.parameters())}
    assert dtypes == {mx.uint32, mx.float16}
    check_same(model, reference(Spec("llama", Kind.Q8_0), held), tolerance=0.1)


def test_dtype_is_honoured(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Spec("llama", Kind.Q4_1))
    model, _, _ = load_gguf(tmp_path / "m.gguf", mx.bfloat16, dequantize=True)
    assert {array.dtype for _, array in tree_flatten(model.parameters())} == {mx.bfloat16}


def test_untied_output_and_mistral(tmp_path: Path) -> None:
    spec = Spec("mistral", tied=False)
    held = write(tmp_path / "m.gguf", spec)
    model, _, settings = load_gguf(tmp_path / "m.gguf")
    assert settings["tie_word_embeddings"] is False
    check_same(model, reference(spec, held))


def test_linear_rope_scaling(tmp_path: Path) -> None:
    extra = {"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 4.0}
    spec = Spec("qwen2", extra=extra)
    held = write(tmp_path / "m.gguf", spec)
    model, _, _ = load_gguf(tmp_path / "m.gguf")
    check_same(model, reference(spec, held, rope_scaling={"type": "linear", "factor": 4.0}))
    with pytest.raises(AssertionError):
        check_same(model, reference(spec, held))


def llama3_factors(head_dim: int, base: float, scaling: dict[str, float]) -> np.ndarray:
    """Per-frequency factors as the format's converter defines them."""
    low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    factors = []
    for period in base ** (np.arange(0, head_dim, 2) / head_dim):
        length = 2 * np.pi * period
        if length < high:
            factors.append(1.0)
        elif length > low:
            factors.append(scaling["factor"])
        else:
            smooth = scaling["original_max_position_embeddings"] / length
            smooth = (smooth - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def test_llama3_rope_factors(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    factors = llama3_factors(32, 5000.0, scaling)
    assert 1.0 in factors and 8.0 in factors and len(set(factors)) > 2
    spec = Spec("llama", head_dim=32, tensors={"rope_freqs.weight": factors})
    held = write(tmp_path / "m.gguf", spec)
    model, _, _ = load_gguf(tmp_path / "m.gguf")
    check_same(model, reference(spec, held, rope_scaling={"rope_type": "llama3"} | scaling))
    with pytest.raises(AssertionError):
        check_same(model, reference(spec, held))


def test_lazy_reads_no_weights(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Spec("qwen2", Kind.Q4_1))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    lazy, _, _ = load_gguf(tmp_path / "m.gguf", lazy=True)
    assert mx.get_peak_memory() - before < 10_000
    real, _, _ = load_gguf(tmp_path / "m.gguf")
    shapes = [(n, a.shape, a.dtype) for n, a in tree_flatten(lazy.parameters())]
    assert shapes == [(n, a.shape, a.dtype) for n, a in tree_flatten(real.parameters())]
    assert mx.isnan(lazy(TOKENS)).any().item()


REFUSED = [
    (Spec("gemma2"), "gemma2"),
    (Spec("llama", Kind.BF16), "BF16"),
    (Spec("llama", Kind.Q5_0), "Q5_0"),
    (Spec(extra={"llama.expert_count": 8}), "mixture-of-experts"),
    (Spec(extra={"llama.attention.sliding_window": 32}), "sliding window"),
    (Spec(extra={"llama.rope.scaling.type": "yarn"}), "yarn"),
    (Spec(extra={"llama.rope.dimension_count": 8}), "partial rotary embedding"),
    (Spec(extra={"llama.embedding_length": None}), "llama.embedding_length"),
    (Spec(extra={"llama.attention.head_count_kv": [2, 1]}), "head_count_kv"),
    (Spec(extra={"llama.block_count": 100000}), "100000 layers"),
    (Spec(extra={"llama.feed_forward_length": 64}), "ffn_.*shape"),
    (Spec(skip=("blk.1.ffn_up.weight",)), r"layers\.1\.mlp\.up_proj"),
    (Spec(tensors={"blk.0.ssm_a.weight": np.zeros((4, 4), np.float32)}), "ssm_a"),
]


@pytest.mark.parametrize(("spec", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_would_be_wrong_is_refused_by_name(tmp_path: Path, spec: Spec, named: str) -> None:
    write(tmp_path / "m.gguf", spec)
    with pytest.raises(ModelFormatError, match=named) as caught:
        load_gguf(tmp_path / "m.gguf")
    assert str(tmp_path / "m.gguf") in str(caught.value)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write(path, Spec("llama", Kind.Q4_0))
    return path.read_bytes()


def test_truncated_anywhere_is_refused(tmp_path: Path, sound: bytes) -> None:
    file = tmp_path / "cut.gguf"
    for length in [*range(0, 4000, 7), *range(4000, len(sound), 997), len(sound) - 64]:
        file.write_bytes(sound[:length])
        with pytest.raises(ModelFormatError, match=r"cut\.gguf"):
            read_header(file)


def test_flipped_header_bytes_never_crash(tmp_path: Path, sound: bytes) -> None:
    """Each damaged header is refused or still describes tensors that lie inside the file."""
    chance = random.Random(7)
    file = tmp_path / "flipped.gguf"
    refused = 0
    for _ in range(600):
        data = bytearray(sound)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(9000)] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
        try:
            header = read_header(file)
        except ModelFormatError as error:
            refused += 1
            assert "flipped.gguf" in str(error)
        else:
            assert all(t.start + t.nbytes <= len(data) for t in header.tensors.values())
    assert refused > 100


def test_flipped_header_bytes_load_or_are_refused(tmp_path: Path, sound: bytes) -> None:
    chance = random.Random(8)
    file = tmp_path / "flipped.gguf"
    for _ in range(40):
        data = bytearray(sound)
        data[chance.randrange(24, 9000)] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
        try:
            load_gguf(file, lazy=True)
        except ModelFormatError as error:
            assert "flipped.gguf" in str(error)


@pytest.mark.parametrize("field", [8, 16])
def test_absurd_counts_are_refused_at_once(tmp_path: Path, sound: bytes, field: int) -> None:
    data = bytearray(sound)
    data[field : field + 8] = struct.pack("<Q", 1 << 62)
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelFormatError, match=str(1 << 62)):
        read_header(tmp_path / "m.gguf")


def test_absurd_array_and_string_lengths(tmp_path: Path) -> None:
    key = struct.pack("<Q", 1) + b"k"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key
    bodies = {
        "numbers": struct.pack("<IIQ", 9, 4, 1 << 60),
        "strings": struct.pack("<IIQ", 9, 8, 1 << 60),
        "arrays": struct.pack("<IIQ", 9, 9, 1 << 60),
        "string": struct.pack("<IQ", 8, 1 << 60),
        "nested": struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50,
        "unknown": struct.pack("<I", 77),
    }
    for name, body in bodies.items():
        (tmp_path / name).write_bytes(head + body + bytes(64))
        with pytest.raises(ModelFormatError, match=name):
            read_header(tmp_path / name)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "empty"),
        (b"PK\x03\x04" + bytes(100), "GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    ],
)
def test_other_files_are_named(tmp_path: Path, data: bytes, named: str) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelFormatError, match=named):
        read_header(tmp_path / "m.gguf")


def test_all_value_types_are_read(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_int8("a", -3)
    writer.add_uint16("b", 65535)
    writer.add_int64("c", -(1 << 40))
    writer.add_float64("d", 0.1)
    writer.add_bool("e", True)
    writer.add_string("f", "naïve")
    writer.add_array("g", [1.5, 2.5])
    writer.add_array("h", ["x", "yz"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = read_header(tmp_path / "m.gguf").metadata
    assert [found[key] for key in "abcdef"] == [-3, 65535, -(1 << 40), 0.1, True, "naïve"]
    assert found["g"].tolist() == [1.5, 2.5]
    assert found["h"] == ["x", "yz"]


def test_smollm2_answers(smollm2_path: Path) -> None:
    from mlx_lm import generate

    model, tokenizer, settings = load_gguf(smollm2_path)
    assert settings["rope_traditional"] and settings["tie_word_embeddings"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert generate(model, tokenizer, prompt, max_tokens=12) == "The capital of France is Paris."


def test_gguf_files_permute_is_its_own_inverse_pair() -> None:
    rows = np.arange(32 * 3).reshape(32, 3)
    assert np.array_equal(gguf_files.unpermute(gguf_files.permute(rows, 4), 4), rows)
