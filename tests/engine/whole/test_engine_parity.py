"""Greedy tokens equal those of transformers' generate, in mixed, chunked, preempted and prefix-cached batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine import Engine, Request, SamplingParams
from penstock.engine.models import FAMILIES
from tests.engine.checkpoints import reference_greedy
from tests.engine.engines import EOS, SMALL, VOCAB_SIZE, drive, preempting, write_model
from tests.engine.formats.quantized_checkpoints import MXFP4_EXPERTS, write_quantized
from tests.engine.formats.quantized_weights import SCHEMES, Scheme
from tests.engine.models.combined_cases import COMBINED_CASES
from tests.engine.tokenizers_for_tests import CHAT_TEMPLATE, byte_level
from tests.support.patience import slow

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 12,
    "llama_4_scaling_beta": 0.4,
}

COMBINED = {name: case for name, case in COMBINED_CASES.items() if not FAMILIES[case[0]].texts}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama 3.x rope, 1 KV head, tied, 3 shards": (
        "llama",
        {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 1, "tie_word_embeddings": True, "shards": 3},
    ),
    "mistral, window shorter than the prompts": ("mistral", {"sliding_window": 11, "head_dim": 20}),
    "qwen2, window in one layer": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "gemma": ("gemma", {"head_dim": 20, "num_key_value_heads": 1}),
    "gemma2, caps that bite, a window of a page": (
        "gemma2",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 4,
        },
    ),
    "gemma3, a rope for each type of layer": (
        "gemma3_text",
        {
            "head_dim": 20,
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma4_text, mixtures, values that are keys": (
        "gemma4_text",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "sliding_window": 4,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 20,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4_text, layers that read others' keys, vectors of each layer": (
        "gemma4_text",
        {
            "num_hidden_layers": 5,
            "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "sliding_window": 7,
            "num_key_value_heads": 1,
        },
    ),
    "gemma4_text, larger heads in full layers": (
        "gemma4_text",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 11,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 3.0,
        },
    ),
    "olmo2": ("olmo2", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "olmo3, a window of one": (
        "olmo3",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "sliding_window": 1,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "smollm3, every second layer without positions, windows there": (
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 4},
    ),
    "gpt-oss, sinks, a window in one layer": (
        "gpt_oss",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7, "head_dim": 20},
    ),
    "mixtral, tied": (
        "mixtral",
        {"num_local_experts": 5, "sliding_window": 11, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "qwen2_moe, a shared expert, windows and a dense layer": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ),
    "qwen3_moe, odd heads": (
        "qwen3_moe",
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 13,
            "norm_topk_prob": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
        },
    ),
    "glm4_moe, groups, half of each head rotates": (
        "glm4_moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": True,
        },
    ),
    "dots1, a dense layer, then a window of a page": (
        "dots1",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
    ),
    "olmoe, odd heads": (
        "olmoe",
        {"num_experts": 7, "num_experts_per_tok": 3, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "granitemoe, tied": (
        "granitemoe",
        {
            "num_local_experts": 5,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.7,
            "tie_word_embeddings": True,
        },
    ),
    "phi3, a share of each head rotates": (
        "phi3",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "sliding_window": 11,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
    ),
    "lfm2, convolutions of four taps around attention": (
        "lfm2",
        {
            "num_hidden_layers": 4,
            "full_attn_idxs": [1, 2],
            "conv_L_cache": 4,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
    ),
    "qwen3_next, delta nets around attention, a dense layer": (
        "qwen3_next",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_value_heads": 6,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5_text, odd heads": (
        "qwen3_5_text",
        {
            "head_dim": 20,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "linear_key_head_dim": 7,
            "linear_value_head_dim": 5,
        },
    ),
    "qwen3_5_moe_text, tied": ("qwen3_5_moe_text", {"num_experts": 5, "tie_word_embeddings": True}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.7,
            "tie_word_embeddings": True,
        },
    ),
    "cohere2, a window in two of three layers": (
        "cohere2",
        {"num_hidden_layers": 3, "sliding_window": 9, "sliding_window_pattern": 3},
    ),
    "glm4": ("glm4", {"head_dim": 20, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "glm": ("glm", {"head_dim": 20, "num_key_value_heads": 4}),
    "exaone4, a window in two of three layers, positions there": (
        "exaone4",
        {"num_hidden_layers": 3, "sliding_window": 9, "sliding_window_pattern": 3, "head_dim": 20},
    ),
    "seed_oss": ("seed_oss", {"head_dim": 20, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "ernie4_5, tied": ("ernie4_5", {"head_dim": 20, "num_attention_heads": 6}),
    "ministral, a window in one layer": (
        "ministral",
        {"head_dim": 16, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "ministral3, queries scaled within the prompts": (
        "ministral3",
        {"head_dim": 20, "rope_parameters": MINISTRAL_ROPE},
    ),
    **COMBINED,
}


QUANTIZED: dict[str, tuple[Scheme, str, dict[str, Any]]] = {
    "fp8, blocks that are cut": (
        SCHEMES["fp8 blocks"],
        "llama",
        {"hidden_size": 144, "intermediate_size": 200, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "int4 in groups of 32": (
        SCHEMES["compressed int4 g32"],
        "qwen3",
        {"hidden_size": 160, "intermediate_size": 224, "num_attention_heads": 5, "num_key_value_heads": 1},
    ),
    "gptq with an order, experts": (
        SCHEMES["gptq g128"],
        "qwen3_moe",
        {"hidden_size": 128, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 128, "head_dim": 32},
    ),
    "gptq, fused tensors": (SCHEMES["gptq 8 bits channel"], "phi3", {"hidden_size": 64, "sliding_window": 11}),
    "awq": (SCHEMES["awq g32"], "olmo2", {"hidden_size": 96, "intermediate_size": 160, "num_key_value_heads": 4}),
    "int8, norms around": (
        SCHEMES["compressed int8 asymmetric"],
        "gemma3_text",
        {"head_dim": 20, "num_hidden_layers": 3, "sliding_window": 7, "hidden_size": 64},
    ),
    "mxfp4": (
        MXFP4_EXPERTS,
        "gpt_oss",
        {"hidden_size": 96, "intermediate_size": 160, "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 20},
    ),
}


AS_SHIPPED = ("llama", "mistral, window shorter than the prompts", "qwen3", "gpt-oss, sinks, a window in one layer")
OTHERS = [model for model in MODELS if model not in AS_SHIPPED]
SLOW = ("gemma4_text, mixtures, values that are keys", "gemma4_text, larger heads in full layers", *COMBINED)


@pytest.mark.parametrize("model", [slow(model) if model in SLOW else model for model in OTHERS])
def test_greedy_tokens_equal_generate(model: str, tmp_path: Path) -> None:
    check_model(*MODELS[model], tmp_path)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    "model",
    [*AS_SHIPPED, *(pytest.param(model, marks=pytest.mark.slow) for model in MODELS if model not in AS_SHIPPED)],
)
def test_greedy_tokens_of_optimised_programs_equal_generate(model: str, tmp_path: Path) -> None:
    check_model(*MODELS[model], tmp_path)


def check_model(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    directory = write_model(tmp_path, family, **config)
    # With a window of 1, the cache of transformers forgets nothing.
    check_greedy(directory, directory, cached=config.get("sliding_window") != 1)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "family", "config"), QUANTIZED.values(), ids=QUANTIZED)
def test_greedy_tokens_of_quantized_weights_equal_generate_with_their_values(
    scheme: Scheme, family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    of_all = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "bos_token_id": None}
    quantized, plain = write_quantized(tmp_path, scheme, family, **of_all, **config)
    byte_level(chat_template=CHAT_TEMPLATE).save_pretrained(quantized)
    check_greedy(quantized, plain)


def check_greedy(directory: Path, reference: Path, *, cached: bool = True) -> None:
    """Compares greedy tokens alone and batched, in chunks, preempted, resumed, and with cached prefixes."""
    # So many pages that none is evicted: the prefixes of all groups are found, in whichever order prompts came.
    engine = Engine.from_checkpoint(directory, replace(SMALL, max_model_len=112, num_pages=320))
    rng = np.random.default_rng(0)
    prompts = [tuple(map(int, rng.integers(0, VOCAB_SIZE, length))) for length in (1, 15, 16, 17, 45)]
    prompts.append((*prompts[-1][:30], 5, 6, 7))  # shares whole pages with the one before it
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    expected = [reference_greedy(reference, list(prompt), 64, cached=cached) for prompt in prompts]

    # Windows leave so many pages that some of these would preempt nobody.
    requests = [Request(f"a{i}", prompt, params) for i, prompt in enumerate(prompts)]
    first = drive(engine, requests, before_step=preempting(engine, 20))
    assert [first[f"a{i}", 0].token_ids for i in range(len(prompts))] == expected
    assert engine.stats().preemptions_total > 0
    again = drive(engine, [Request(f"b{i}", prompt, params) for i, prompt in enumerate(prompts)])
    assert [again[f"b{i}", 0].token_ids for i in range(len(prompts))] == expected
    assert sum(result.num_cached for result in again.values()) > 0
    resumed = Request("resumed", prompts[3], params, generated=(tuple(expected[3][:23]),))
    assert drive(engine, [resumed])["resumed", 0].token_ids == expected[3][23:]
