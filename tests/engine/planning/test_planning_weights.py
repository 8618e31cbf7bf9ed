"""The planner's bytes by hand, from published geometries alone: what a device holds, what a step reads, and KV."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from penstock.engine.config import EngineConfig
from penstock.engine.deployment.deployment import deploy
from penstock.engine.errors import ConfigError
from penstock.engine.loading.checkpoint import abstract_model
from penstock.engine.models import ModelConfig
from penstock.engine.models.config import ExpertsConfig
from penstock.engine.sharding.placement import DATA, EXPERT, TENSOR, Placement, split_model
from penstock.tools.plan import PRESETS, planned_model, preset
from penstock.tools.plan.device.roofline import kv_sequence_bytes, kv_token_bytes
from penstock.tools.plan.device.weights import (
    grouped_matmul_bytes,
    held_bytes,
    step_weight_bytes,
    vocab_padding_bytes,
)
from tests.engine.formats.quantized_weights import SCHEMES

BF16 = 2


def known(name: str, weights: str = "auto") -> ModelConfig:
    model = preset(name, weights=weights)
    assert model is not None
    return model


def over(tensor: int, expert: int = 1) -> Placement:
    """Returns a placement on devices that need not exist."""
    if expert > 1:
        return Placement(AbstractMesh((1, expert, tensor), (DATA, EXPERT, TENSOR)))  # type: ignore[arg-type]
    return Placement(AbstractMesh((1, tensor), (DATA, TENSOR)))  # type: ignore[arg-type]


def planned(tmp_path: Path, fields: dict[str, Any], **settings: str) -> ModelConfig:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return planned_model(str(path), **settings)


def test_a_dense_model() -> None:
    """Llama-3.1-8B over four devices: each has 8 of 32 heads, 2 of 8 KV heads, and a quarter of everything
    but norms.
    """
    model, hidden = known("Llama-3.1-8B"), 4096
    layer = hidden * (8 + 2 + 2 + 8) * 128 + 3 * hidden * 14336 // 4 + 2 * hidden
    table = 128256 * hidden // 4
    split = split_model(model, 4)
    assert held_bytes(split, over(4)) == BF16 * (32 * layer + 2 * table + hidden)
    assert step_weight_bytes(split, 64, over(4)) == BF16 * (32 * layer + table + hidden + 64 * hidden)


def test_devices_beyond_the_kv_heads_hold_them_several_times() -> None:
    layer = 4096 * (2 + 1 + 1 + 2) * 128 + 3 * 4096 * 14336 // 16 + 2 * 4096
    assert held_bytes(split_model(known("Llama-3.1-8B"), 16), over(16)) == BF16 * (
        32 * layer + 2 * 128256 * 4096 // 16 + 4096
    )


@pytest.mark.parametrize(("tensor", "padded"), [(3, 334 + 50), (8, 128)])
def test_a_vocabulary_that_devices_do_not_divide(tmp_path: Path, tensor: int, padded: int) -> None:
    """1003 tokens over 3 devices are 384 each, the next multiple of 128 above 334.3, and over 8 devices 128."""
    fields = {
        **PRESETS["Llama-3.1-8B"], "vocab_size": 1003, "hidden_size": 192, "intermediate_size": 480, "head_dim": 16,
        "num_attention_heads": 24, "num_key_value_heads": 3 if tensor == 3 else 2, "num_hidden_layers": 2,
    }  # fmt: skip
    model = split_model(planned(tmp_path, fields), tensor)
    heads, kv_heads = 24 // tensor, 1
    layer = 192 * 2 * (heads + kv_heads) * 16 + 3 * 192 * 480 // tensor + 2 * 192
    assert held_bytes(model, over(tensor)) == BF16 * (2 * layer + 2 * padded * 192 + 192)
    assert step_weight_bytes(model, 5, over(tensor)) == BF16 * (2 * layer + padded * 192 + 192 + 5 * 192)
    assert vocab_padding_bytes(model, over(tensor)) == BF16 * 2 * (tensor * padded - 1003) * 192 // tensor


def test_a_mixture_of_experts() -> None:
    """Qwen3-30B-A3B: of 128 experts a token chooses 8, and the router is whole on every device."""
    model, hidden = known("Qwen3-30B-A3B"), 2048
    attention, norms, router = 2 * hidden * (32 + 4) * 128, 2 * hidden + 2 * 128, hidden * 128
    expert, table = 3 * hidden * 768, 151936 * hidden
    held = 48 * (attention + norms + router + 128 * expert) + 2 * table + hidden
    assert held_bytes(model, None) == BF16 * held
    one = 48 * (attention + norms + router + 8 * expert) + table + hidden
    assert step_weight_bytes(model, 1, None) == BF16 * (one + hidden)
    split = split_model(model, 1, 8)  # KV heads twice, 16 experts on each device
    whole = hidden * 2 * (4 + 1) * 128 + norms + router
    assert held_bytes(split, over(1, 8)) == BF16 * (48 * (whole + 16 * expert) + 2 * table // 8 + hidden)
    read = 16 * (1 - (120 / 128) ** 32)
    assert step_weight_bytes(split, 32, over(1, 8)) == pytest.approx(
        BF16 * (48 * (whole + read * expert) + table // 8 + hidden + 32 * hidden), abs=1
    )


def test_what_grouped_matmuls_read_of_experts() -> None:
    """Qwen3-30B-A3B has 48 x 3 matrices. Those with experts in HBM count, with the local experts that 4
    tokens choose.
    """
    model, matrix = known("Qwen3-30B-A3B"), BF16 * 2048 * 768
    each = 16 * (1 - (120 / 128) ** 4) * matrix
    split = split_model(model, 1, 8)
    assert grouped_matmul_bytes(split, 4, over(1, 8), 144) == pytest.approx(144 * each, abs=1)
    assert grouped_matmul_bytes(split, 4, over(1, 8), 48) == pytest.approx(48 * each, abs=1)
    quantized = split_model(known("Qwen3-30B-A3B", "int4"), 1, 8)  # unpacked before they are multiplied
    assert grouped_matmul_bytes(quantized, 4, over(1, 8), 144) == pytest.approx(144 * each, abs=1)
    of_codes = grouped_matmul_bytes(quantized, 4, over(1, 8), 144, quantized=True)  # by the kernel that takes them
    assert of_codes == pytest.approx(144 * each * (4 + 2 * 16 / 32) / 16, abs=1)  # with scales and minimums of 32
    of_tiles = (1440 + 96) * 23 * 128  # gpt-oss-20b: a matrix's codes and scales in whole tiles
    padded = grouped_matmul_bytes(split_model(known("gpt-oss-20b"), 1, 8), 1, over(1, 8), 72, quantized=True)
    assert padded == 72 * 4 / 8 * of_tiles
    assert grouped_matmul_bytes(known("Llama-3.1-8B"), 4, None, 0) == 0


def test_experts_that_devices_do_not_divide() -> None:
    """Mixtral 8x7B with 7 experts in 4 groups: two on each device, of which one is padding that no step reads."""
    model = known("Mixtral-8x7B")
    mixtures = [replace(block.mlp, num_experts=7) for block in model.blocks if isinstance(block.mlp, ExpertsConfig)]
    model = replace(
        model, blocks=tuple(replace(b, mlp=mixture) for b, mixture in zip(model.blocks, mixtures, strict=True))
    )
    split = split_model(model, 2, 4)
    expert = 3 * 4096 * 14336 // 2
    whole = 4096 * 2 * (4 + 1) * 128 + 2 * 4096 + 4096 * 7
    rest = 32 * whole + 4096
    table = 32000 * 4096 // 8
    assert held_bytes(split, over(2, 4)) == BF16 * (rest + 32 * 2 * expert + 2 * table)
    read = 2 * (1 - (5 / 7) ** 3)
    assert step_weight_bytes(split, 3, over(2, 4)) == pytest.approx(
        BF16 * (rest + 32 * read * expert + table + 3 * 4096), abs=1
    )


def test_experts_in_mxfp4() -> None:
    """gpt-oss-20b: half a byte a weight and a byte for each 32; biases, sinks and the rest in bfloat16."""
    model, hidden = known("gpt-oss-20b"), 2880
    expert = 3 * hidden * hidden // 2 + 3 * hidden * hidden // 32 + BF16 * 3 * hidden
    heads = hidden * (64 + 8 + 8) * 64 + 64 * 64 * hidden + (64 + 8 + 8) * 64 + hidden + 64  # with biases and sinks
    layer = BF16 * (heads + 2 * hidden + hidden * 32 + 32)
    table = BF16 * 201088 * hidden
    assert held_bytes(model, None) == 24 * (layer + 32 * expert) + 2 * table + BF16 * hidden
    assert step_weight_bytes(model, 1, None) == 24 * (layer + 4 * expert) + table + BF16 * 2 * hidden
    assert step_weight_bytes(model, 16, None) == pytest.approx(
        24 * (layer + 32 * (1 - (28 / 32) ** 16) * expert) + table + BF16 * 17 * hidden, abs=1
    )


def test_windows() -> None:
    """Gemma 3 27B: 10 of 62 layers see everything, the others 1,024 tokens; 16 KV heads of 128 features."""
    model = known("Gemma-3-27B")
    layer = 2 * 16 * 128 * BF16
    assert kv_token_bytes(model, "bfloat16") == 62 * layer
    assert kv_sequence_bytes(model, "bfloat16", 1000) == 62 * 1000 * layer
    assert kv_sequence_bytes(model, "bfloat16", 32768) == (10 * 32768 + 52 * 1024) * layer
    hidden = 5376
    dense = hidden * (32 + 16 + 16 + 32) * 128 + 3 * hidden * 21504 + 4 * hidden + 2 * 128
    assert held_bytes(model, None) == BF16 * (62 * dense + 262208 * hidden + hidden)  # one table, which is tied
    assert step_weight_bytes(model, 8, None) == held_bytes(model, None) + BF16 * 8 * hidden


def test_pages_of_windows() -> None:
    """Ten layers share a page, so the 52 with a window are six groups. A decoding sequence keeps 1,024 tokens in each,
    which lie in 16 or 17 pages of 64.
    """
    config = EngineConfig(page_size=64, max_model_len=32768, attention="xla")
    deployment = deploy(config, known("Gemma-3-27B"))
    assert deployment.needs.num_groups == 7
    assert deployment.needs.most(32768, 1) == 32768 // 64 + 6 * 17
    assert deployment.page_bytes == 10 * 64 * 2 * 16 * 128 * 4  # f32 in this form for CPUs


@pytest.mark.parametrize(
    ("scheme", "bits"),  # per weight, with its share of scales and zeros
    [
        ("fp8 blocks", 8 + 32 / 128**2),
        ("compressed int4 g32", 4 + 16 / 32),
        ("compressed int4 g128 asymmetric", 4 + (16 + 8) / 128),
        ("compressed int8", 8 + 16 / 256),
        ("compressed fp8 tensor", 8 + 16 / 256**2),
        ("awq g128", 4 + (16 + 8) / 128),
        ("gptq g128", 4 + (16 + 8) / 128),
        ("gptq in order", 4 + (16 + 8) / 64 + 32 / 256),
        ("gptq 8 bits channel", 8 + (16 + 8) / 256),
    ],
)
def test_formats_from_a_config_alone(tmp_path: Path, scheme: str, bits: float) -> None:
    """Weights are square: 256 features, 4 heads of 64, and as many features inside the feed-forward."""
    fields = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 512,
        "num_attention_heads": 4, "rms_norm_eps": 1e-5, "quantization_config": SCHEMES[scheme].fields,
    }  # fmt: skip
    model = planned(tmp_path, fields)
    assert planned_model(str(tmp_path)) == model  # a folder without files of weights
    matmuls = 3 * 7 * 256 * 256 * bits / 8
    others = BF16 * (3 * 2 * 256 + 256 + 2 * 512 * 256)
    assert held_bytes(model, None) == matmuls + others
    assert step_weight_bytes(model, 1, None) == matmuls + others - BF16 * 511 * 256


@pytest.mark.parametrize(
    ("weights", "bits"), [("int8", 8 + 32 / 4096), ("int4", 4 + 2 * 16 / 32), ("fp8", 8 + 32 / 128**2)]
)
def test_weights_that_are_quantized_while_they_are_loaded(weights: str, bits: float) -> None:
    """Six of Llama-3.1-8B's matmuls have 4,096 input features and one has 14,336; an int8 scale is for all of them."""
    model, attention, mlp = known("Llama-3.1-8B", weights), 2 * 4096 * (32 + 8) * 128, 3 * 4096 * 14336
    matmuls = 32 * (attention + mlp) * bits / 8
    if weights == "int8":
        matmuls -= 32 * 4 * (14336 - 4096)  # `down` has a scale for each of 4,096 rows, not for 14,336
    others = BF16 * (32 * 2 * 4096 + 4096 + 2 * 128256 * 4096)
    assert held_bytes(model, None) == matmuls + others
    with pytest.raises(ConfigError, match="weights = int4 is for checkpoints that are not quantized"):
        preset("gpt-oss-20b", weights="int4")


def test_scales_that_devices_do_not_divide_are_whole_on_each(tmp_path: Path) -> None:
    """384 features are three groups of 128: each of two devices has half of the codes of `down`, and all its scales."""
    fields = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "vocab_size": 512,
        "num_attention_heads": 4, "rms_norm_eps": 1e-5, "quantization_config": SCHEMES["awq g128"].fields,
    }  # fmt: skip
    codes, groups, down_groups = (4 * 256 * 256 + 3 * 256 * 384) // 2, 4 * 256 * 2 + 2 * 384 * 2, 256 * 3
    matmuls = codes // 2 + (2 + 1) * (groups // 2 + down_groups)
    others = BF16 * (2 * 256 + 256 + 2 * 512 * 256 // 2)
    assert held_bytes(split_model(planned(tmp_path, fields), 2), over(2)) == matmuls + others


@pytest.mark.parametrize(
    ("name", "tensor", "expert"), [("gpt-oss-20b", 2, 4), ("Gemma-3-27B", 8, 1), ("Qwen3-30B-A3B", 2, 2)]
)
def test_what_is_counted_is_what_is_compiled(name: str, tensor: int, expert: int) -> None:
    """A stacked decoder of shapes alone, compiled as by `penstock plan`, has the same bytes."""
    model, placement = split_model(known(name), tensor, expert), over(tensor, expert)
    leaves = jax.tree.leaves(abstract_model(model, placement, stacked=True))
    assert held_bytes(model, placement) == sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves
    )


def test_a_module_that_a_config_leaves_out_is_not_quantized(tmp_path: Path) -> None:
    fields = {**PRESETS["Qwen3-0.6B"], "quantization_config": dict(SCHEMES["fp8 blocks"].fields)}
    assert planned(tmp_path, fields).packed == ()
    quantized = dict(planned(tmp_path, fields).blocks[1].packed)
    assert len(quantized) == 7
    for listed, left in [
        (["model.layers.1.self_attn"], 4),
        (["model.layers.*.mlp"], 3),
        (["down_proj"], 1),
        (["model.layers.11", "lm_head"], 0),
    ]:
        fields["quantization_config"]["modules_to_not_convert"] = listed
        assert len(planned(tmp_path, fields).blocks[1].packed) == 7 - left, listed
    fields["quantization_config"]["modules_to_not_convert"] = ["(a+)+b"]
    with pytest.raises(ConfigError, match=r"'\(a\+\)\+b' is not supported: the expression is too long"):
        planned(tmp_path, fields)
    fields["quantization_config"]["modules_to_not_convert"] = 3
    with pytest.raises(ConfigError, match="modules_to_not_convert = 3 is not supported"):
        planned(tmp_path, fields)
