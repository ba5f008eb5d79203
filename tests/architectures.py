"""Small random-weight configurations of mlx-lm's own models, one or more per cache layer kind."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from onekv.doctor import models
from onekv.doctor.models import SEED, random_model

VOCAB = 128


@dataclass(frozen=True)
class Architecture:
    """One configuration of a module of ``mlx_lm.models``."""

    module: str
    """Name of the module in ``mlx_lm.models``."""
    config: dict[str, Any]
    """What ``ModelArgs.from_dict`` gets; ``model_type`` is the module unless it is given."""
    caches: tuple[str, ...]
    """The stock caches in order, as :func:`cache_kind` spells them."""
    chunk_exact: bool | None = True
    """Whether stock chunked and one-shot prefill agree; None where that depends on rounding."""
    reason: str = ""
    """Why ``chunk_exact`` is not true."""
    int_offset: bool = False
    """Whether ``cache.offset`` must be a Python int: an array of shape [B > 1] raises."""
    batch_gap: str = ""
    """Why stock batched caches raise or give other logits; empty when they agree."""


_LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_MLA: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
_DEEPSEEK: dict[str, Any] = {
    **_MLA,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
_LONGCAT: dict[str, Any] = {
    **_MLA,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 128,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "num_layers": 2,
    "routed_scaling_factor": 1.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
_SLIDING4 = ["sliding_attention", "full_attention"] * 2
_KV = "KV"
_ROT = "Rotating"
_ARR = "Arrays"

ARCHITECTURES: dict[str, Architecture] = {
    # KVCache in every layer.
    "llama": Architecture("llama", _LLAMA, (_KV,) * 2),
    "llama-tied-bias": Architecture(
        "llama",
        {**_LLAMA, "tie_word_embeddings": True, "attention_bias": True, "rope_traditional": True},
        (_KV,) * 2,
    ),
    "llama-dynamic-rope": Architecture(
        "llama",
        {
            **_LLAMA,
            "max_position_embeddings": 96,
            "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        },
        (_KV,) * 2,
        chunk_exact=False,
        reason="past max_position_embeddings the rope base of a chunk follows the chunk's end",
        int_offset=True,
        batch_gap="DynamicNTKScalingRoPE takes max() of the offset",
    ),
    "qwen2": Architecture("qwen2", _LLAMA, (_KV,) * 2),
    "qwen3": Architecture("qwen3", _LLAMA, (_KV,) * 2),
    "qwen3_moe": Architecture(
        "qwen3_moe",
        {
            **_LLAMA,
            "num_hidden_layers": 3,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0],
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        (_KV,) * 3,
    ),
    "gemma2": Architecture(
        "gemma2",
        {**_LLAMA, "query_pre_attn_scalar": 16.0},
        (_KV,) * 2,
        batch_gap="its mask [B,1,L,S] meets scores [B,kv,repeats,L,S]: batch lands on kv heads",
    ),
    "phi3": Architecture("phi3", _LLAMA, (_KV,) * 2),
    "olmo2": Architecture("olmo2", _LLAMA, (_KV,) * 2),
    "mixtral": Architecture("mixtral", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}, (_KV,) * 2),
    "starcoder2": Architecture("starcoder2", _LLAMA, (_KV,) * 2),
    "glm4": Architecture("glm4", {**_LLAMA, "attention_bias": True, "partial_rotary_factor": 0.5}, (_KV,) * 2),
    "stablelm": Architecture(
        "stablelm",
        {
            **_LLAMA,
            "use_qkv_bias": True,
            "partial_rotary_factor": 0.25,
            "layer_norm_eps": 1e-5,
            "qk_layernorm": True,
        },
        (_KV,) * 2,
    ),
    "gpt_bigcode": Architecture(
        "gpt_bigcode",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_inner": 128,
            "n_head": 4,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "vocab_size": VOCAB,
        },
        (_KV,) * 2,
        int_offset=True,
        batch_gap="positions are np.arange(offset, ...)",
    ),
    "llama4_text": Architecture(
        "llama4_text",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 128,
            "no_rope_layers": [1, 1, 1, 0],
            "use_qk_norm": True,
        },
        (_KV,) * 4,
    ),
    # Multi-head latent attention: keys and values of different widths.
    "deepseek_v2": Architecture(
        "deepseek_v2",
        {
            **_DEEPSEEK,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "mscale": 0.7,
                "mscale_all_dim": 0.7,
            },
        },
        (_KV,) * 3,
    ),
    "deepseek_v3": Architecture("deepseek_v3", {**_DEEPSEEK, "n_group": 2, "topk_group": 1}, (_KV,) * 3),
    "minicpm3": Architecture(
        "minicpm3",
        {
            **_LLAMA,
            **_MLA,
            "num_key_value_heads": 4,
            "dim_model_base": 64,
            "scale_depth": 1.4,
            "scale_emb": 2.0,
            "rope_scaling": {
                "original_max_position_embeddings": 2048,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0 + 0.1 * i for i in range(8)],
            },
        },
        (_KV,) * 2,
    ),
    # Fewer caches than layers: later layers read the keys and values of earlier ones.
    "afm7": Architecture(
        "afm7",
        {
            "vocab_size": VOCAB,
            "hidden_dim": 64,
            "num_layers": 4,
            "num_kv_reuse_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
        (_KV,) * 2,
        batch_gap="reuse layers rotate queries by the padded key length",
    ),
    "gemma3n": Architecture(
        "gemma3n",
        {
            "text_config": {
                **_LLAMA,
                "model_type": "gemma3n_text",
                "num_hidden_layers": 6,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": VOCAB,
                "sliding_window": 40,
                "rope_local_base_freq": 10000.0,
                "final_logit_softcapping": 30.0,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
                "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
                "hidden_size_per_layer_input": 16,
                "altup_num_inputs": 4,
                "altup_coef_clip": 120.0,
                "altup_correct_scale": True,
                "altup_active_idx": 0,
                "laurel_rank": 8,
            }
        },
        (_ROT, _KV) * 2,
    ),
    "gemma4_text": Architecture(
        "gemma4_text",
        {
            **_LLAMA,
            "num_hidden_layers": 6,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 2,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "tie_word_embeddings": True,
        },
        (_ROT, _KV) * 2,
    ),
    "gemma4_text-k_eq_v": Architecture(
        "gemma4_text",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "sliding_window": 40,
            "layer_types": _SLIDING4,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        (_ROT, _KV) * 2,
    ),
    # KVCache and RotatingKVCache.
    "llama-sliding": Architecture(
        "llama",
        {**_LLAMA, "num_hidden_layers": 4, "layer_types": _SLIDING4, "sliding_window": 40},
        (_ROT, _KV) * 2,
    ),
    "ministral3": Architecture(
        "ministral3",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "layer_types": _SLIDING4,
            "sliding_window": 24,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "default",
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 64,
            },
        },
        (_ROT, _KV) * 2,
    ),
    "gemma3_text": Architecture(
        "gemma3_text",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 16,
            "sliding_window": 32,
            "sliding_window_pattern": 2,
        },
        (_ROT, _KV) * 2,
    ),
    "gpt_oss": Architecture(
        "gpt_oss",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
        },
        (_ROT, _KV) * 2,
    ),
    "cohere2": Architecture(
        "cohere2",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "logit_scale": 1.0,
            "sliding_window": 40,
            "sliding_window_pattern": 2,
        },
        (_ROT, _KV) * 2,
    ),
    "olmo3": Architecture(
        "olmo3",
        {**_LLAMA, "num_hidden_layers": 4, "sliding_window": 24, "layer_types": _SLIDING4},
        (_ROT, _KV) * 2,
    ),
    "exaone4": Architecture(
        "exaone4",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "rope_scaling": None,
            "sliding_window": 32,
            "sliding_window_pattern": "LG",
        },
        (_ROT, _KV) * 2,
    ),
    "mimo_v2_flash": Architecture(
        "mimo_v2_flash",
        {
            **models.KINDS["attention sinks"],
            **_LLAMA,
            "num_hidden_layers": 4,
            "hybrid_layer_pattern": [0, 1, 0, 1],
            "moe_layer_freq": [0, 1, 0, 1],
            "add_full_attention_sink_bias": False,
            "sliding_window_size": 24,
            "swa_num_key_value_heads": 4,
            "head_dim": 32,
            "v_head_dim": 16,
            "swa_head_dim": 32,
            "swa_v_head_dim": 16,
        },
        (_KV, _ROT) * 2,
    ),
    "iquestloopcoder": Architecture("iquestloopcoder", {**_LLAMA, "loop_window_size": 24}, (_KV,) * 2 + (_ROT,) * 2),
    # ChunkedKVCache.
    "llama4": Architecture(
        "llama4",
        {
            "text_config": {
                **_LLAMA,
                "model_type": "llama4_text",
                "num_hidden_layers": 4,
                "attention_bias": False,
                "attention_chunk_size": 32,
                "interleave_moe_layer_step": 2,
                "intermediate_size_mlp": 128,
                "num_experts_per_tok": 1,
                "num_local_experts": 4,
                "rope_scaling": None,
                "use_qk_norm": True,
                "floor_scale": 64,
            }
        },
        ("Chunked",) * 3 + (_KV,),
        int_offset=True,
        batch_gap="ChunkedKVCache has no merge; masks are mx.arange(offset, ...)",
    ),
    # ArraysCache in every layer.
    "mamba": Architecture(
        "mamba",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 128,
            "state_size": 8,
            "num_hidden_layers": 2,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_rank": 4,
        },
        (_ARR,) * 2,
    ),
    "mamba2": Architecture(
        "mamba2",
        {**models.KINDS["recurrent"], "head_dim": 32, "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128},
        (_ARR,) * 2,
    ),
    "rwkv7": Architecture(
        "rwkv7",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 128,
            "norm_eps": 1e-5,
            "head_dim": 32,
            "num_hidden_layers": 2,
            "a_low_rank_dim": 8,
            "v_low_rank_dim": 8,
            "gate_low_rank_dim": 8,
            "decay_low_rank_dim": 8,
        },
        (_ARR,) * 2,
    ),
    # ArraysCache and KVCache.
    "qwen3_next": Architecture(
        "qwen3_next",
        {
            **_LLAMA,
            **_DELTA,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 32,
            "mlp_only_layers": [],
            "moe_intermediate_size": 32,
            "partial_rotary_factor": 0.5,
        },
        (_ARR, _KV) * 2,
    ),
    "qwen3_5": Architecture(
        "qwen3_5",
        {
            "text_config": {
                **_LLAMA,
                **_DELTA,
                "num_hidden_layers": 4,
                "rope_parameters": {
                    "type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                },
            }
        },
        (_ARR, _KV) * 2,
    ),
    "nemotron_h": Architecture(
        "nemotron_h",
        {
            **_LLAMA,
            "attention_bias": False,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "mamba_proj_bias": False,
            "ssm_state_size": 32,
            "conv_kernel": 4,
            "n_groups": 2,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
            "hybrid_override_pattern": ["M", "*", "-", "M", "*", "-"],
        },
        (_ARR, _KV) * 2,
    ),
    "lfm2": Architecture(
        "lfm2",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "norm_eps": 1e-5,
            "conv_bias": True,
            "conv_L_cache": 3,
            "block_dim": 64,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
            "layer_types": ["conv", "full_attention"] * 2,
        },
        (_ARR, _KV) * 2,
    ),
    "jamba": Architecture(
        "jamba",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 8,
            "mamba_expand": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        (_ARR, _KV) * 2,
    ),
    "granitemoehybrid": Architecture(
        "granitemoehybrid",
        {
            **_LLAMA,
            **_MAMBA2,
            "num_hidden_layers": 4,
            "attention_bias": False,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 0.25,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
        },
        (_ARR, _KV) * 2,
    ),
    "kimi_linear": Architecture(
        "kimi_linear",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "linear_attn_config": {
                "kda_layers": [1, 3],
                "full_attn_layers": [2, 4],
                "num_heads": 4,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
            },
            "model_max_length": 4096,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "mla_use_nope": True,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        (_ARR, _KV) * 2,
    ),
    # ArraysCache and RotatingKVCache; all three kinds.
    "recurrent_gemma": Architecture(
        "recurrent_gemma",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "attention_bias": False,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "attention_window_size": 40,
            "block_types": ["recurrent", "attention"],
        },
        (_ARR, _ROT) * 2,
    ),
    "gear": Architecture(
        "gear",
        {
            **_LLAMA,
            "num_hidden_layers": 6,
            "layer_types": ["conv_mixer", "sliding_attention", "full_attention"] * 2,
            "sliding_window": 24,
        },
        (_ARR, _ROT, _KV) * 2,
    ),
    # CacheList.
    "falcon_h1": Architecture(
        "falcon_h1",
        {**models.KINDS["composite"], **_LLAMA, **_MAMBA2, "mamba_d_ssm": 64},
        ("List(Arrays,KV)",) * 2,
    ),
    "baichuan_m1": Architecture(
        "baichuan_m1",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "sliding_window": 40,
            "sliding_window_layers": [0, 2],
            "conv_window": 2,
            "num_swa_attention_heads": 2,
            "num_swa_key_value_heads": 1,
        },
        ("List(Arrays,Rotating)", "List(Arrays,KV)") * 2,
    ),
    "longcat_flash": Architecture("longcat_flash", _LONGCAT, ("List(KV,KV)",) * 2),
    "longcat_flash_ngram": Architecture(
        "longcat_flash_ngram",
        {**_LONGCAT, "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 2},
        (_ARR, *("List(KV,KV)",) * 2),
    ),
    "deepseek_v32": Architecture(
        "deepseek_v32",
        {**_DEEPSEEK, "index_head_dim": 32, "index_n_heads": 4, "index_topk": 40},
        ("List(KV,KV)",) * 3,
    ),
    "minimax_m3_vl": Architecture(
        "minimax_m3_vl",
        {
            "text_config": {
                **_LLAMA,
                "num_hidden_layers": 4,
                "intermediate_size": 32,
                "dense_intermediate_size": 128,
                "shared_intermediate_size": 32,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "moe_layer_freq": [0, 1, 1, 1],
                "layer_types": ["full_attention", "sparse"] * 2,
                "index_n_heads": 2,
                "index_head_dim": 16,
                "index_block_size": 8,
                "index_topk_blocks": 4,
            }
        },
        ("List(KV)", "List(KV,KV)") * 2,
        batch_gap="index blocks are cut over cache slots, so padding shifts them",
    ),
    # A cache class of the model's own.
    "deepseek_v41": Architecture(
        "deepseek_v41",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 16,
            "o_groups": 2,
            "o_lora_rank": 16,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-6,
            "sliding_window": 24,
            "compress_ratios": (0, 4, 4, 4),
            "kv_source_layer_ids": (1, 3),
            "index_source_layer_ids": (1, 3),
            "index_n_heads": 2,
            "index_head_dim": 32,
            "index_topk": 16,
            "hc_mult": 2,
        },
        ("Layer",) * 4,
        int_offset=True,
        chunk_exact=None,
        reason="chooses what to read by scores, which rounding can reorder",
        batch_gap="LayerCache has no merge",
    ),
}


def cache_kind(cache: Any) -> str:
    """Short name of a stock cache: ``KV``, ``Rotating``, ``List(Arrays,KV)`` and so on."""
    name = type(cache).__name__
    if name == "CacheList":
        return f"List({','.join(cache_kind(part) for part in cache.caches)})"
    return name.removesuffix("Cache").removesuffix("KV") or "KV"


def build(name: str, **changes: Any) -> nn.Module:
    """The model of ``ARCHITECTURES[name]``, with `changes` to its configuration; float32, always the same weights."""
    architecture = ARCHITECTURES[name]
    config = {"model_type": architecture.module, **copy.deepcopy(architecture.config), **changes}
    return random_model(config, SEED)


# One of each kind of memory: for what would take too long with all of them.
KINDS = [
    "llama",
    "gemma2",
    "deepseek_v3",
    "gemma3n",
    "gemma3_text",
    "gpt_oss",
    "llama4",
    "mamba",
    "rwkv7",
    "qwen3_next",
    "nemotron_h",
    "recurrent_gemma",
    "falcon_h1",
    "baichuan_m1",
    "deepseek_v32",
    "minimax_m3_vl",
]
