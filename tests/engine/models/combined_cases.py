"""Geometries of families that combine parts of others, one for each family: all parts are tested with those."""

from __future__ import annotations

from typing import Any

ODD_HEADS = {"head_dim": 20, "num_attention_heads": 3, "num_key_value_heads": 1}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.7,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
MROPE = {"rope_theta": 5000.0, "mrope_section": [2, 2, 2]}

COMBINED_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "internlm3": ("internlm3", {"head_dim": 20, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("iquestcoder", {"head_dim": 20, "shards": 3}),
    "cwm": ("cwm", {**ODD_HEADS, "num_hidden_layers": 5, "sliding_window": 7, "bos_token_id": 1}),
    "helium": ("helium", {"head_dim": 12, "num_key_value_heads": 1, "mlp_bias": True}),
    "cohere": ("cohere", {"num_attention_heads": 3, "num_key_value_heads": 1, "attention_bias": True}),
    "hyperclovax": ("hyperclovax", {**MULTIPLIERS, **ODD_HEADS, "tie_word_embeddings": True}),
    "granitemoeshared": (
        "granitemoeshared",
        {**MULTIPLIERS, "num_local_experts": 5, "shared_intermediate_size": 28, "shards": 3},
    ),
    "granite-swa": (
        "granite_swa",
        {
            **MULTIPLIERS,
            "num_hidden_layers": 5,
            "sliding_window": 7,
            "layer_rope_theta": [1000.0, 100.0, 0, 1000.0, 0],
        },
    ),
    "granitemoe-swa": (
        "granitemoe_swa",
        {**MULTIPLIERS, "num_local_experts": 5, "sliding_window": 7, "num_key_value_heads": 1},
    ),
    "vaultgemma": ("vaultgemma", {**ODD_HEADS, "sliding_window": 7, "attn_logit_softcapping": 2.0}),
    "flex-olmo": ("flex_olmo", {"num_experts": 7, "num_experts_per_tok": 3, "num_key_value_heads": 1}),
    "minimax-m2": (
        "minimax_m2",
        {**ODD_HEADS, "rotary_dim": 12, "num_local_experts": 7, "num_experts_per_tok": 3, "shards": 3},
    ),
    "ernie4.5-moe": (
        "ernie4_5_moe",
        {
            "num_hidden_layers": 4,
            "moe_num_experts": 7,
            "moe_k": 3,
            "moe_intermediate_size": 20,
            "moe_layer_interval": 2,
        },
    ),
    "solar-open": (
        "solar_open",
        {**ODD_HEADS, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
    ),
    "exaone-moe": (
        "exaone_moe",
        {**EXPERTS, **ODD_HEADS, "num_hidden_layers": 3, "sliding_window": 7, "sliding_window_pattern": 2},
    ),
    "hy-v3": ("hy_v3", {**EXPERTS, **ODD_HEADS, "mlp_bias": True, "shards": 3}),
    "lfm2-moe": (
        "lfm2_moe",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "afmoe": (
        "afmoe",
        {
            **EXPERTS,
            **ODD_HEADS,
            "num_hidden_layers": 3,
            "num_shared_experts": 2,
            "global_attn_every_n_layers": 2,
            "sliding_window": 7,
            "route_scale": 1.5,
            "mup_enabled": True,
        },
    ),
    "flint": (
        "flint",
        {
            **EXPERTS,
            **ODD_HEADS,
            "num_hidden_layers": 6,
            "mlp_only_layers": [0],
            "sliding_window": 7,
            "shared_expert_intermediate_size": 28,
        },
    ),
    "gemma4-unified-text": ("gemma4_unified_text", {"num_hidden_layers": 6, "sliding_window": 7}),
    "gemma4-unified": ("gemma4_unified", {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2}),
    "mellum": (
        "mellum",
        {
            **EXPERTS,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "sliding_window": 7,
            "attention_bias": True,
        },
    ),
    "qwen2-vl": ("qwen2_vl", {"rope_parameters": {**MROPE, "type": "mrope"}, "tie_word_embeddings": True}),
    "qwen2.5-vl": ("qwen2_5_vl", {"rope_parameters": {**MROPE, "type": "mrope"}, "shards": 3}),
    "qwen3-vl": ("qwen3_vl", {**ODD_HEADS, "rope_parameters": {**MROPE, "rope_type": "default"}, "shards": 3}),
    "qwen3-vl-moe": ("qwen3_vl_moe", {**EXPERTS, "head_dim": 12, "mlp_only_layers": [0]}),
}
