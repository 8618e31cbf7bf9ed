from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.engine.errors import ConfigError
from penstock.engine.models import ModelConfig, family_of
from penstock.engine.models.hf.rope import FULL, SLIDING
from penstock.engine.models.layers.rope import rotary_frequencies, rotary_tables

BASE: dict[str, Any] = {
    "vocab_size": 10,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 7 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 1024,
}


GEMMA4: dict[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


def configure(model_type: str, **fields: Any) -> ModelConfig:
    fields = {**BASE, "model_type": model_type, **fields}
    return family_of(fields).config(fields, "float32")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "blossom"}, "'blossom'.*supported are llama, "),
        ({}, "supported are"),
        ({"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClass"),
        ({"model_type": ["llama"]}, "llama"),
        ({"model_type": "llama", "architectures": "LlamaForCausalLM"}, "must be a list"),
    ],
)
def test_families_that_are_not_supported_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        family_of(fields)


def test_lfm2_of_the_first_months() -> None:
    """These are the fields of LFM2-1.2B's `config.json`."""
    older = {"block_ff_dim": 12_288, "tie_embedding": True, "tie_word_embeddings": False, "full_attn_idxs": [1]}
    model = configure("lfm2", **older)
    assert model.tie_word_embeddings
    assert [block.has_attention for block in model.blocks] == [False, True, False]
    assert {block.mlp.intermediate_size for block in model.blocks} == {8192}
    assert configure("lfm2", block_ffn_dim_multiplier=None, intermediate_size=99).blocks[0].mlp.intermediate_size == 66


def test_the_architecture_tells_the_family_where_model_type_is_absent() -> None:
    assert family_of({"architectures": ["Qwen2ForCausalLM"]}).model_type == "qwen2"


@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [
        ("llama", {"per_layer_config": {"0": {}}}, "per_layer_config"),
        ("llama", {"hidden_act": "xielu"}, "'xielu'"),
        ("llama", {"head_dim": 7}, "head_dim = 7"),
        ("llama", {"hidden_size": 63}, "63.*num_attention_heads = 4"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers.*0"),
        ("llama", {"num_attention_heads": None}, "num_attention_heads.*None"),
        ("llama", {"vocab_size": "32"}, "vocab_size.*'32'"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps"),
        ("llama", {"attention_bias": "no"}, "attention_bias.*'no'"),
        ("llama", {"sliding_window": 5}, "sliding_window = 5"),
        ("llama", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("mistral", {"sliding_window": 0}, "sliding_window.*0"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types must list 3"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": "1"}, "max_window_layers"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"rope_scaling": {"type": "proportional"}}, "'proportional'"),
        ("llama", {"rope_scaling": {"type": "dynamic"}}, "factor"),
        ("llama", {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic.*more than 2"),
        (
            "llama",
            {"rope_scaling": {"type": "longrope"}},
            "short_factor must list 8 numbers, .*not None",
        ),
        ("llama", {"rope_scaling": {**LONGROPE, "long_factor": [1.0] * 7}}, "long_factor must list 8 numbers"),
        ("llama", {"rope_scaling": {**LONGROPE, "long_factor": [1.0] * 7 + ["2"]}}, "long_factor.*'2'"),
        ("llama", {"rope_scaling": {**LONGROPE, "long_factor": [1.0] * 7 + [1e-300]}}, "not finite"),
        ("llama", {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 1}}, "no rotary frequencies"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5 leaves"),
        ("phi3", {"partial_rotary_factor": 0.1}, "partial_rotary_factor = 0.1 leaves"),
        ("phi3", {"rope_scaling": {**LONGROPE, "partial_rotary_factor": "half"}}, "partial_rotary_factor.*'half'"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias"),
        ("phi3", {"sliding_window": -1}, "sliding_window.*-1"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache = 1 is a convolution over one token"),
        ("lfm2", {"conv_L_cache": 2**20}, "conv_L_cache must be at most 1024"),
        (
            "lfm2",
            {"layer_types": ["conv", "full_attention"]},
            "layer_types must list conv or full_attention for 3 layers",
        ),
        ("lfm2", {"layer_types": ["conv", "full_attention", "mamba"]}, "layer_types must list.*mamba"),
        ("lfm2", {"full_attn_idxs": 2}, "full_attn_idxs must be a list of layers, not 2"),
        ("lfm2", {"full_attn_idxs": []}, "layers with attention, one at least"),
        ("lfm2", {"block_ffn_dim_multiplier": 1e9}, "intermediate_size must be at most"),
        ("lfm2", {"sliding_window": 5}, "sliding_window = 5"),
        ("qwen3_next", {"linear_num_value_heads": 5, "linear_num_key_heads": 2}, "linear_num_value_heads = 5 is not a"),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1 is a convolution over one token"),
        ("qwen3_next", {"layer_types": ["linear_attention"]}, "layer_types must list linear_attention or full_att.* 3"),
        ("qwen3_next", {"full_attention_interval": 4}, "layers with attention, one at least"),
        ("qwen3_next", {"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok = 5 is above"),
        ("qwen3_5_text", {"sliding_window": 5}, "sliding_window = 5"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate = False"),
        ("qwen3_5", {}, "text_config must be a table"),
        ("qwen3_5", {"text_config": {"model_type": "qwen3"}}, "model_type = 'qwen3'"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must list 0 or 1 for 3 layers"),
        ("smollm3", {"no_rope_layers": [1, 0, 2]}, "no_rope_layers must list 0 or 1"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval.*0"),
        ("granite", {"residual_multiplier": "0.2"}, "residual_multiplier.*'0.2'"),
        ("granite", {"logits_scaling": 0}, "logits_scaling.*0"),
        ("cohere2", {"logit_scale": float("nan")}, "logit_scale.*nan"),
        ("cohere2", {"layer_norm_eps": 2}, "layer_norm_eps must be at most 1"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm = True"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block = False"),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "llama_4_scaling_beta"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor"),
        ("llama", {"rope_scaling": "linear"}, "flat table"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "flat table"),
        ("llama", {"rope_theta": -1.0}, "rope_theta"),
        ("llama", {"rope_theta": float("nan")}, "rope_theta must be a number above 0, not nan"),
        ("llama", {"rope_theta": float("nan"), "rope_parameters": {"rope_theta": 1e4}}, "rope_theta.*nan"),
        ("llama", {"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta.*inf"),
        ("llama", {"rope_theta": 1e-300}, "not finite.*1e-300"),
        ("llama", {"rope_theta": 10**400}, "rope_theta must be at most 1e.30"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 1e-300}}, "not finite.*factor=1e-300"),
        (
            "llama",
            {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "no rotary frequencies.*division by zero",
        ),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps.*nan"),
        ("llama", {"rms_norm_eps": 1e300}, "rms_norm_eps must be at most 1, not 1e.300"),
        ("llama", {"rms_norm_eps": True}, "rms_norm_eps.*True"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1024, not 1000000000"),
        ("qwen3", {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1024, not 1000000000"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers.*True"),
        ("llama", {"vocab_size": 10**9}, "vocab_size must be at most"),
        ("llama", {"hidden_size": 10**30}, "hidden_size must be at most"),
        ("llama", {"num_attention_heads": 10**9}, "num_attention_heads must be at most"),
        ("llama", {"num_key_value_heads": -2}, "num_key_value_heads.*-2"),
        ("llama", {"max_position_embeddings": 2**31}, "max_position_embeddings must be at most 2147483647"),
        ("llama", {"hidden_act": ["silu"]}, "hidden_act.*silu"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping must be a number above 0, not 0"),
        ("gemma2", {"final_logit_softcapping": "30"}, "final_logit_softcapping.*'30'"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar.*-1"),
        ("gemma2", {"hidden_activation": "xielu"}, "hidden_activation = 'xielu'"),
        ("gemma2", {"sliding_window": None}, "sliding_window.*None"),
        ("gemma2", {"layer_types": ["sliding_attention"]}, "layer_types must list 3"),
        ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping = 5.0"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern.*0"),
        ("gemma3_text", {"rope_local_base_freq": "x"}, "rope_local_base_freq.*'x'"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "table for full_attention and one for sliding"),
        ("gemma3_text", {"rope_parameters": {"full_attention": 3}}, "table for full_attention and one for sliding"),
        ("gemma3_text", {"rope_parameters": [1]}, "rope_parameters must be a table"),
        ("gemma3_text", {"rope_scaling": [1]}, "rope_scaling must be a table"),
        ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "type = 'linear'.* say rope_type"),
        ("gemma4_text", {}, "vocab_size_per_layer_input = 262144"),
        ("gemma4_text", {**GEMMA4, "use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ("gemma4_text", {**GEMMA4, "num_kv_shared_layers": 3}, "num_kv_shared_layers = 3 of 3 layers leaves a type"),
        ("gemma4_text", {**GEMMA4, "num_kv_shared_layers": 1}, "num_kv_shared_layers = 1 of 3 layers leaves a type"),
        ("gemma4_text", {**GEMMA4, "global_head_dim": 7}, "a head of 7 features is odd"),
        (
            "gemma4_text",
            {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "num_attention_heads = 4 is not a multiple of the 3 KV heads of a layer",
        ),
        ("gemma4_text", {**GEMMA4, "per_layer_config": [1]}, "per_layer_config must be a table of head_dim"),
        (
            "gemma4_text",
            {**GEMMA4, "per_layer_config": {"0": {"sliding_window": 5}}},
            "per_layer_config must be a table",
        ),
        ("gemma4_text", {**GEMMA4, "per_layer_config": {"0": {"head_dim": 4}}}, "the same of all layers of one type"),
        ("gemma4_text", {**GEMMA4, "enable_moe_block": True}, "num_experts must be a positive whole number, not None"),
        (
            "gemma4_text",
            {**GEMMA4, "enable_moe_block": True, "num_experts": 2, "top_k_experts": 3, "moe_intermediate_size": 8},
            "top_k_experts = 3 is above the 2 experts",
        ),
        ("gemma4_text", {**GEMMA4, "layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        (
            "gemma4_text",
            {**GEMMA4, "rope_parameters": {"full_attention": {"rope_type": "proportional"}, "sliding_attention": {}}},
            "rope_theta must be a number above 0, not None",
        ),
        (
            "gemma4_text",
            {
                **GEMMA4,
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 1.5},
                    "sliding_attention": {"rope_theta": 1e4},
                },
            },
            "partial_rotary_factor = 1.5 leaves no features to rotate, or too many",
        ),
        (
            "gemma4_text",
            {
                **GEMMA4,
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e4},
                    "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
                },
            },
            "partial_rotary_factor = 0.5",
        ),
        ("gemma4_text", {**GEMMA4, "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("gemma4_text", {**GEMMA4, "original_max_position_embeddings": 8}, "original_max_position_embeddings = 8"),
        (
            "gemma4_text",
            {**GEMMA4, "rope_parameters": {FULL: {"rope_theta": 1e4, "truncate": False}, SLIDING: {"rope_theta": 1e4}}},
            "truncate = False",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {FULL: {"rope_theta": 1e4}, SLIDING: {"rope_theta": 1e4}, "truncate": False}},
            "truncate = False",
        ),
        ("gemma4", {"text_config": {"model_type": "gemma3_text"}}, "model_type = 'gemma3_text'"),
        ("olmo3", {"original_max_position_embeddings": 32}, "original_max_position_embeddings = 32"),
        ("exaone4", {"sliding_window": None}, "sliding_window.*None"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern.*'LLLG'"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor = 0.5",
        ),
        ("gemma3", {}, "text_config must be a table, not None"),
        ("gemma3", {"text_config": {"model_type": "llama"}}, "model_type = 'llama'"),
        ("gemma3", {"text_config": {"hidden_size": 0}}, "hidden_size.*0"),
        ("mistral3", {"text_config": {"model_type": "mistral4"}}, "model_type = 'mistral4' in text_config"),
        ("gemma3", {"text_config": {"final_logit_softcapping": 2.0}}, "final_logit_softcapping = 2.0"),
        ("olmo2", {"sliding_window": 5, "layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("olmo3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "table for full_attention"),
        ("olmo3", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        (
            "llama",
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor",
        ),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        ("dots1", {"n_routed_experts": 4, "num_experts_per_tok": 2}, "n_shared_experts must be a positive"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit must be a number above 0, not 0"),
        ("gpt_oss", {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "sliding_window is off"),
    ],
)
def test_what_is_not_honoured_is_refused_and_named(model_type: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        configure(model_type, **fields)


@pytest.mark.parametrize("missing", sorted(BASE.keys() - {"num_key_value_heads", "max_position_embeddings"}))
def test_a_missing_field_is_named(missing: str) -> None:
    fields = {name: value for name, value in BASE.items() if name != missing}
    with pytest.raises(ConfigError, match=missing):
        family_of({"model_type": "qwen2"}).config(fields, "float32")


def test_harmless_fields_are_accepted() -> None:
    assert configure("llama", pretraining_tp=4, attention_dropout=0.1, use_cache=False, auto_map={}) == configure(
        "llama"
    )


@pytest.mark.parametrize("name", ["silu", "swish", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh"])
def test_activations_are_those_of_transformers(name: str) -> None:
    from transformers.activations import ACT2FN

    from penstock.engine.models.layers.basic import ACTIVATIONS

    x = np.linspace(-6, 6, 101, dtype=np.float32)
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(x)), ACT2FN[name](torch.from_numpy(x)).numpy(), atol=1e-6)


ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.7},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "truncate": False, "beta_fast": 20, "beta_slow": 2},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0.8},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "mscale": 1.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "attention_factor": 1.5},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4},  # ramp upside down
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: "-".join(map(str, rope.values())))
@pytest.mark.parametrize("head_dim", [8, 20, 128])
def test_rotary_frequencies_are_those_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    theirs = LlamaConfig(head_dim=head_dim, rope_parameters=dict(rope), **BASE)
    expected, expected_scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs)
    ours = configure("llama", head_dim=head_dim, rope_parameters=rope).blocks[0].attention.rope
    assert ours is not None
    frequencies, scale = rotary_frequencies(ours)
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=2.5e-7)
    assert scale == pytest.approx(expected_scale, rel=1e-12)


@pytest.mark.parametrize(
    "rope",
    [
        {**LONGROPE, "rope_theta": 1e4},
        {**LONGROPE, "rope_theta": 1e4, "factor": 0.5},
        {**LONGROPE, "rope_theta": 3e5, "attention_factor": 1.25},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.7},
    ],
    ids=lambda rope: "-".join(map(str, rope.values())),
)
@pytest.mark.parametrize("length", [7, 1024, 1025, 4096, 4097, 9000])
def test_frequencies_that_follow_from_the_length_are_those_of_transformers(rope: dict[str, Any], length: int) -> None:
    theirs = LlamaConfig(rope_parameters=dict(rope), **BASE)
    expected, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, seq_len=torch.tensor(length))
    ours = configure("llama", rope_parameters=rope).blocks[0].attention.rope
    assert ours is not None
    cos, sin = rotary_tables(jnp.array([1]), ours, jnp.array([length]))  # at position 1 an angle is its frequency
    np.testing.assert_allclose(cos[0], np.cos(expected.numpy()) * scale, rtol=2e-6)
    np.testing.assert_allclose(sin[0], np.sin(expected.numpy()) * scale, rtol=2e-6)


def test_layers_with_different_rules_of_lengths_are_refused() -> None:
    model = configure("llama", rope_parameters=LONGROPE)
    other = configure("llama", rope_parameters={**LONGROPE, "original_max_position_embeddings": 512})
    with pytest.raises(ConfigError, match="same rule of lengths"):
        replace(model, blocks=(*model.blocks, *other.blocks))


def test_the_first_names_of_longrope_in_phi3() -> None:
    table = {name: value for name, value in LONGROPE.items() if name != "rope_type"}
    expected = configure("phi3", rope_scaling=LONGROPE)
    assert configure("phi3", rope_scaling={**table, "type": "su"}) == expected
    assert configure("phi3", rope_scaling={**table, "type": "yarn"}) == expected


MIXTURE = {**BASE, "model_type": "glm4_moe", "n_routed_experts": 12, "num_experts_per_tok": 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 13}, "num_experts_per_tok = 13 is above the 12 experts that there are"),
        ({"n_group": 5}, "n_group = 5 does not part 12 experts into groups of 2 or more"),
        ({"n_group": 12}, "n_group = 12 does not part 12 experts into groups of 2 or more"),
        ({"n_group": 4, "topk_group": 1}, "4 experts cannot be chosen from topk_group = 1 of 4 groups of 3"),
        (
            {"num_local_experts": 6},
            "the number of experts is stated as {'n_routed_experts': 12, 'num_local_experts': 6}",
        ),
        ({"n_routed_experts": 10**6}, "n_routed_experts must be at most 4096, not 1000000"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 1}, "mlp_only_layers must list numbers of layers, not 1"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step must be a positive whole number"),
    ],
)
def test_experts_that_make_no_sense_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    fields = {**MIXTURE, **fields}
    with pytest.raises(ConfigError, match=re.escape(message)):
        family_of(fields).config(fields, "float32")
