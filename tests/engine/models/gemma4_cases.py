"""Geometries of Gemma 4: dense ones, mixtures, and small ones with per-layer vectors and shared keys and values."""

from __future__ import annotations

from typing import Any

_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.4, "rope_theta": 3000.0, "factor": 2.0},
}
_ODD = {"vocab_size": 1003}
_EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 20}

GEMMA4_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": (
        "gemma4_text",
        {
            "num_hidden_layers": 7,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 7,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4-odd-heads-untied-shards": (
        "gemma4_text",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 20,
            "global_head_dim": 12,
            "num_global_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 5,
            "rope_parameters": _ROPE,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "shards": 3,
            **_ODD,
        },
    ),
    "gemma4-equal-heads-window-of-one": (
        "gemma4_text",
        {"num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 16, "sliding_window": 1, "num_key_value_heads": 4},
    ),
    "gemma4-experts": (
        "gemma4_text",
        {**_EXPERTS, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 6},
    ),
    "gemma4-experts-one-chosen-odd-heads": (
        "gemma4_text",
        {
            **_EXPERTS,
            "num_experts": 7,
            "top_k_experts": 1,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "global_head_dim": 40,
            "layer_types": ["full_attention", "full_attention"],
            "shards": 3,
            **_ODD,
        },
    ),
    "gemma4-experts-all-chosen-shared": (
        "gemma4_text",
        {
            **_EXPERTS,
            "num_experts": 3,
            "top_k_experts": 3,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "sliding_window": 9,
            "hidden_size_per_layer_input": 6,  # without, transformers fails where layers share
            "tie_word_embeddings": False,
        },
    ),
    "gemma4-small": (
        "gemma4_text",
        {
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", *["sliding_attention"] * 4],
            "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 12,
            "use_double_wide_mlp": True,
            "sliding_window": 7,
            "num_key_value_heads": 1,
        },
    ),
    "gemma4-small-one-shared-odd": (
        "gemma4_text",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 5,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 10,
            "rope_parameters": _ROPE,
            "final_logit_softcapping": 5.0,
            "shards": 3,
            **_ODD,
        },
    ),
    "gemma4-small-most-shared-k-is-v": (
        "gemma4_text",
        {
            "num_hidden_layers": 8,
            "layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"] * 2,
            "num_kv_shared_layers": 6,
            "hidden_size_per_layer_input": 16,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "sliding_window": 4,
            "tie_word_embeddings": False,
            "hidden_activation": "gelu",
        },
    ),
    "gemma4-beside-images": ("gemma4", {"num_hidden_layers": 6, "sliding_window": 7, "shards": 3}),
    "gemma4-beside-images-small": (
        "gemma4",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 8,
            "use_bidirectional_attention": "vision",
        },
    ),
}

SLOW_GEMMA4_CASES = (
    "gemma4-odd-heads-untied-shards",
    "gemma4-equal-heads-window-of-one",
    "gemma4-experts-one-chosen-odd-heads",
    "gemma4-experts-all-chosen-shared",
    "gemma4-small-one-shared-odd",
    "gemma4-beside-images-small",
)
"""Cases left to `make test-slow`: of each sort one or two are quick enough."""
