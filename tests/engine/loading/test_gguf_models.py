"""GGUF files compute what Hugging Face checkpoints with the same values do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.checkpoints import reference_logits, write_checkpoint
from tests.engine.loading.gguf_files import Kinds, all_of, q4_k_m, write_gguf
from tests.engine.models.test_models_parity import our_logits

PROMPT = [5, 9, 77, 3, 41, 8, 100, 63, 2, 18, 92, 7, 50]
K: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "attention_factor": 1.2,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 8,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}

CASES: dict[str, tuple[str, Kinds, dict[str, Any]]] = {  # family, types of tensors, geometry
    "llama f32": ("llama", all_of("F32"), {"head_dim": 20, "num_key_value_heads": 1}),
    "llama with biases": ("llama", all_of("F16"), {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", all_of("Q8_0"), {"hidden_size": 64, "tie_word_embeddings": True, "vocab_size": 119}),
    "llama q4_k_m": ("llama", q4_k_m, {**K, "rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", all_of("Q4_0"), {"hidden_size": 64, "rope_parameters": YARN}),
    "qwen3": ("qwen3", all_of("Q6_K"), {**K, "head_dim": 64, "tie_word_embeddings": True}),
    "mistral": ("mistral", all_of("F32"), {"sliding_window": 5}),
    "mixtral": ("mixtral", all_of("Q5_1"), {"hidden_size": 64, "num_local_experts": 3, "sliding_window": None}),
    "qwen2_moe": (
        "qwen2_moe",
        all_of("Q5_0"),
        {**EXPERTS, "hidden_size": 64, "shared_expert_intermediate_size": 96, "norm_topk_prob": False},
    ),
    "qwen3_moe": ("qwen3_moe", all_of("Q4_1"), {**EXPERTS, "hidden_size": 64, "head_dim": 32, "norm_topk_prob": True}),
    "gemma": ("gemma", all_of("F32"), {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        all_of("Q8_0"),
        {"hidden_size": 64, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 5},
    ),
    "gemma3": (
        "gemma3_text",
        all_of("Q5_K"),
        {**K, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 4, "num_hidden_layers": 6},
    ),
    "phi3": (
        "phi3",
        all_of("Q4_0"),
        {
            "hidden_size": 64,
            "rope_parameters": LONG,
            "original_max_position_embeddings": 8,
            "sliding_window": None,
        },
    ),
    "olmo2": ("olmo2", all_of("F32"), {}),
    "olmo3": ("olmo3", all_of("F32"), {"num_hidden_layers": 4, "sliding_window": 3}),
    "smollm3": ("smollm3", all_of("F32"), {"num_hidden_layers": 4, "use_sliding_window": False}),
    "granite": (
        "granite",
        all_of("F32"),
        {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    ),
    "granitemoe": ("granitemoe", all_of("Q8_0"), {"hidden_size": 64, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "olmoe": (
        "olmoe",
        all_of("F32"),
        {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4, "norm_topk_prob": False},
    ),
    "dots1": (
        "dots1",
        all_of("F32"),
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "sliding_window": None,
            "routed_scaling_factor": 1.5,
        },
    ),
    "cohere2": ("cohere2", all_of("F32"), {"num_hidden_layers": 4, "sliding_window": 3, "logit_scale": 0.25}),
    "glm4": ("glm4", all_of("F32"), {"head_dim": 16}),
    "glm4_moe": (
        "glm4_moe",
        all_of("F32"),
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        all_of("MXFP4"),
        {"hidden_size": 64, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
}


def test_layers_of_unequal_types_may_be_stacked(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "folder", "llama", **K, num_hidden_layers=3)
    file = write_gguf(tmp_path / "model.gguf", folder, q4_k_m)
    expected, found = reference_logits(folder, PROMPT), our_logits(file, PROMPT, stacked=True, dtype="float32")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_same_values_in_a_folder(tmp_path: Path, case: str) -> None:
    family, kinds, geometry = CASES[case]
    folder = write_checkpoint(tmp_path / "folder", family, **geometry)
    file = write_gguf(tmp_path / "model.gguf", folder, kinds)
    expected, found = reference_logits(folder, PROMPT), our_logits(file, PROMPT, dtype="float32")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
