from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.engine.errors import ConfigError
from penstock.engine.models import ModelConfig, family_of
from penstock.engine.models.rope import rotary_frequencies

BASE = {
    "vocab_size": 10,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def configure(model_type: str, **fields: Any) -> ModelConfig:
    fields = {**BASE, "model_type": model_type, **fields}
    return family_of(fields).config(fields, "float32")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "gpt_oss"}, "'gpt_oss'.*supported are llama, mistral, "),
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
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("llama", {"rope_scaling": {"type": "longrope"}}, "'longrope'"),
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
        (
            "llama",
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor",
        ),
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

    from penstock.engine.models.layers import ACTIVATIONS

    x = np.linspace(-6, 6, 101, dtype=np.float32)
    np.testing.assert_allclose(ACTIVATIONS[name](x), ACT2FN[name](torch.from_numpy(x)).numpy(), atol=1e-6)


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
    frequencies, scale = rotary_frequencies(ours)
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=2.5e-7)
    assert scale == pytest.approx(expected_scale, rel=1e-12)
