"""Quantized checkpoints of every format compute with what is stored, to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.engine.errors import CheckpointError, ConfigError
from penstock.engine.formats.detection import read_format
from penstock.engine.formats.packing import Packing, leaf_shapes
from penstock.engine.formats.tensor_mapping import Leaf
from penstock.engine.models.layers.quantized import unpacked
from tests.engine.formats.quantized_checkpoints import KINDS
from tests.engine.formats.quantized_weights import SCHEMES, Scheme, fp8_blocks, fp8_whole, mxfp4

ALL = slice(None)


@dataclass(frozen=True)
class Tensor:
    values: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def kind(self) -> str:
        return KINDS[self.values.dtype.name]


def stored_as(tensors: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {f"m{name}": Tensor(values) for name, values in tensors.items()}


def read(
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    shape: tuple[int, ...],
    rows: slice = ALL,
    columns: slice = ALL,
) -> tuple[Packing, dict[str, np.ndarray]]:
    """Reads a weight of `shape`, or the share of the device that has these rows and columns."""
    form, stored = read_format({"quantization_config": fields}), stored_as(tensors)
    assert form is not None
    packing = form.packing("m", stored)
    assert packing is not None
    leaves = form.leaves("m", stored, packing, *shape[-2:])
    for check in form.checks(packing, *shape[-2:]):
        if f"m{check.tensor}" in stored:
            tensor: Any = tensors[check.tensor]
            check.read(tensor.__getitem__, check.stored_shape, ())
    return packing, {
        name: _read_leaf(leaves[name], tensors, (*shape[:-2], *held), kind, rows, columns, shape)
        for name, (held, kind) in leaf_shapes(packing, *shape[-2:]).items()
    }


def _read_leaf(
    leaf: Leaf,
    tensors: Mapping[str, np.ndarray],
    held: tuple[int, ...],
    kind: str,
    rows: slice,
    columns: slice,
    shape: tuple[int, ...],
) -> np.ndarray:
    stored = tensors[leaf.tensor]
    assert leaf.accepts(stored.shape[len(shape) - 2 :])
    assert Tensor(stored).kind in leaf.kinds
    shares = (*(ALL for _ in shape[:-2]), rows, columns)[-len(held) :]
    index = tuple(_scaled(at, full, part) for at, full, part in zip(shares, shape[-len(held) :], held, strict=True))
    found = leaf.read(lambda at: stored[at], held, index)
    assert found.dtype == np.dtype(getattr(ml_dtypes, kind, kind))
    return found


def _scaled(share: slice, full: int, part: int) -> slice:
    start, stop, _ = share.indices(full)
    return slice(start * part // full, -(-stop * part // full))


def weight(num_out: int = 24, num_in: int = 256, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.05, (num_out, num_in)).astype(np.float32)


def values(packing: Packing, leaves: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.asarray(unpacked(packing, {name: jnp.asarray(leaf) for name, leaf in leaves.items()}))


@pytest.mark.parametrize("name", SCHEMES)
def test_every_value_is_the_one_that_is_stored(name: str) -> None:
    tensors, expected = SCHEMES[name].quantize(weight())
    np.testing.assert_array_equal(values(*read(SCHEMES[name].fields, tensors, expected.shape)), expected)


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in ("fp8 blocks", "compressed fp8 tensor")])
def test_a_device_reads_its_share(name: str) -> None:
    tensors, expected = SCHEMES[name].quantize(weight())
    whole = read(SCHEMES[name].fields, tensors, expected.shape)[1]
    rows, columns = slice(9, 20), slice(128, 256)
    for leaf, share in read(SCHEMES[name].fields, tensors, expected.shape, rows, columns)[1].items():
        of_rows = rows if whole[leaf].ndim == 2 else ALL
        if whole[leaf].ndim == 1:
            np.testing.assert_array_equal(share, whole[leaf][columns])
        else:
            at = _scaled(columns, expected.shape[1], whole[leaf].shape[1])
            np.testing.assert_array_equal(share, whole[leaf][of_rows, at])


def test_fp8_blocks_are_what_transformers_makes_of_them() -> None:
    tensors, expected = fp8_blocks(weight(256, 384))
    packed = values(*read(SCHEMES["fp8 blocks"].fields, tensors, expected.shape))
    codes = torch.from_numpy(tensors[".weight"].view(np.uint8)).view(torch.float8_e4m3fn)
    scales = torch.from_numpy(tensors[".weight_scale_inv"])
    reference = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=torch.float32)
    np.testing.assert_array_equal(packed, reference.numpy())
    rounded = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=torch.bfloat16)
    np.testing.assert_array_equal(packed.astype(ml_dtypes.bfloat16).astype(np.float32), rounded.float().numpy())


def test_the_last_blocks_of_fp8_may_be_cut() -> None:
    tensors, expected = fp8_blocks(weight(200, 144))
    assert tensors[".weight_scale_inv"].shape == (2, 2)
    np.testing.assert_array_equal(values(*read(SCHEMES["fp8 blocks"].fields, tensors, (200, 144))), expected)


def test_fp8_may_have_one_scale() -> None:
    tensors, expected = fp8_whole(weight(), per_channel=False)
    fields = {"quant_method": "fp8", "weight_block_size": None}
    one = {".weight": tensors[".weight"], ".weight_scale_inv": tensors[".weight_scale"].reshape(())}
    np.testing.assert_array_equal(values(*read(fields, one, expected.shape)), expected)


def test_experts_in_mxfp4_are_what_transformers_makes_of_them() -> None:
    experts = np.stack([weight(6, 96, seed) for seed in range(3)])
    tensors, expected = mxfp4(experts)
    found = values(*read({"quant_method": "mxfp4"}, tensors, experts.shape))
    np.testing.assert_array_equal(found, expected)
    blocks, scales = (torch.from_numpy(tensors[name]) for name in ("_blocks", "_scales"))
    reference = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, in, out]
    np.testing.assert_array_equal(found.swapaxes(1, 2), reference.numpy())


@pytest.mark.parametrize("zero", [0, 15])
@pytest.mark.parametrize("version", [1, 2])
def test_the_least_and_the_largest_zero_of_gptq(zero: int, version: int) -> None:
    tensors, _ = SCHEMES["gptq g128"].quantize(weight(8, 128))
    stored = (zero - 1) % 16 if version == 1 else zero
    tensors[".qzeros"] = np.full((1, 1), sum(stored << 4 * place for place in range(8)), np.uint32).view(np.int32)
    fields = {**SCHEMES["gptq g128"].fields, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    _, leaves = read(fields, tensors, (8, 128))
    assert (leaves["zeros"] == zero).all()


def test_modules_that_are_not_quantized_stay_as_they_are() -> None:
    plain = stored_as({".weight": weight(), ".bias": weight()[0]})
    for scheme in SCHEMES.values():
        form = read_format({"quantization_config": scheme.fields})
        assert form is not None
        assert form.packing("m", plain) is None


def _spoiled(scheme: Scheme, name: str, value: object) -> dict[str, np.ndarray]:
    tensors, _ = scheme.quantize(weight())
    spoiled = tensors[name].copy()
    spoiled.reshape(-1)[1 if spoiled.size > 1 else 0] = value
    return {**tensors, name: spoiled}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_scale_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    tensors, _ = SCHEMES[name].quantize(weight())
    scales = next(part for part in (".weight_scale_inv", ".weight_scale", ".scales") if part in tensors)
    with pytest.raises(CheckpointError, match=r"1 of \d+ scales that are not finite"):
        read(SCHEMES[name].fields, _spoiled(SCHEMES[name], scales, bad), (24, 256))


@pytest.mark.parametrize("name", ["fp8 blocks", "compressed fp8 channel"])
def test_a_weight_that_is_no_number_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="has 1 of 6144 weights that are not numbers"):
        read(SCHEMES[name].fields, _spoiled(SCHEMES[name], ".weight", np.nan), (24, 256))


def test_an_exponent_that_is_no_number_is_refused() -> None:
    tensors, _ = mxfp4(weight()[None])
    tensors["_scales"][0, 0, 0] = 255
    with pytest.raises(CheckpointError, match="1 of 192 scales that are not finite"):
        read({"quant_method": "mxfp4"}, tensors, (1, 24, 256))


@pytest.mark.parametrize("group", [-1, 4])
def test_a_group_that_is_not_there_is_refused(group: int) -> None:
    scheme = SCHEMES["gptq in order"]
    with pytest.raises(CheckpointError, match=f"names group {group} of 4"):
        read(scheme.fields, _spoiled(scheme, ".g_idx", group), (24, 256))


def test_an_order_that_the_config_denies_is_refused() -> None:
    tensors, _ = SCHEMES["gptq in order"].quantize(weight())
    fields = {**SCHEMES["gptq in order"].fields, "desc_act": False}
    with pytest.raises(CheckpointError, match="desc_act is false"):
        read(fields, tensors, (24, 256))


def test_a_stored_shape_that_differs_is_refused() -> None:
    scheme = SCHEMES["compressed int4 g32"]
    with pytest.raises(CheckpointError, match=r"says \[24, 8\], expected \[24, 256\]"):
        read(scheme.fields, _spoiled(scheme, ".weight_shape", 8), (24, 256))


@pytest.mark.parametrize("name", SCHEMES)
def test_a_weight_without_its_scales_is_refused(name: str) -> None:
    tensors, _ = SCHEMES[name].quantize(weight())
    rest = {part: values for part, values in tensors.items() if "scale" not in part}
    form = read_format({"quantization_config": SCHEMES[name].fields})
    assert form is not None
    with pytest.raises(CheckpointError, match="the checkpoint lacks m"):
        form.packing("m", stored_as(rest))


@pytest.mark.parametrize("name", SCHEMES)
def test_scales_of_another_type_are_refused(name: str) -> None:
    tensors, _ = SCHEMES[name].quantize(weight())
    form = read_format({"quantization_config": SCHEMES[name].fields})
    assert form is not None
    other = {part: values.astype(np.int32) if "scale" in part else values for part, values in tensors.items()}
    with pytest.raises(CheckpointError, match="is of type I32, expected one of"):
        form.packing("m", stored_as(other))


COMPRESSED = SCHEMES["compressed int4 g32"].fields


def _with_weights(**weights: object) -> dict[str, Any]:
    group = COMPRESSED["config_groups"]["group_0"]
    return {**COMPRESSED, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **weights}}}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([1], "not an object"),
        ({"bits": 4}, "quant_method = None is not supported"),
        ({"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes' is not supported"),
        ({"quant_method": ["fp8"]}, "quant_method"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 10**9]}, "weight_block_size = 1000000000"),
        ({"quant_method": "awq", "bits": 3}, "bits = 3"),
        ({"quant_method": "awq", "version": "gemv"}, "version = 'gemv'"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point = False"),
        ({"quant_method": "awq", "group_size": 0}, "group_size = 0"),
        ({"quant_method": "gptq", "bits": 2}, "bits = 2"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}, "dynamic"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": "yes"}, "desc_act = 'yes'"),
        ({**COMPRESSED, "format": "nvfp4-pack-quantized"}, "format = 'nvfp4-pack-quantized'"),
        ({**COMPRESSED, "config_groups": {}}, "lists no groups"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (_with_weights(num_bits=3), "num_bits = 3"),
        (_with_weights(strategy="token"), "strategy = 'token'"),
        (_with_weights(group_size=10**9), "group_size = 1000000000"),
        (_with_weights(type=["int"]), "type = "),
        (_with_weights(actorder="sideways"), "actorder = 'sideways'"),
        (_with_weights(type="float", num_bits=4), "num_bits = 4"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_format({"quantization_config": fields})


BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


@pytest.mark.parametrize(
    ("weights", "activations", "quantized"),
    [
        ({"num_bits": 8, "strategy": "channel"}, BY_TOKEN, True),
        ({"num_bits": 8, "strategy": "group", "group_size": 32}, {"strategy": "token", "dynamic": True}, True),
        ({"num_bits": 8, "strategy": "channel"}, {**BY_TOKEN, "dynamic": False}, False),  # as calibrated
        ({"num_bits": 8, "strategy": "channel"}, {**BY_TOKEN, "symmetric": False}, False),
        ({"num_bits": 8, "strategy": "channel"}, {"num_bits": 8}, False),
        ({"num_bits": 8, "strategy": "channel"}, None, False),
        ({"num_bits": 8, "strategy": "channel"}, ["token"], False),
        ({"num_bits": 4, "strategy": "group", "group_size": 32}, BY_TOKEN, True),
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, {**BY_TOKEN, "type": "float"}, False),
    ],
)
def test_activations_in_int8_by_token_are_those_of_weights_that_are_integers(
    weights: dict[str, Any], activations: object, quantized: bool
) -> None:
    fields = {
        "quant_method": "compressed-tensors",
        "format": "naive-quantized",
        "config_groups": {"a": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
    }
    form = read_format({"quantization_config": fields})
    assert form is not None
    packing = form.expected("m", 64, "float32")
    assert packing is not None
    assert packing.has_int8_activations is quantized


@pytest.mark.parametrize("fields", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_most_checkpoints_are_not_quantized(fields: Mapping[str, Any]) -> None:
    assert read_format(fields) is None
