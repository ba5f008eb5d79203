"""Small random models built from mlx-lm's own classes, one for each kind of layer.

Head dims are those that OneKV's kernels support. There are no mixtures of experts, so that the same models run in
float32, bfloat16 and float16 on every device: on CPU, `mx.gather_mm` supports float32 only.
"""

import copy
import importlib
import math
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten

VOCAB = 256
SEED = 20260730

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
_SINKS: dict[str, Any] = {
    **_LLAMA,
    "model_type": "mimo_v2_flash",
    "num_experts_per_tok": 2,
    "hybrid_layer_pattern": [0, 1],
    "moe_layer_freq": [0, 0],
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": True,
    "sliding_window_size": 64,
    "moe_intermediate_size": 32,
    "n_shared_experts": None,
    "n_routed_experts": 4,
    "routed_scaling_factor": None,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "layernorm_epsilon": 1e-5,
    "swa_rope_theta": 10000.0,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "v_head_dim": 128,
    "swa_head_dim": 128,
    "swa_v_head_dim": 128,
    "partial_rotary_factor": 0.5,
}
_RECURRENT: dict[str, Any] = {
    "model_type": "mamba2",
    "num_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "state_size": 32,
    "num_hidden_layers": 2,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 2,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": False,
    "time_step_limit": (0.0, 100.0),
    "time_step_rank": "auto",
}
_COMPOSITE: dict[str, Any] = {
    **_LLAMA,
    "model_type": "falcon_h1",
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "mamba_d_ssm": 128,
    "embedding_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "key_multiplier": 1.0,
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
}
_CHUNKED: dict[str, Any] = {
    **_LLAMA,
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "attention_bias": False,
    "attention_chunk_size": 64,
    # Larger than the number of layers: none has experts.
    "interleave_moe_layer_step": 100,
    "intermediate_size_mlp": 256,
    "num_experts_per_tok": 1,
    "num_local_experts": 4,
    "rope_scaling": None,
    "use_qk_norm": True,
    "floor_scale": 64,
}

# Configurations for `ModelArgs.from_dict` of the module `model_type`, by kind of layer.
KINDS: dict[str, dict[str, Any]] = {
    "full attention": _LLAMA,
    "sliding window": {
        **_LLAMA,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 128,
        "sliding_window": 64,
        "sliding_window_pattern": 2,
    },
    "attention sinks": _SINKS,
    "chunked attention": {"model_type": "llama4", "text_config": _CHUNKED},
    "latent attention": _LATENT,
    "recurrent": _RECURRENT,
    "composite": _COMPOSITE,
}


def small_model(kind: str, **changes: Any) -> Any:
    """The model of `KINDS[kind]` with changes to its configuration; the same weights every time."""
    return random_model({**KINDS[kind], **changes}, SEED)


def random_model(config: dict[str, Any], seed: int) -> Any:
    """A model from mlx-lm's module `model_type`, with float32 weights that keep activations near unit variance."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    # Some classes modify the configuration they are given.
    model: Module = module.Model(module.ModelArgs.from_dict(copy.deepcopy(config)))
    model.set_dtype(mx.float32)
    flat: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    weights = [(path, _weight(path, value)) for path, value in sorted(flat, key=lambda item: item[0])]
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


_CENTRES = {
    # Recurrences that forget slowly, so that the last token still sees the first ones.
    "A_log": -2.0,
    "dt_bias": -2.0,
    "dt_proj.bias": -2.0,
    "recurrent_param": -6.0,
    "w_lora.lora.2.bias": -4.0,
    # Zero in mlx-lm before the weights are loaded.
    "conv_k": 0.7,
    "conv_v": 0.7,
    "k_k": 1.0,
    "k_a": 1.0,
    "g_norm.weight": 1.0,
    "x_r": 0.5,
    "x_w": 0.5,
    "x_k": 0.5,
    "x_v": 0.5,
    "x_a": 0.5,
    "x_g": 0.5,
    "r_k": 0.0,
    "correct_output_scale": 1.0,
}
_PEAKED = ("q_proj", "k_proj", "qkv_proj", "W_pack", "c_attn", "wq_b", "wk")


def _weight(path: str, value: mx.array) -> mx.array:
    """Random values for one parameter."""
    noise = mx.random.normal(value.shape)
    for suffix, centre in _CENTRES.items():
        if path.endswith("." + suffix):
            return centre + 0.2 * noise
    if value.ndim < 2:
        # Norms keep their ones or zeros as the centre; constructors leave biases near zero.
        return mx.round(mx.mean(value)) + 0.1 * noise
    if "conv" in path and value.ndim == 3:
        return noise / math.sqrt(value.shape[1] * value.shape[2])
    if "embed" in path or path.endswith(("wte.weight", "lm_head.weight", "output.weight")):
        return 2.0 * noise / math.sqrt(value.shape[-1])
    gain = 1.5 if path.split(".")[-2] in _PEAKED else 1.0
    return gain * noise / math.sqrt(value.shape[-1])
