"""A checkpoint's KV cache scales are read by all their names, used in fp8 pages, and refused if broken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.engine import CheckpointError, ConfigError, Engine, EngineConfig, Request, SamplingParams
from penstock.engine.deployment.deployment import deploy
from penstock.engine.formats.detection import read_format
from penstock.engine.formats.kv_cache import KVCacheScheme, read_kv_cache_scheme
from penstock.engine.loading.checkpoint import check_weights, load_model, read_model_config
from penstock.engine.models import Decoder, ModelConfig, num_parameters
from penstock.engine.sharding.placement import split_model
from penstock.tools.plan.models import planned_model
from tests.engine.attention.kv_scale_checkpoints import (
    COMPRESSED,
    SCHEME,
    random_scales,
    reference_logprobs,
    with_scales,
)
from tests.engine.engines import SMALL, TINY, VOCAB_SIZE, drive, write_model
from tests.engine.formats.quantized_checkpoints import save, tensors_of, write_quantized
from tests.engine.formats.quantized_weights import SCHEMES

FP8 = "float8_e4m3fn"
LAYERS, KV_HEADS = 2, 2
XLA = replace(SMALL, attention="xla")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("plain"), num_hidden_layers=LAYERS)


def scales_of(model: Decoder) -> np.ndarray:
    """Returns f32 [layers, 2 (keys, values), num_kv_heads], as they are held; of a stack, once more in front."""
    of_layers = [[np.asarray(part[...]) for part in _parts(block.attention)] for block in model.blocks]
    return np.array(of_layers)


def _parts(attention: Any) -> tuple[Any, Any]:
    return attention.k_scale, attention.v_scale


@pytest.mark.parametrize("shape", [(1,), (KV_HEADS, 1, 1)], ids=["per tensor", "per head"])
def test_tokens_are_those_of_a_cache_quantized_by_the_scales(
    shape: tuple[int, ...], plain: Path, tmp_path: Path
) -> None:
    """The reference is transformers with the same codes, over prompts of several chunks and decoded tokens. Where only
    the scheme is given, pages are fp8.
    """
    layers = random_scales(LAYERS, shape)
    engine = Engine.from_checkpoint(with_scales(plain, tmp_path, layers), XLA)
    assert engine.describe().kv_dtype == FP8
    prompt = tuple(range(7, 47))
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=20, ignore_eos=True)
    result = drive(engine, [Request("r", prompt, params)])["r", 0]
    tokens = [*prompt, *result.token_ids]
    expected, exact = (reference_logprobs(plain, tokens, scales) for scales in (layers, None))
    errors, changes = [], []
    for place, entry in enumerate(result.logprobs, len(prompt) - 1):
        found = {top.token_id: top.logprob for top in entry.top if top.token_id < VOCAB_SIZE}
        errors += [abs(logprob - expected[place, token]) for token, logprob in found.items()]
        changes += [abs(exact[place, token] - expected[place, token]) for token in found]
    assert len(errors) >= 12 * 15
    assert max(errors) < 2e-3
    assert max(changes) > 20 * max(errors)  # what quantizing does, and what another scale would do


@pytest.mark.parametrize("config", [replace(XLA, kv_cache_dtype="unquantized"), replace(XLA, kv_cache_dtype="int8")])
def test_pages_of_other_types_need_no_scales(config: EngineConfig, plain: Path, tmp_path: Path) -> None:
    """Scales that could be used are ignored too."""
    scaled = with_scales(plain, tmp_path, [{name: np.array([np.nan], np.float32) for name in COMPRESSED}] * LAYERS)
    request = Request("r", tuple(range(7, 30)), SamplingParams(max_tokens=6, temperature=0.0, logprobs=2))
    ours, without = (drive(Engine.from_checkpoint(path, config), [request])["r", 0] for path in (scaled, plain))
    assert ours.logprobs == without.logprobs


NAMES: dict[str, tuple[str, str]] = {
    "compressed-tensors": COMPRESSED,
    "ModelOpt": ("k_proj.k_scale", "v_proj.v_scale"),
    "vLLM": ("attn.k_scale", "attn.v_scale"),
    "compressed-tensors, earlier": ("k_proj.output_scale", "v_proj.output_scale"),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_scales_are_found_by_all_their_names(names: tuple[str, str], dtype: str, plain: Path, tmp_path: Path) -> None:
    """Scales may have any type, with or without a scheme; those of queries say nothing about the cache."""
    values = np.array([[0.25, 0.5], [0.75, 1.0]]).astype(getattr(ml_dtypes, dtype, dtype))
    layers = [{name: np.asarray(value) for name, value in zip(names, of, strict=True)} for of in values]
    layers[0]["q_scale"] = np.array(3, np.float32)
    path = with_scales(plain, tmp_path, layers, None)
    config = read_model_config(path)
    assert config.kv_dtype is None
    loaded = scales_of(load_model(path, config))
    np.testing.assert_array_equal(loaded, values.astype(np.float32)[..., None].repeat(KV_HEADS, axis=2))


def test_scales_stand_beside_quantized_weights(tmp_path: Path) -> None:
    """llm-compressor writes both: FP8 for weights and KV cache."""
    scheme = SCHEMES["compressed fp8 tensor"]
    scheme = replace(scheme, fields={**scheme.fields, "kv_cache_scheme": SCHEME})
    path, _ = write_quantized(tmp_path, scheme)
    tensors = tensors_of(path / "model.safetensors")
    for name in [f"model.layers.{layer}.self_attn.{scale}" for layer in range(LAYERS) for scale in COMPRESSED]:
        tensors[name] = np.asarray([0.5], ml_dtypes.bfloat16)
    save(path / "model.safetensors", tensors)
    config = read_model_config(path)
    assert (config.kv_dtype, config.is_packed) == (FP8, True)
    np.testing.assert_array_equal(scales_of(load_model(path, config)), np.full((LAYERS, 2, KV_HEADS), 0.5))


def test_one_scale_may_be_that_of_keys_and_values(plain: Path, tmp_path: Path) -> None:
    path = with_scales(
        plain, tmp_path, [{"kv_scale": np.array(0.5, np.float32)}, {"kv_scale": np.array(2, np.float32)}], None
    )
    loaded = scales_of(load_model(path, read_model_config(path)))
    np.testing.assert_array_equal(loaded, np.broadcast_to([[[0.5]], [[2.0]]], (LAYERS, 2, KV_HEADS)))


def test_a_stack_has_the_scales_of_all_layers_and_copies_of_a_head_have_its_own(plain: Path, tmp_path: Path) -> None:
    layers = random_scales(LAYERS, (KV_HEADS,))
    path = with_scales(plain, tmp_path, layers)
    expected = np.array([[layer[name] for name in COMPRESSED] for layer in layers])
    config = read_model_config(path)
    stacked = scales_of(load_model(path, config, stacked=True))  # [1, 2, layers, heads]
    np.testing.assert_array_equal(stacked[0].swapaxes(0, 1), expected)
    copied = scales_of(load_model(path, split_model(config, 4)))
    np.testing.assert_array_equal(copied, expected.repeat(2, axis=2))
    assert num_parameters(config) == num_parameters(read_model_config(plain))


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (
            np.array([0], np.float32),
            r"v_scale holds a scale of 0\.0, expected finite numbers above 1e-30, in model\.safetensors",
        ),
        (np.array([0.5, -2], np.float32), r"v_scale holds a scale of -2\.0"),
        (np.array([np.nan, 1], np.float32), "v_scale holds a scale of nan"),
        (np.float32(np.inf), "v_scale holds a scale of inf"),
        (np.array([1, 2, 3], np.float32), r"v_scale has shape \[3\], expected \[2\]"),
        (np.array([[1, 2], [3, 4]], np.float32), r"v_scale has shape \[2, 2\], expected \[2\]"),
        (np.array([1], np.int8), "v_scale is of type I8, expected one of"),
    ],
    ids=str,
)
def test_scales_that_cannot_be_are_refused_by_name(
    scale: np.ndarray, message: str, plain: Path, tmp_path: Path
) -> None:
    layers = random_scales(LAYERS, (1,))
    layers[1]["v_scale"] = scale
    path = with_scales(plain, tmp_path, layers)
    with pytest.raises(CheckpointError, match=rf"tensor model\.layers\.1\.self_attn\.{message}"):
        Engine.from_checkpoint(path, XLA)


@pytest.mark.parametrize(("scheme", "missing"), [(SCHEME, 4), (None, 1)], ids=["promised", "of other layers"])
def test_layers_without_scales_are_named(
    scheme: Mapping[str, Any] | None, missing: int, plain: Path, tmp_path: Path
) -> None:
    layers = random_scales(LAYERS, (1,))
    layers = [{}, {}] if missing == 4 else [layers[0], {"k_scale": layers[1]["k_scale"]}]
    path = with_scales(plain, tmp_path, layers, scheme)
    with pytest.raises(CheckpointError, match=r"lacks tensors of the model: .*model\.layers\.1\.self_attn\.v_scale"):
        Engine.from_checkpoint(path, replace(XLA, kv_cache_dtype=FP8))
    with pytest.raises(CheckpointError, match="lacks tensors of the model"):
        check_weights(path, read_model_config(path))


def test_scales_by_two_names_are_refused(plain: Path, tmp_path: Path) -> None:
    layers = random_scales(LAYERS, (1,))
    layers[0]["k_proj.k_scale"] = np.array([1], np.float32)
    path = with_scales(plain, tmp_path, layers)
    with pytest.raises(CheckpointError, match=r"no place for: model\.layers\.0\.self_attn\.k_proj\.k_scale"):
        Engine.from_checkpoint(path, XLA)


def test_a_scheme_without_static_scales_leaves_each_token_its_own(plain: Path, tmp_path: Path) -> None:
    scheme = {**SCHEME, "dynamic": True, "strategy": "token"}
    config = read_model_config(with_scales(plain, tmp_path, [], scheme))
    assert config.kv_dtype == FP8
    assert not any(block.attention.has_kv_scales for block in config.blocks)
    assert deploy(XLA, config).kv_dtype == FP8


def with_fp8_scheme() -> ModelConfig:
    blocks = tuple(block.with_attention(has_kv_scales=True) for block in TINY.blocks)
    return replace(TINY, blocks=blocks, kv_dtype=FP8)


@pytest.mark.parametrize(
    ("attention", "setting", "expected"),
    [
        ("xla", "auto", FP8),
        ("xla", "unquantized", "float32"),
        ("xla", "int8", "int8"),
        ("native", "auto", "float32"),  # it has no pages of fp8, and all that the scheme would save is memory
        ("native", "int8", "int8"),
    ],
)
def test_where_nothing_is_set_pages_are_as_the_checkpoint_says(attention: str, setting: str, expected: str) -> None:
    """An implementation must have that type; scales that are not for this type are not loaded."""
    deployed = deploy(EngineConfig(attention=attention, kv_cache_dtype=setting), with_fp8_scheme())
    assert deployed.kv_dtype == expected
    assert {block.attention.has_kv_scales for block in deployed.model.blocks} == {expected == FP8}


def test_a_plan_knows_the_scheme_from_config_json_alone(plain: Path, tmp_path: Path) -> None:
    path = with_scales(plain, tmp_path, [])
    (path / "model.safetensors").unlink()
    config = planned_model(str(path))
    assert config.kv_dtype == FP8
    assert all(block.attention.has_kv_scales for block in config.blocks)


@pytest.mark.parametrize(
    ("changed", "static"),
    [
        ({}, True),
        ({"strategy": "attn_head"}, True),
        ({"strategy": None, "symmetric": None, "dynamic": None}, True),
        ({"dynamic": True}, False),
        ({"dynamic": True, "strategy": "token"}, False),
    ],
    ids=str,
)
def test_schemes_of_fp8_are_read(changed: dict[str, Any], static: bool) -> None:
    fields = {"quantization_config": {"kv_cache_scheme": {**SCHEME, **changed}}}
    assert read_kv_cache_scheme(fields) == KVCacheScheme(is_static=static)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("static", "kv_cache_scheme is not an object: 'static'"),
        ({"num_bits": 8}, "kv_cache_scheme.type = 'int' is not supported: expected float"),
        ({**SCHEME, "num_bits": 4}, "kv_cache_scheme.num_bits = 4 is not supported"),
        ({**SCHEME, "symmetric": False}, "kv_cache_scheme.symmetric = False"),
        ({**SCHEME, "strategy": "token"}, "kv_cache_scheme.strategy = 'token' .* expected one of tensor, attn_head"),
        ({**SCHEME, "strategy": ["tensor"]}, "kv_cache_scheme.strategy"),
        ({**SCHEME, "dynamic": "local"}, "kv_cache_scheme.dynamic = 'local'"),
    ],
    ids=str,
)
def test_other_schemes_are_refused_by_name(scheme: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_kv_cache_scheme({"quantization_config": {"kv_cache_scheme": scheme}})


@pytest.mark.parametrize("config", [None, {}, {"kv_cache_scheme": None}])
def test_most_checkpoints_say_nothing_of_their_cache(config: dict[str, Any] | None) -> None:
    assert read_kv_cache_scheme({"quantization_config": config}) is None


def test_a_scheme_of_the_cache_alone_leaves_the_weights_as_they_are() -> None:
    fields = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
    assert read_format({"quantization_config": fields}) is None
