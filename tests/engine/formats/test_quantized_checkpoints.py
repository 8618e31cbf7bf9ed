"""Quantized checkpoints are loaded packed, and compute what the same values compute unquantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from penstock.engine.errors import CheckpointError, ConfigError
from penstock.engine.loading.checkpoint import check_weights, load_model, read_model_config
from penstock.engine.models import ModelConfig
from penstock.engine.models.layers.basic import GatedMLP
from penstock.engine.models.layers.quantized import Quantized
from penstock.tools.plan import planned_model
from tests.engine.checkpoints import edit_config, reference_logits, write_checkpoint
from tests.engine.formats.quantized_checkpoints import MXFP4_EXPERTS, save, tensors_of, write_quantized
from tests.engine.formats.quantized_weights import SCHEMES
from tests.engine.formats.test_quantized import weight_of
from tests.engine.models.test_models_parity import our_logits

GEOMETRY: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PROMPT = [5, 9, 77, 3, 41, 8, 100]


def forms(config: ModelConfig) -> list[Any]:
    """Returns how each weight is held, but for the type of its scales, which a config does not say."""
    packed = [config.packed, *(block.packed for block in config.blocks)]
    return [[(path, p.code, p.group, p.rows, p.offset, p.has_order) for path, p in one] for one in packed]


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_the_same_values_unquantized(tmp_path: Path, name: str) -> None:
    quantized, plain = write_quantized(tmp_path, SCHEMES[name], "qwen2", **GEOMETRY)
    expected, found = reference_logits(plain, PROMPT), our_logits(quantized, PROMPT)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert forms(planned_model(str(quantized / "config.json"))) == forms(read_model_config(quantized))


OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {  # scheme, family, geometry
    "two-kinds-of-pages": (
        "compressed int4 g32",
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 32,
            "global_head_dim": 32,
        },
    ),
    "fused": ("gptq g128", "phi3", {"num_key_value_heads": 2, "num_attention_heads": 4}),
    "mxfp4-experts": (
        "mxfp4",
        "gpt_oss",
        {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 96, "head_dim": 32, "hidden_size": 64},
    ),
    "fp8-experts": (
        "fp8 blocks",
        "qwen3_moe",
        {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 144, "head_dim": 40},
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_fused_projections_and_experts_of_quantized_checkpoints(tmp_path: Path, case: str) -> None:
    scheme, family, geometry = OTHERS[case]
    form = MXFP4_EXPERTS if scheme == "mxfp4" else SCHEMES[scheme]
    quantized, plain = write_quantized(tmp_path, form, family, **{**GEOMETRY, **geometry})
    expected, found = reference_logits(plain, PROMPT), our_logits(quantized, PROMPT)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert forms(planned_model(str(quantized / "config.json"))) == forms(read_model_config(quantized))


@pytest.mark.parametrize(("scheme", "size"), [("fp8 blocks", 128), ("compressed int4 g32", 24)])
def test_heads_that_take_turns_in_a_quantized_tensor(tmp_path: Path, scheme: str, size: int) -> None:
    """The heads are queries, keys, values and gates of a delta net, or queries and gates of attention."""
    sizes = {"linear_key_head_dim": size, "linear_value_head_dim": size, "head_dim": 128, "num_experts": 0}
    quantized, plain = write_quantized(tmp_path, SCHEMES[scheme], "qwen3_next", **GEOMETRY, **sizes)
    expected, found = reference_logits(plain, PROMPT), our_logits(quantized, PROMPT)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_a_block_of_rows_that_two_parameters_share_is_refused(tmp_path: Path) -> None:
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 128, "num_experts": 0}
    quantized, _ = write_quantized(tmp_path, SCHEMES["fp8 blocks"], "qwen3_next", **GEOMETRY, **sizes)
    with pytest.raises(ConfigError, match=r"in_proj_qkvz: a block of 128 rows has a scale that is not of one of"):
        check_weights(quantized, read_model_config(quantized))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quantized(tmp_path_factory.mktemp("sound"), SCHEMES["gptq in order"], **GEOMETRY)[0]


def test_what_is_in_memory_is_little_more_than_what_is_stored(sound: Path) -> None:
    model = load_model(sound, read_model_config(sound))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    assert held <= 1.05 * (sound / "model.safetensors").stat().st_size
    assert held == check_weights(sound, read_model_config(sound))
    mlp = model.blocks[1].mlp
    assert isinstance(mlp, GatedMLP)
    down = mlp.down
    assert isinstance(down.held, Quantized)
    assert down.arrays["codes"].nbytes == 256 * 384 // 2


def test_stacked_layers_are_stacked_from_the_file(sound: Path) -> None:
    config = read_model_config(sound)
    stacked, single = load_model(sound, config, stacked=True), load_model(sound, config)
    assert len(stacked.blocks) == 1
    for (path, leaf), *layers in zip(
        *(nnx.to_flat_state(nnx.state(block)) for block in (stacked.blocks[0], *single.blocks)), strict=True
    ):
        assert all(layer[0] == path for layer in layers)
        np.testing.assert_array_equal(leaf[...], np.stack([layer[1][...] for layer in layers]))


QKV = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        (f"{QKV}.qzeros", None, rf"lacks tensors of the model: {QKV}\.qzeros"),
        (f"{QKV}.scales", None, rf"lacks {QKV}\.scales"),
        (f"{QKV}.g_idx", None, rf"lacks tensors of the model: {QKV}\.g_idx"),
        (f"{QKV}.qweight", None, rf"lacks tensors of the model: {QKV}\.weight"),
        (f"{QKV}.more", np.zeros(3, np.float32), rf"no place for: {QKV}\.more"),
        (f"{QKV}.qweight", np.zeros((32, 128), np.int32), r"qweight has shape \[32, 128\], expected \[32, 256\]"),
        (f"{QKV}.scales", np.zeros((4, 128), np.float16), r"scales has shape \[4, 128\], expected \[4, 256\]"),
        (f"{QKV}.scales", np.zeros((4, 256), np.int32), r"scales is of type I32, expected one of F32, F16, BF16"),
        (f"{QKV}.qweight", np.zeros((32, 256), np.float32), "qweight is of type F32, expected one of I32"),
        (f"{QKV}.scales", np.full((4, 256), np.nan, np.float16), rf"tensor {QKV}\.scales has 1024 of 1024 scales that"),
        (f"{QKV}.g_idx", np.full(256, 7, np.int32), rf"tensor {QKV}\.g_idx names group 7 of 4, in model\.safetensors"),
    ],
)
def test_a_spoiled_tensor_is_refused_by_name(
    sound: Path, tmp_path: Path, name: str, spoil: np.ndarray | None, message: str
) -> None:
    tensors = tensors_of(sound / "model.safetensors")
    spoiled = {**tensors, name: spoil} if spoil is not None else {k: v for k, v in tensors.items() if k != name}
    (tmp_path / "config.json").write_text((sound / "config.json").read_text())
    save(tmp_path / "model.safetensors", spoiled)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path, read_model_config(tmp_path))


def test_features_that_are_not_in_whole_groups_are_refused(sound: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(sound / "model.safetensors")
    (tmp_path / "config.json").write_text((sound / "config.json").read_text())
    edit_config(tmp_path, hidden_size=264, head_dim=128)
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.k_proj: 264 input features are not a multiple of 64"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(("weights", "bits", "error"), [("int8", 8.2, 0.008), ("int4", 5.01, 0.1), ("fp8", 8.1, 0.04)])
def test_an_unquantized_checkpoint_is_quantized_while_it_is_loaded(
    tmp_path: Path, weights: str, bits: float, error: float
) -> None:
    directory = write_checkpoint(tmp_path, "qwen3", dtype="bfloat16", **GEOMETRY)
    plain = load_model(directory, read_model_config(directory)).blocks[0]
    config = read_model_config(directory, weights=weights)
    model = load_model(directory, config)
    assert model.head is None or not isinstance(model.head.held, Quantized)
    for name in ("gate", "up", "down"):
        held, kernel = getattr(model.blocks[0].mlp, name), getattr(plain.mlp, name).kernel[...].astype("float32")
        difference = np.asarray(weight_of(held) - kernel.T)
        assert np.sqrt((difference**2).mean()) <= error * np.sqrt((np.asarray(kernel) ** 2).mean())
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(held))) * 8 <= bits * kernel.size


def test_what_is_quantized_is_not_quantized_again(sound: Path) -> None:
    with pytest.raises(ConfigError, match="weights = int8 is for checkpoints that are not quantized"):
        read_model_config(sound, weights="int8")
