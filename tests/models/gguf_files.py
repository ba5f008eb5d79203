"""Writes small GGUF files with the `gguf` package, as llama.cpp's converter would."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, FEED, LAYERS, CONTEXT = 64, 4, 2, 96, 2, 128
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]
SPECIAL = ["<|end|>", "<|start|>"]


def byte_tokens() -> list[str]:
    """Special tokens, the 256 bytes, and what the merges make."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]


@dataclass
class Spec:
    """A random model. `extra` adds or replaces metadata, `tensors` adds tensors."""

    architecture: str = "llama"
    kind: Kind = Kind.F32
    tied: bool = True
    head_dim: int = HIDDEN // HEADS
    pre: str = "gpt-2"
    vocabulary: int = 288
    extra: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    skip: tuple[str, ...] = ()


def config(spec: Spec) -> dict[str, Any]:
    """The same model in mlx-lm's words, with the original order of q and k."""
    return {
        "model_type": {"mistral": "llama"}.get(spec.architecture, spec.architecture),
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": FEED,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": spec.head_dim,
        "rms_norm_eps": 1e-5,
        "vocab_size": spec.vocabulary,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 5000.0,
        "tie_word_embeddings": spec.tied,
        "rope_traditional": False,
    }


def weights(spec: Spec, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights by mlx-lm's names."""
    random = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return random.normal(0, 0.15, shape).astype(np.float32)

    q, kv = HEADS * spec.head_dim, KV_HEADS * spec.head_dim
    found = {
        "model.embed_tokens.weight": draw(spec.vocabulary, HIDDEN),
        "model.norm.weight": 1 + draw(HIDDEN),
    }
    if not spec.tied:
        found["lm_head.weight"] = draw(spec.vocabulary, HIDDEN)
    for layer in range(LAYERS):
        shapes = {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (q, HIDDEN),
            "self_attn.k_proj": (kv, HIDDEN),
            "self_attn.v_proj": (kv, HIDDEN),
            "self_attn.o_proj": (HIDDEN, q),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (FEED, HIDDEN),
            "mlp.up_proj": (FEED, HIDDEN),
            "mlp.down_proj": (HIDDEN, FEED),
        }
        if spec.architecture == "qwen3":
            shapes |= {"self_attn.q_norm": (spec.head_dim,), "self_attn.k_norm": (spec.head_dim,)}
        for name, shape in shapes.items():
            found[f"model.layers.{layer}.{name}.weight"] = draw(*shape) + (len(shape) == 1)
        if spec.architecture == "qwen2":
            for name, size in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
                found[f"model.layers.{layer}.self_attn.{name}.bias"] = draw(size)
    return found


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    top = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def _heads(spec: Spec, name: str) -> int | None:
    """For a q or k weight that llama.cpp permutes: its number of heads."""
    if spec.architecture not in ("llama", "mistral"):
        return None
    return {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])


def permute(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (first half, second half) to neighbours, as llama.cpp wants them."""
    rows, *rest = array.shape
    return array.reshape(heads, 2, rows // heads // 2, *rest).swapaxes(1, 2).reshape(array.shape)


def unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    rows, *rest = array.shape
    return array.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(array.shape)


def write(path: Path, spec: Spec, seed: int = 0) -> dict[str, np.ndarray]:
    """Writes the file; returns the weights it really holds, in float32 and mlx-lm's order."""
    writer = gguf.GGUFWriter(path, spec.architecture)
    _add_metadata(writer, spec)
    held: dict[str, np.ndarray] = {}
    for name, array in weights(spec, seed).items():
        heads = _heads(spec, name)
        stored = permute(array, heads) if heads else array
        kind = spec.kind if array.ndim == 2 else Kind.F32
        data = gguf.quants.quantize(stored, kind)
        exact = gguf.quants.dequantize(data, kind).astype(np.float32).reshape(array.shape)
        held[name] = unpermute(exact, heads) if heads else exact
        if _gguf_name(name) not in spec.skip:
            writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
    for name, array in spec.tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _add_metadata(writer: gguf.GGUFWriter, spec: Spec) -> None:
    tokens = byte_tokens()
    arch = spec.architecture
    values: dict[str, Any] = {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": CONTEXT,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": FEED,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.key_length": spec.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 5000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": spec.pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
    } | spec.extra
    for key, value in values.items():
        add(writer, key, value)


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def as_mlx(arrays: dict[str, np.ndarray]) -> list[tuple[str, mx.array]]:
    return [(name, mx.array(array)) for name, array in arrays.items()]
