"""Every family against transformers, on tiny random checkpoints of odd geometries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from penstock.engine.execution.state_cache import init_states, state_arrays
from penstock.engine.loading.checkpoint import load_model, read_model_config
from penstock.engine.models import QKV, AttentionOptions, GroupCache, ModelConfig, StackedCache, layer_groups
from penstock.engine.models.layers.recurrence import StateBatch
from tests.engine.checkpoints import VOCAB_SIZE, edit_config, reference_logits, write_checkpoint
from tests.engine.models.combined_cases import COMBINED_CASES
from tests.engine.models.gemma4_cases import GEMMA4_CASES, SLOW_GEMMA4_CASES
from tests.support.patience import slow

NUM_TOKENS = 40
TOKENS = np.random.default_rng(7).integers(0, VOCAB_SIZE, NUM_TOKENS).tolist()

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.4, 1.6, 1.8],
    "long_factor": [1.0, 2.0, 2.5, 3.0, 5.0, 9.0],
}
PARTIAL = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.75}
MINISTRAL = {**YARN, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.7,
}
YARN_OF_OLD = {key: value for key, value in YARN.items() if key != "rope_theta"}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 5000.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-one-kv-head-tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-biases-head-dim": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    "llama-three-shards-gelu": ("llama", {"shards": 3, "hidden_act": "gelu_pytorch_tanh", "num_hidden_layers": 3}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama-no-gqa": ("llama", {"num_key_value_heads": None}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7, "head_dim": 16, "tie_word_embeddings": True}),
    "mistral-window-of-one": ("mistral", {"sliding_window": 1, "num_key_value_heads": 1}),
    "mixtral": ("mixtral", {"num_local_experts": 3, "shards": 3}),
    "mixtral-window-tied": ("mixtral", {"sliding_window": 5, "tie_word_embeddings": True, "vocab_size": 1003}),
    "mixtral-one-of-seven": ("mixtral", {"num_local_experts": 7, "num_experts_per_tok": 1, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"rope_parameters": DEFAULT_ROPE}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-some-layers-slide": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen2-window-switched-off": ("qwen2", {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3": ("qwen3", {"head_dim": 24, "num_key_value_heads": 1, "shards": 3}),
    "qwen3-tied-default-head-dim": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biases-yarn": (
        "qwen3",
        {"head_dim": 12, "attention_bias": True, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "qwen3-layer-types": (
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
        },
    ),
    "qwen2-moe-dense-layers-windows": (
        "qwen2_moe",
        {
            "num_experts": 8,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 16,
            "norm_topk_prob": True,
            "num_hidden_layers": 4,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 3,
            "tie_word_embeddings": True,
            "shards": 3,
        },
    ),
    "qwen2-moe-without-biases": (
        "qwen2_moe",
        {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 9,
            "shared_expert_intermediate_size": 7,
            "qkv_bias": False,
            "num_key_value_heads": 1,
            "vocab_size": 1003,
        },
    ),
    "lfm2": (
        "lfm2",
        {"num_hidden_layers": 5, "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"]},
    ),
    "lfm2-biases-seven-taps-untied": (
        "lfm2",
        {
            "num_hidden_layers": 3,
            "full_attn_idxs": [1],
            "conv_bias": True,
            "conv_L_cache": 7,
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "block_multiple_of": 10,
            "block_ffn_dim_multiplier": 1.3,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2-two-taps-three-shards": (
        "lfm2",
        {
            "num_hidden_layers": 4,
            "full_attn_idxs": [0, 3],
            "conv_L_cache": 2,
            "block_auto_adjust_ff_dim": False,
            "vocab_size": 1003,
            "shards": 3,
        },
    ),
    "qwen3-next": ("qwen3_next", {"num_hidden_layers": 4, "layer_types": None}),
    "qwen3-next-odd-heads-dense-layers-biases": (
        "qwen3_next",
        {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 9,
            "linear_key_head_dim": 7,
            "linear_value_head_dim": 5,
            "linear_conv_kernel_dim": 2,
            "attention_bias": True,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "tie_word_embeddings": True,
            "vocab_size": 1003,
        },
    ),
    "qwen3-next-no-experts-three-shards": (
        "qwen3_next",
        {
            "num_experts": 0,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 1,
            "linear_key_head_dim": 20,
            "linear_value_head_dim": 33,
            "linear_conv_kernel_dim": 7,
            "rope_parameters": PARTIAL,
            "shards": 3,
        },
    ),
    "qwen3.5-text": ("qwen3_5_text", {"num_hidden_layers": 5, "layer_types": None, "full_attention_interval": 3}),
    "qwen3.5-text-odd-heads-tied": (
        "qwen3_5_text",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 5,
            "linear_value_head_dim": 14,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
            "vocab_size": 1003,
            "hidden_act": "gelu",
        },
    ),
    "qwen3.5-text-yarn-three-shards": (
        "qwen3_5_text",
        {
            "head_dim": 24,
            "linear_num_value_heads": 2,
            "attention_bias": True,
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
            "shards": 3,
        },
    ),
    "qwen3.5-beside-images": ("qwen3_5", {"rope_parameters": {**PARTIAL, "mrope_section": [2, 2, 2]}}),
    "qwen3.5-beside-images-tied-shards": ("qwen3_5", {"tie_word_embeddings": True, "vocab_size": 1003, "shards": 3}),
    "qwen3.5-moe-text": ("qwen3_5_moe_text", {"num_experts": 5, "num_experts_per_tok": 3, "shards": 3}),
    "qwen3.5-moe-text-odd-heads-tied": (
        "qwen3_5_moe_text",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 9,
            "shared_expert_intermediate_size": 7,
            "tie_word_embeddings": True,
            "vocab_size": 1003,
        },
    ),
    "qwen3.5-moe-text-all-chosen": (
        "qwen3_5_moe_text",
        {"num_experts": 3, "num_experts_per_tok": 3, "head_dim": 20, "linear_conv_kernel_dim": 6},
    ),
    "qwen3.5-moe-beside-images": ("qwen3_5_moe", {"num_hidden_layers": 4, "layer_types": None, "shards": 3}),
    "glm4-moe": (
        "glm4_moe",
        {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "attention_bias": True},
    ),
    "glm4-moe-groups": (
        "glm4_moe",
        {
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "moe_intermediate_size": 10,
            "n_shared_experts": 2,
            "use_qk_norm": True,
            "num_hidden_layers": 3,
            "head_dim": 20,
            "shards": 3,
        },
    ),
    "glm4-moe-not-normalized": (
        "glm4_moe",
        {
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "vocab_size": 1003,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 1.0},
        },
    ),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 5, "head_dim": 20, "sliding_window": 7}),
    "gpt-oss-odd-heads-yarn-window-of-one": (
        "gpt_oss",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "sliding_window": 1,
            "num_hidden_layers": 3,
            "swiglu_limit": 0.2,
            "swiglu_alpha": 3.0,
            "rope_parameters": {**YARN, "truncate": False},
            "vocab_size": 1003,
            "shards": 3,
        },
    ),
    "gpt-oss-all-chosen-tied-layer-types": (
        "gpt_oss",
        {
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 16,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": DEFAULT_ROPE,
        },
    ),
    "dots1": (
        "dots1",
        {
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "sliding_window": 4,
            "max_window_layers": 1,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": True,
        },
    ),
    "dots1-groups-odd-heads-window-of-one": (
        "dots1",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 9,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 3,
            "norm_topk_prob": True,
            "attention_bias": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "sliding_window": 1,
            "layer_types": ["full_attention", "sliding_attention"],
            "vocab_size": 1003,
            "shards": 3,
        },
    ),
    "dots1-all-chosen-no-window": (
        "dots1",
        {
            "n_routed_experts": 3,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 7,
            "n_shared_experts": 1,
            "sliding_window": None,
            "head_dim": 20,
            "rope_parameters": YARN,
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 7, "num_experts_per_tok": 3, "num_key_value_heads": 4}),
    "olmoe-one-chosen-odd-heads-biases": (
        "olmoe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 1,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "norm_topk_prob": True,
            "attention_bias": True,
            "vocab_size": 1003,
            "shards": 3,
        },
    ),
    "olmoe-all-chosen-tied-llama3": (
        "olmoe",
        {"num_experts": 3, "num_experts_per_tok": 3, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "granitemoe": ("granitemoe", {**GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "granitemoe-one-chosen-odd-heads-tied": (
        "granitemoe",
        {
            **GRANITE,
            "num_local_experts": 7,
            "num_experts_per_tok": 1,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "vocab_size": 1003,
        },
    ),
    "granitemoe-all-chosen-biases-three-shards": (
        "granitemoe",
        {**GRANITE, "num_local_experts": 3, "num_experts_per_tok": 3, "attention_bias": True, "shards": 3},
    ),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20}),
    "qwen3-moe-normalized-dense-layers": (
        "qwen3_moe",
        {
            "num_experts": 16,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 10,
            "norm_topk_prob": True,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "tie_word_embeddings": True,
            "shards": 3,
        },
    ),
    "qwen3-moe-all-chosen-window": (
        "qwen3_moe",
        {
            "num_experts": 3,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 8,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "attention_bias": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
    ),
    "gemma": ("gemma", {"head_dim": 20, "num_key_value_heads": 1, "vocab_size": 1003}),
    "gemma-untied-bias-gelu": ("gemma", {"tie_word_embeddings": False, "attention_bias": True, "hidden_act": "gelu"}),
    "gemma2": ("gemma2", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "sliding_window": 7}),
    "gemma2-low-caps-untied": (
        "gemma2",
        {
            "head_dim": 24,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.5,
            "query_pre_attn_scalar": 5,
            "sliding_window": 1,
            "tie_word_embeddings": False,
            "shards": 3,
        },
    ),
    "gemma2-no-caps-bias-yarn": (
        "gemma2",
        {
            "head_dim": 12,
            "num_hidden_layers": 3,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "rope_parameters": YARN,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "sliding_window": 16,
            "vocab_size": 1003,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 20, "num_hidden_layers": 7, "sliding_window": 7, "query_pre_attn_scalar": 9},
    ),
    "gemma3-scaled-rope-untied": (
        "gemma3_text",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 12,
            "sliding_window": 1,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "tie_word_embeddings": False,
            "vocab_size": 1003,
            "shards": 3,
        },
    ),
    "gemma3-pattern-yarn-cap": (
        "gemma3_text",
        {
            "head_dim": 16,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "sliding_window_pattern": 2,
            "sliding_window": 16,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT_ROPE},
        },
    ),
    "gemma3-beside-images": ("gemma3", {"head_dim": 20, "num_hidden_layers": 6, "sliding_window": 7, "shards": 3}),
    "gemma3-beside-images-untied": (
        "gemma3",
        {"head_dim": 16, "num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": False},
    ),
    **GEMMA4_CASES,
    **COMBINED_CASES,
    "olmo2": ("olmo2", {"num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 1003, "shards": 3}),
    "olmo2-tied-bias-llama3": (
        "olmo2",
        {"tie_word_embeddings": True, "attention_bias": True, "rope_parameters": LLAMA3},
    ),
    "olmo2-no-gqa-head-dim": ("olmo2", {"num_key_value_heads": None, "head_dim": 10, "hidden_act": "gelu"}),
    "olmo3": (
        "olmo3",
        {"num_hidden_layers": 5, "sliding_window": 7, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "olmo3-yarn-window-of-one": (
        "olmo3",
        {
            "sliding_window": 1,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT_ROPE},
            "tie_word_embeddings": True,
        },
    ),
    "olmo3-bias-window-of-a-page": (
        "olmo3",
        {"sliding_window": 16, "attention_bias": True, "head_dim": 20, "num_hidden_layers": 4, "vocab_size": 1003},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "smollm3-odd-heads-untied": (
        "smollm3",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "no_rope_layers": [0, 1],
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "vocab_size": 1003,
        },
    ),
    "smollm3-windows-where-there-are-no-positions-yarn": (
        "smollm3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "no_rope_layer_interval": 2,
            "num_hidden_layers": 3,
            "rope_parameters": YARN,
            "shards": 3,
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-odd-heads-window-tied": (
        "phi3",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "sliding_window": 7,
            "tie_word_embeddings": True,
            "vocab_size": 1003,
        },
    ),
    "phi3-partial-rotary": ("phi3", {"shards": 3, "rope_parameters": PARTIAL}),
    "phi3-partial-rotary-of-an-odd-size": (
        "phi3",
        {"hidden_size": 80, "rope_parameters": {**PARTIAL, "partial_rotary_factor": 0.77}},
    ),
    "phi3-longrope-short": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": NUM_TOKENS}),
    "phi3-longrope-long": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": NUM_TOKENS - 1, "num_key_value_heads": 1},
    ),
    "phi3-longrope-partial-tied": (
        "phi3",
        {
            "hidden_size": 64,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 8,
            "tie_word_embeddings": True,
            "vocab_size": 1003,
        },
    ),
    "llama-dynamic-beyond": (
        "llama",
        {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 2.5}},
    ),
    "granite": ("granite", GRANITE),
    "granite-odd-heads-tied": (
        "granite",
        {
            **GRANITE,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "vocab_size": 1003,
            "rope_parameters": LLAMA3,
        },
    ),
    "granite-biases-three-shards": (
        "granite",
        {**GRANITE, "shards": 3, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    ),
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "sliding_window": 9}),
    "cohere2-odd-heads-untied-window-of-one": (
        "cohere2",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "sliding_window": 1,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "logit_scale": 0.7,
            "vocab_size": 1003,
        },
    ),
    "cohere2-layer-types-yarn": (
        "cohere2",
        {
            "num_attention_heads": 6,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "num_hidden_layers": 3,
            "rope_parameters": YARN,
            "shards": 3,
        },
    ),
    "glm4": ("glm4", {"head_dim": 16}),
    "glm4-odd-heads-tied-no-bias": (
        "glm4",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "vocab_size": 1003,
        },
    ),
    "glm4-small-share-yarn": (
        "glm4",
        {
            "num_key_value_heads": 4,
            "head_dim": 28,
            "shards": 3,
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.36},
        },
    ),
    "glm": ("glm", {"head_dim": 16, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "glm-three-shards-linear": (
        "glm",
        {
            "head_dim": 20,
            "attention_bias": False,
            "shards": 3,
            "vocab_size": 1003,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e3, "factor": 2.0, "partial_rotary_factor": 0.7},
        },
    ),
    "glm-tied": ("glm", {"head_dim": 28, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "ministral-mixed-layers": (
        "ministral",
        {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"], "head_dim": 20, "shards": 3},
    ),
    "ministral-window-of-one-tied": (
        "ministral",
        {
            "sliding_window": 1,
            "head_dim": 12,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "ministral-full-layers-yarn": (
        "ministral",
        {"head_dim": 12, "layer_types": ["full_attention"] * 2, "rope_parameters": YARN, "vocab_size": 1003},
    ),
    "exaone4": ("exaone4", {"num_hidden_layers": 5, "sliding_window": 7, "num_key_value_heads": 1}),
    "exaone4-no-windows-tied-llama3": (
        "exaone4",
        {
            "sliding_window": None,
            "layer_types": ["full_attention", "full_attention"],
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
            "vocab_size": 1003,
        },
    ),
    "exaone4-layer-types-window-of-a-page": (
        "exaone4",
        {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"], "head_dim": 20, "shards": 3},
    ),
    "seed-oss": ("seed_oss", {"head_dim": 20, "num_attention_heads": 3, "num_key_value_heads": 1, "shards": 3}),
    "seed-oss-all-biases-tied": (
        "seed_oss",
        {"head_dim": 12, "attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "seed-oss-no-bias-dynamic": (
        "seed_oss",
        {
            "attention_bias": False,
            "head_dim": 16,
            "vocab_size": 1003,
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 2.5},
        },
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 20, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "ernie4_5-biases-untied-shards": (
        "ernie4_5",
        {"head_dim": 12, "use_bias": True, "tie_word_embeddings": False, "vocab_size": 1003, "shards": 3},
    ),
    "ernie4_5-yarn": ("ernie4_5", {"head_dim": 16, "num_key_value_heads": 4, "rope_parameters": YARN}),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL}),
    "ministral3-odd-heads-window-tied": (
        "ministral3",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "sliding_window": 8,
            "tie_word_embeddings": True,
            "vocab_size": 1003,
            "rope_parameters": {**MINISTRAL, "original_max_position_embeddings": 5},
        },
    ),
    "mistral3-beside-a-vision-tower": ("mistral3", {"head_dim": 20, "sliding_window": None}),
    "mistral3-of-ministral3-tied-shards": (
        "mistral3",
        {
            "model_type": "ministral3",
            "head_dim": 16,
            "rope_parameters": MINISTRAL,
            "tie_word_embeddings": True,
            "shards": 3,
        },
    ),
    "ministral3-default-table": ("ministral3", {"head_dim": 24, "shards": 3}),
}


@pytest.mark.parametrize("case", [slow(case) if case in SLOW_GEMMA4_CASES else case for case in CASES])
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, config = CASES[case]
    write_checkpoint(tmp_path, family, **config)
    assert_equals_reference(our_logits(tmp_path, TOKENS), tmp_path)


STACKED = (
    "gemma2",
    "olmo3-bias-window-of-a-page",
    "smollm3-windows-where-there-are-no-positions-yarn",
    "phi3-longrope-partial-tied",
    "granite-biases-three-shards",
    "cohere2-layer-types-yarn",
    "glm4-odd-heads-tied-no-bias",
    "ministral3-odd-heads-window-tied",
    "qwen3-next",
    "qwen3.5-text",
    slow("gemma4"),
    slow("gemma4-experts"),
    "gemma4-small",
)


@pytest.mark.parametrize("case", STACKED)
def test_stacked_layers_compute_the_same(case: str, tmp_path: Path) -> None:
    family, config = CASES[case]
    write_checkpoint(tmp_path, family, **{"num_hidden_layers": 4, **config})
    expected = our_logits(tmp_path, TOKENS)
    np.testing.assert_allclose(our_logits(tmp_path, TOKENS, stacked=True), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", {"rope_theta": 500.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}),
        ("llama", {"rope_theta": 700.0, "rope_scaling": {"type": "linear", "factor": 2.5}}),
        ("llama", {"rope_theta": 700.0, "rope_scaling": None}),
        ("llama", {}),
        ("qwen2", {"rope_theta": 900.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
        (
            "qwen2",
            {
                "rope_theta": 900.0,
                "original_max_position_embeddings": 32,
                "rope_scaling": {"type": "yarn", "factor": 4.0},
            },
        ),
        ("mistral", {"rope_theta": 1e6}),
        ("gemma2", {"rope_theta": 700.0}),
        (
            "gemma3_text",
            {
                "rope_theta": 700.0,
                "rope_local_base_freq": 90.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "sliding_window_pattern": 2,
                "sliding_window": 5,
            },
        ),
        ("gemma3_text", {"sliding_window_pattern": 1}),
        ("olmo3", {"rope_theta": 500_000, "rope_scaling": YARN_OF_OLD, "num_hidden_layers": 2, "sliding_window": 3}),
        ("olmo3", {"rope_theta": 900.0, "sliding_window": 3}),
        ("ernie4_5", {}),
        ("glm", {"rope_theta": 900.0, "partial_rotary_factor": 0.5}),
        ("gpt_oss", {"rope_theta": 900.0, "rope_scaling": {**YARN, "truncate": False}}),
        ("gpt_oss", {"rope_scaling": None}),
        ("gpt_oss", {"rope_parameters": None}),
    ],
)
def test_logits_with_the_older_dialect_of_config_json(family: str, rope: dict[str, Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    edit_config(tmp_path, "rope_parameters", "head_dim", "layer_types", "dtype", torch_dtype="float32", **rope)
    assert_equals_reference(our_logits(tmp_path, TOKENS), tmp_path)


def assert_equals_reference(ours: np.ndarray, path: Path) -> None:
    """Asserts that logits [tokens, vocab] are those of transformers, but for rounding.

    Models of some families amplify the rounding of float32 beyond 1e-4, by processor and by model. How much they do is
    known from the reference in float64: its distance from the reference in float32 is the scale for ours.
    """
    expected = reference_logits(path, TOKENS)
    if np.allclose(ours, expected, atol=1e-4, rtol=1e-4):
        return
    exact = reference_logits(path, TOKENS, dtype=torch.float64)
    rounding = np.abs(expected - exact).max()
    np.testing.assert_allclose(ours, exact, atol=max(1e-4, 3 * rounding), rtol=1e-4)


def our_logits(
    path: Path, token_ids: list[int], *, stacked: bool = False, dtype: str = "auto"
) -> np.ndarray:  # f32 [tokens, vocab]
    config = read_model_config(path, dtype)
    model = load_model(path, config, stacked=stacked)
    pages = dense_pages(config, len(token_ids), stacked=stacked)
    caches = (*pages, *init_states(state_arrays(config, 2, is_stacked=stacked), None))
    states = one_sequence(len(token_ids)) if config.has_states else None

    @nnx.jit
    def forward(model: Any, ids: jax.Array) -> jax.Array:
        positions = jnp.arange(ids.shape[0], dtype=jnp.int32)
        lengths = jnp.full_like(positions, ids.shape[0])
        hidden, _ = model(ids, positions, caches, dense_attend, lengths=lengths, states=states)
        logits: jax.Array = model.logits(hidden)
        return logits

    return np.asarray(forward(model, jnp.asarray(token_ids, jnp.int32)))


def dense_pages(config: ModelConfig, num_tokens: int, *, stacked: bool) -> tuple[Any, ...]:
    """Makes what `dense_attend` keeps keys and values in, for layers that read another's."""
    kinds = layer_groups(config).page_kinds
    if not stacked:
        return (None,) * sum(kind.size for kind in kinds)
    return tuple(jnp.zeros((kind.size, 2, num_tokens, kind.num_kv_heads, kind.head_dim)) for kind in kinds)


def one_sequence(num_tokens: int) -> StateBatch:
    """Returns the slots of one sequence, from its beginning, in slot 1."""
    one, numbers = jnp.ones(1, jnp.int32), jnp.arange(num_tokens)
    return StateBatch(one, numbers[-1:], one, jnp.zeros_like(numbers), numbers)


def dense_attend(
    qkv: QKV,
    cache: GroupCache,
    *,
    options: AttentionOptions,
    sinks: jax.Array | None = None,
    kv_scales: None = None,
) -> tuple[jax.Array, GroupCache]:
    """Implements Attend for one whole sequence, in its plainest form. Keys and values are kept whole."""
    (q, k, v), sliding_window = qkv, options.sliding_window
    if k is None or v is None:
        k, v = held_by(cache.pages)
    elif isinstance(cache.pages, StackedCache):
        pages = cache.pages.pages.at[cache.pages.first_page].set(jnp.stack([k, v]).astype(jnp.float32))
        cache = cache._replace(pages=StackedCache(pages, cache.pages.first_page))
    else:
        cache = cache._replace(pages=(k, v))
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    scores = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * options.scale_for(head_dim)
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    behind = jnp.arange(num_tokens)[:, None] - jnp.arange(num_tokens)[None, :]
    visible = (behind >= 0) & (True if sliding_window is None else behind < sliding_window)
    scores = jnp.where(visible, scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (num_heads, num_tokens, 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :num_tokens]
    return jnp.einsum("hqk,khd->qhd", weights, v, precision="highest"), cache


def held_by(pages: Any) -> tuple[jax.Array, jax.Array]:
    k, v = pages.pages[pages.first_page] if isinstance(pages, StackedCache) else pages
    return k, v
