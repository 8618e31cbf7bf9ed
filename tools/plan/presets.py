"""Geometries of well-known models, for planning without a checkpoint.

Most are from the config.json that the authors published: Qwen3, Qwen3-30B-A3B (Qwen), Llama-3.1-8B and
Llama-3.3-70B-Instruct (meta-llama), Mixtral-8x7B-v0.1 (mistralai), gemma-3-27b-it (google; its `text_config`, with
defaults from `transformers`), gpt-oss-20b and gpt-oss-120b (openai, with experts in mxfp4).

Qwen3.6 (Qwen; the text part, which is all that is served) is from the model cards. What these leave out, such as the
convolution's width and norms, is from `transformers`' `qwen3_5_text` and `qwen3_5_moe_text`.

gemma-4-31B and gemma-4-26B-A4B (google; `text_config`) are as several public projects quote them, since neither was at
hand. Ropes, and everything else that those do not quote, are from `transformers`.

A test compares the resulting numbers of parameters with the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from penstock.engine.formats.detection import read_format
from penstock.engine.loading.packed import expected_packings
from penstock.engine.models import FAMILIES, ModelConfig

_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": tied,
    }  # fmt: skip


def _llama3(hidden: int, intermediate: int, layers: int, heads: int, rope: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "rope_scaling": dict(rope),
    }  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": layers,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "max_position_embeddings": 131072, "num_local_experts": experts, "num_experts_per_tok": 4,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        },
    }  # fmt: skip


def _qwen3_6(hidden: int, layers: int, heads: int, kv_heads: int, value_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "vocab_size": 248320,
        "max_position_embeddings": 262144, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }  # fmt: skip


def _gemma4(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, full_kv: int) -> dict[str, Any]:
    return {
        "model_type": "gemma4_text", "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "num_global_key_value_heads": full_kv, "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True,
        "sliding_window": 1024, "max_position_embeddings": 262144, "vocab_size": 262144,
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
    }  # fmt: skip


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
        "Llama-3.1-8B": _llama3(4096, 14336, 32, 32, _LLAMA_3_ROPE),
        "Qwen3-32B": _qwen3(5120, 25600, 64, 64, tied=False),
        "Qwen3-30B-A3B": {
            **_qwen3(2048, 6144, 48, 32, tied=False),
            "model_type": "qwen3_moe",
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        "Mixtral-8x7B": {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "rope_theta": 1e6,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        "Gemma-3-27B": {
            "model_type": "gemma3_text",
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "query_pre_attn_scalar": 168,
            "sliding_window": 1024,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "vocab_size": 262208,
        },
        "Qwen3.6-27B": {
            **_qwen3_6(5120, 64, 24, 4, 48),
            "model_type": "qwen3_5_text",
            "intermediate_size": 17408,
        },
        "Qwen3.6-35B-A3B": {
            **_qwen3_6(2048, 40, 16, 2, 32),
            "model_type": "qwen3_5_moe_text",
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        "Gemma-4-31B": _gemma4(5376, 21504, 60, 32, 16, 4),
        "Gemma-4-26B-A4B": {
            **_gemma4(2816, 2112, 30, 16, 8, 2),
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
        "Llama-3.3-70B": _llama3(8192, 28672, 80, 64, _LLAMA_3_ROPE),
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
    }
)
"""Fields of config.json by model name."""


def preset(name: str, dtype: str = "bfloat16", weights: str = "auto") -> ModelConfig | None:
    """Returns the preset with that name, ignoring case, or None if there is none.

    Its weights are as published, or quantized as the setting `weights` says.

    Raises:
        ConfigError: `weights` is set for a model that is published quantized.
    """
    for known, fields in PRESETS.items():
        if known.lower() == name.lower():
            family = FAMILIES[fields["model_type"]]
            return expected_packings(read_format(fields), family, family.config(fields, dtype), weights)
    return None
