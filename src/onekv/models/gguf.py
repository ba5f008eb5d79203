"""A GGUF file as an mlx-lm model: metadata becomes the model's arguments, tensors its weights.

llama.cpp rotates neighbouring elements in `llama` files (their q and k rows are permuted for it),
which is `rope_traditional`; `qwen2` and `qwen3` files keep the order of the original.
"""

import importlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import Llama3RoPE
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import ModelFormatError
from .freed import freed
from .gguf_header import GGUFHeader, read_header
from .gguf_tensors import BITS, COPIES, GROUP_SIZE, Packed, placeholder, read_tensor
from .gguf_tokenizer import build_tokenizer
from .reading import read

# general.architecture -> module of mlx_lm.models.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class _Metadata:
    """Typed access to the metadata of one architecture; a missing or wrong value is
    ModelFormatError.
    """

    header: GGUFHeader
    architecture: str

    def fail(self, what: str) -> ModelFormatError:
        return ModelFormatError(f"{self.header.path}: {what}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.fail(f"metadata {self.architecture}.{key} is {value!r}, not one number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.fail(f"metadata {self.architecture}.{key} is {value!r}, not a number above 0")
        return float(value)

    def text(self, key: str, default: str) -> str:
        return str(self.header.metadata.get(f"{self.architecture}.{key}", default))


def load_gguf(
    path: Path,
    dtype: mx.Dtype | None = None,
    *,
    dequantize: bool | None = None,
    lazy: bool = False,
    tokenizer: TokenizerWrapper | None = None,
) -> tuple[Module, TokenizerWrapper, dict[str, Any]]:
    """The model, its tokenizer and its configuration (mlx-lm's names), from one GGUF file.

    With `dequantize` (the default on CPU, where packed products are slow) all weights are in
    `dtype`, float32 if None; without it quantized weights stay packed and the rest is in `dtype`,
    float16 if None. With `lazy` the weights are placeholders of the right shape and dtype that hold
    NaN: for measuring sizes only. The file's own `tokenizer` is not built again where it is given.
    Raises ModelFormatError when the file is damaged or not supported.
    """
    if dequantize is None:
        dequantize = mx.default_device() == mx.cpu
    dtype = dtype or (mx.float32 if dequantize else mx.float16)
    header = read_header(path)
    config = _model_config(header)
    tokenizer = tokenizer or build_tokenizer(header)
    config["eos_token_id"] = sorted(tokenizer.eos_token_ids)
    model = _build(header, config)
    modules = _module_of_tensor(header, config)
    if not dequantize:
        _quantize(model, header, modules, config)
    _check_parameters(model, header, modules, dequantize)
    for name, module in modules.items():
        info = header.tensors[name]
        if not lazy:
            freed.take(COPIES * info.nbytes + (4 * math.prod(info.shape) if dequantize else 0))
        tensor = placeholder(info) if lazy else read_tensor(path, info)
        weights = _weights(tensor, module, dtype, dequantize)
        # One tensor at a time: packed and unpacked never exist side by side for the whole model.
        if not lazy:
            mx.eval(list(weights.values()))
            read.bytes += sum(value.nbytes for value in weights.values())
        model.load_weights(list(weights.items()), strict=False)
    model.eval()
    return model, tokenizer, config


def _model_config(header: GGUFHeader) -> dict[str, Any]:
    architecture = header.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelFormatError(
            f"{header.path}: architecture {architecture!r} is not supported in GGUF files; "
            f"OneKV reads {', '.join(_ARCHITECTURES)} (the model's folder in MLX format may work)"
        )
    meta = _Metadata(header, architecture)
    heads = meta.integer("attention.head_count")
    hidden = meta.integer("embedding_length")
    if heads == 0 or "token_embd.weight" not in header.tensors:
        raise meta.fail("it has no attention heads or no token_embd.weight, so it is not a language model")
    head_dim = meta.integer("attention.key_length", hidden // heads)
    context = meta.integer("context_length")
    _refuse_what_would_be_wrong(meta, head_dim, hidden // heads, context)
    config: dict[str, Any] = {
        "model_type": _ARCHITECTURES[architecture],
        "hidden_size": hidden,
        "num_hidden_layers": meta.integer("block_count"),
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": context,
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    if config["model_type"] == "llama":
        config["rope_traditional"] = True
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    if config["num_hidden_layers"] == 0 or config["num_hidden_layers"] > len(header.tensors):
        raise meta.fail(f"it claims {config['num_hidden_layers']} layers")
    return config


def _refuse_what_would_be_wrong(meta: _Metadata, head_dim: int, plain_head_dim: int, context: int) -> None:
    """Settings that change the result and that mlx-lm's model of this architecture does not
    have.
    """
    if meta.integer("expert_count", 0):
        raise meta.fail("mixture-of-experts models are not supported in GGUF files")
    if meta.integer("attention.value_length", head_dim) != head_dim:
        raise meta.fail("keys and values of different sizes are not supported in GGUF files")
    if meta.integer("rope.dimension_count", head_dim) != head_dim:
        raise meta.fail("partial rotary embedding is not supported in GGUF files")
    if meta.architecture == "qwen2" and head_dim != plain_head_dim:
        raise meta.fail(f"qwen2 with heads of {head_dim} instead of {plain_head_dim} is not supported")
    window = meta.integer("attention.sliding_window", 0)
    if 0 < window < context:
        raise meta.fail(f"a sliding window ({window} tokens) is not supported in GGUF files")
    if _ROPE_FACTORS in meta.header.tensors and meta.architecture not in ("llama", "mistral"):
        raise meta.fail(f"{_ROPE_FACTORS} is not supported for {meta.architecture}")


def _rope_scaling(meta: _Metadata) -> dict[str, Any] | None:
    kind = meta.text("rope.scaling.type", "none")
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0))
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return {"type": "linear", "factor": factor}
    if kind != "none":
        raise meta.fail(f"rope scaling {kind!r} is not supported in GGUF files, only linear")
    return None


def _build(header: GGUFHeader, config: dict[str, Any]) -> Module:
    """The mlx-lm model, its weights not yet computed."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: Module = module.Model(module.ModelArgs.from_dict(config))
    if _ROPE_FACTORS in header.tensors:
        _set_rope_factors(model, header, config)
    return model


def _set_rope_factors(model: Module, header: GGUFHeader, config: dict[str, Any]) -> None:
    """Llama 3's scaling, which the file stores as one factor per frequency: theta_i / factor_i."""
    info = header.tensors[_ROPE_FACTORS]
    factors = read_tensor(header.path, info)
    head_dim = config["head_dim"]
    if isinstance(factors, Packed) or factors.shape != (head_dim // 2,):
        raise ModelFormatError(f"{header.path}: {_ROPE_FACTORS} is {info.type} of shape {info.shape}")
    exponents = mx.arange(0, head_dim, 2, dtype=mx.float32) / head_dim
    periods = config["rope_theta"] ** exponents * factors.astype(mx.float32)
    mx.eval(periods)
    for layer in model.layers:
        rope = Llama3RoPE(head_dim, config["max_position_embeddings"], True, config["rope_theta"], {"factor": 1.0})
        rope._freqs = periods
        layer.self_attn.rope = rope


def _module_of_tensor(header: GGUFHeader, config: dict[str, Any]) -> dict[str, str]:
    """Tensor name -> parameter of the model, for every tensor of the file that is a weight."""
    found: dict[str, str] = {}
    for name in header.tensors:
        if name == _ROPE_FACTORS:
            continue
        parts = name.split(".")
        prefix = None
        if len(parts) == 2:
            prefix = _TOP.get(parts[0])
        elif len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in _LAYER:
            prefix = f"model.layers.{int(parts[1])}.{_LAYER[parts[2]]}"
        if prefix is None or parts[-1] not in ("weight", "bias"):
            raise ModelFormatError(f"{header.path}: tensor {name!r} is not part of a {config['model_type']} model")
        found[name] = f"{prefix}.{parts[-1]}"
    return found


def _quantize(model: Module, header: GGUFHeader, modules: dict[str, str], config: dict[str, Any]) -> None:
    """Makes the layers whose weights are packed in the file into quantized layers."""
    bits = {
        parameter.removesuffix(".weight"): BITS[header.tensors[name].type]
        for name, parameter in modules.items()
        if header.tensors[name].type in BITS
    }
    if not bits:
        return

    def choose(path: str, module: Module) -> bool | dict[str, int]:
        return {"group_size": GROUP_SIZE, "bits": bits[path]} if path in bits else False

    quantize(model, group_size=GROUP_SIZE, bits=4, class_predicate=choose)
    config["quantization"] = {"group_size": GROUP_SIZE, "bits": min(bits.values())} | {
        path: {"group_size": GROUP_SIZE, "bits": width} for path, width in bits.items()
    }


def _check_parameters(model: Module, header: GGUFHeader, modules: dict[str, str], dequantize: bool) -> None:
    """Every parameter of the model has one tensor of its shape in the file, and no tensor is left
    over.
    """
    parameters: Any = tree_flatten(dict(model.parameters()))
    shapes = {name: tuple(array.shape) for name, array in parameters if not name.endswith((".scales", ".biases"))}
    for name, parameter in modules.items():
        info = header.tensors[name]
        if parameter not in shapes:
            raise ModelFormatError(f"{header.path}: tensor {name!r} does not belong to the model")
        expected = shapes.pop(parameter)
        shape = info.shape
        if info.type in BITS and not dequantize:
            shape = (*shape[:-1], shape[-1] * BITS[info.type] // 32)
        if shape != expected:
            raise ModelFormatError(f"{header.path}: tensor {name!r} has shape {shape}, the model needs {expected}")
    if shapes:
        raise ModelFormatError(f"{header.path}: no tensor for {min(shapes)} of the model")


def _weights(tensor: mx.array | Packed, parameter: str, dtype: mx.Dtype, dequantize: bool) -> dict[str, mx.array]:
    if not isinstance(tensor, Packed):
        return {parameter: tensor.astype(dtype)}
    if dequantize:
        return {parameter: tensor.dequantize(dtype)}
    module = parameter.removesuffix(".weight")
    return {
        parameter: tensor.weight,
        f"{module}.scales": tensor.scales.astype(dtype),
        f"{module}.biases": tensor.biases.astype(dtype),
    }
