"""The TPU kernels for quantized weights, interpreted on CPU, against XLA on the same arrays."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from penstock.engine import Engine, EngineConfig, Request, SamplingParams
from penstock.engine.attention.fused import FusedAttention
from penstock.engine.deployment import opening
from penstock.engine.formats.packing import Packing
from penstock.engine.kernels.tpu import KernelForm, grouped_quantized_matmul, quantized_matmul
from penstock.engine.kernels.tpu.grouped_matmul import tiles_of
from penstock.engine.kernels.tpu.unpacking import pair_of, scales_of
from penstock.engine.loading.checkpoint import load_model
from penstock.engine.models.layers.quantized import unpacked
from penstock.engine.sharding.linears import TPUKernel, prepare_for_tpu
from tests.engine.engines import drive, write_model
from tests.engine.formats.quantized_stacks import random_stack
from tests.engine.sharding.devices import said_by
from tests.support.patience import pairs

FORMS = {
    "int8 in groups of 32 with zeros": Packing("int8", 32, scale="bfloat16", offset="zeros"),
    "int8 per channel with zeros": Packing("int8", 0, offset="zeros"),
    "int4 in groups of 32": Packing("int4", 32, scale="float16"),
    "int4 with minimums": Packing("int4", 32, scale="float16", offset="minimums"),
    "int4 in groups of 128 with zeros": Packing("int4", 128, scale="float16", offset="zeros"),
    "int4 per channel": Packing("int4", 0, scale="bfloat16"),
    "fp8 in blocks": Packing("fp8", 128, rows=128),
    "fp8 in groups": Packing("fp8", 128),
    "fp8 per channel": Packing("fp8", 0, scale="bfloat16"),
    "fp8 per tensor": Packing("fp8", 0, rows=0),
    "mxfp4": Packing("fp4", 32, scale="e8m0"),
}
OF_BF16 = {
    "int8 in groups of 32 with zeros": FORMS["int8 in groups of 32 with zeros"],
    "int4 in groups of 32": Packing("int4", 32, scale="bfloat16"),
    "int4 in groups of 32, float16": FORMS["int4 in groups of 32"],
    "int4 in groups of 128 with zeros": Packing("int4", 128, scale="bfloat16", offset="zeros"),
    "fp8 in blocks": Packing("fp8", 128, rows=128, scale="bfloat16"),
    "fp8 in groups": Packing("fp8", 64, scale="bfloat16"),
    "mxfp4": FORMS["mxfp4"],
}
EXPERTS = {**FORMS, "int8 per channel": Packing("int8", 0)}  # XLA reads that of one weight as it is
NUM_LAYERS = 3


def held_of(form: KernelForm, leaves: dict[str, jax.Array], num_out: int) -> dict[str, jax.Array]:
    names = zip(form.leaves, form.names, strict=True)
    return {name: form.held(leaf, leaves, num_out) for leaf, name in names}


@pytest.mark.parametrize(
    ("name", "num_tokens", "num_out", "num_in"),
    # whole tiles; the last ones cut, in several blocks of inputs; few rows and many tokens
    pairs(FORMS, [(16, 256, 512), (5, 200, 4352), (600, 48, 256)]),
)
def test_a_layer_of_a_stack_is_multiplied_by(name: str, num_tokens: int, num_out: int, num_in: int) -> None:
    packing, form = FORMS[name], KernelForm(FORMS[name])
    assert KernelForm.serves(packing)
    leaves = {leaf: jnp.asarray(a) for leaf, a in random_stack(packing, num_out, num_in, NUM_LAYERS).items()}
    x = jnp.asarray(np.random.default_rng(1).normal(size=(num_tokens, num_in)), jnp.bfloat16)
    held = held_of(form, leaves, num_out)
    multiply = jax.jit(partial(quantized_matmul, form, num_out=num_out, interpret=True))
    weights = np.asarray(unpacked(packing, leaves))
    rounded = weights if packing.group == 0 else weights.astype(ml_dtypes.bfloat16)  # the sum of a row is scaled
    y = np.asarray(multiply(x, held, jnp.int32(2)), np.float64)
    wide, weight = np.asarray(x, np.float64), np.asarray(rounded[2], np.float64)
    zeros = 1 if packing.offset == "none" or packing.group else 256  # the sum of what is subtracted may be as large
    assert (np.abs(y - wide @ weight.T) <= zeros * 1e-5 * (np.abs(wide) @ np.abs(weight).T) + 1e-30).all()


@pytest.mark.parametrize(
    "packing",
    [
        Packing("int8", 0),  # XLA reads it as it is
        Packing("int4", 64, offset="zeros", has_order=True),
        Packing("int4", 32, scale="uint8", offset="minimums", super_group=256),
        Packing("int6", 16, scale="int8", super_group=256),
        Packing("fp8", 96, rows=1),
        Packing("fp8", 128, rows=64),
    ],
)
def test_other_packings_have_no_kernel(packing: Packing) -> None:
    assert not KernelForm.serves(packing)


def test_what_is_held_takes_no_more_than_what_is_stored_in_whole_tiles() -> None:
    for packing in FORMS.values():
        form, leaves = KernelForm(packing), random_stack(packing, 256, 512)
        held = held_of(form, {leaf: jnp.asarray(array) for leaf, array in leaves.items()}, 256)
        assert held["codes_by_input"].nbytes == leaves["codes"].nbytes
        for leaf, name in zip(form.leaves[1:], form.names[1:], strict=True):
            num_groups, num_rows = packing.num_groups(512), packing.num_row_groups(256) if packing.rows else 256
            assert held[name].shape == (-(-num_groups // 8) * 8, -(-num_rows // 128) * 128)
            assert held[name].dtype.itemsize == leaves[leaf].dtype.itemsize


@pytest.mark.parametrize("name", ["fp8 in blocks", "fp8 per channel", "int4 per channel", "mxfp4"])
def test_chips_read_the_same_weights_from_their_own_fp8(name: str) -> None:
    """All codes are among the weights: minus zero, and of fp8 those that are not numbers, in rows of their own."""
    packing, num_out, num_in = FORMS[name], 256, 256
    leaves = {leaf: jnp.asarray(array) for leaf, array in random_stack(packing, num_out, num_in, 1).items()}
    codes = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], leaves["codes"].shape)
    x = jnp.asarray(np.random.default_rng(4).normal(size=(8, num_in)), jnp.bfloat16)
    products = []
    for form in (KernelForm.of_chip(packing, kind) for kind in ("TPU v5 lite", "TPU7x")):
        held = held_of(form, {**leaves, "codes": jnp.asarray(codes)}, num_out)
        y = jax.jit(partial(quantized_matmul, form, num_out=num_out, interpret=True))(x, held, jnp.int32(0))
        products.append(np.asarray(y))
    one, other = products
    np.testing.assert_array_equal(one, other)
    assert (
        np.isnan(one).any(axis=0) == ([code % 128 == 127 for code in range(256)] if packing.code == "fp8" else False)
    ).all()


@pytest.mark.parametrize("name", OF_BF16)
def test_chips_that_compute_with_bfloat16_round_weights_as_others_do(name: str) -> None:
    packing, num_out = OF_BF16[name], 256
    num_in = 608 if packing.group == 32 else 640  # the former ends within a tile
    forms = [KernelForm.of_chip(packing, kind) for kind in ("TPU v5 lite", "TPU v6 lite", "TPU7x")]
    assert [form.is_scaled_in_bf16 for form in forms] == [False, True, True]
    leaves = {leaf: jnp.asarray(array) for leaf, array in random_stack(packing, num_out, num_in, 1).items()}
    x = jnp.asarray(np.random.default_rng(4).normal(size=(8, num_in)), jnp.bfloat16)
    multiplied = [partial(quantized_matmul, form, num_out=num_out, interpret=True) for form in forms]
    rounded = {"xla_allow_excess_precision": False}  # otherwise a CPU may keep products in f32
    first, *others = (
        np.asarray(jax.jit(multiply, compiler_options=rounded)(x, held_of(form, leaves, num_out), jnp.int32(0)))
        for form, multiply in zip(forms, multiplied, strict=True)
    )
    for other in others:
        np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("name", ["int4 in groups of 128 with zeros", "int4 with minimums"])
@pytest.mark.parametrize("scale", ["float16", "bfloat16"])
def test_bfloat16_rounds_weights_with_offsets_nearly_as_f32_does(name: str, scale: str) -> None:
    """A row of x that has a single one gives a weight."""
    packing, num_out, num_in = replace(FORMS[name], scale=scale), 128, 256
    form = KernelForm.of_chip(packing, "TPU v6 lite")
    leaves = {leaf: jnp.asarray(array) for leaf, array in random_stack(packing, num_out, num_in, 1).items()}
    multiply = partial(quantized_matmul, form, num_out=num_out, interpret=True)
    rounded = {"xla_allow_excess_precision": False}
    x = jnp.eye(num_in, dtype=jnp.bfloat16)
    y = np.asarray(jax.jit(multiply, compiler_options=rounded)(x, held_of(form, leaves, num_out), jnp.int32(0))).T
    weights = np.asarray(unpacked(packing, leaves), np.float64)[0]
    half_a_place, rest = 2.0**-8 * (1 + 2.0**-4), np.zeros_like(weights)
    if packing.offset == "minimums":  # which lie apart from the scale, and are rounded before they are added
        scales, minimums = (
            np.repeat(np.asarray(leaves[leaf], np.float64)[0], 32, 1) for leaf in ("scales", "minimums")
        )
        rest = 2 * np.abs(8 * scales - minimums) + np.abs(scales) / 4
    assert (np.abs(y - weights) <= half_a_place * (np.abs(weights) + rest)).all()


@pytest.mark.parametrize(("offset", "most"), [("none", 8), ("zeros", 15)])
def test_a_float16_is_two_bfloat16_that_codes_can_be_multiplied_by(offset: str, most: int) -> None:
    packing = Packing("int4", 32, scale="float16", offset=offset)
    form = KernelForm.of_chip(packing, "TPU v6 lite")
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    values = values[np.isfinite(values)]
    scales = scales_of(form, jnp.asarray(values.view(np.int16)))
    larger, smaller = (np.asarray(part) for part in pair_of(form, scales))
    np.testing.assert_array_equal(larger + smaller, values.astype(np.float32))
    codes = np.arange(-most, most + 1, dtype=np.float32)[:, None]
    for part, is_exact in ((larger, True), (smaller, offset == "none")):
        products = codes * part
        rounded = products.astype(ml_dtypes.bfloat16).astype(np.float32)
        assert (rounded == products).all() == is_exact
        assert (np.abs(rounded - products) <= 2.0**-12 * np.abs(codes * larger)).all()


@pytest.mark.parametrize(
    "packing",
    [
        Packing("int4", 32),
        Packing("int8", 32, scale="float16"),
        Packing("int8", 32, scale="bfloat16", offset="minimums"),  # which round twice
        Packing("fp8", 8, scale="bfloat16"),  # half a tile
        Packing("fp8", 0, scale="bfloat16"),
    ],
)
def test_what_bfloat16_cannot_scale_exactly_is_scaled_in_f32(packing: Packing) -> None:
    assert not KernelForm.of_chip(packing, "TPU v6 lite").is_scaled_in_bf16


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_a_stacked_decoder_gives_the_tokens_that_xla_gives(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_model(tmp_path, family, torch_dtype="bfloat16", hidden_size=64, intermediate_size=128)
    small = EngineConfig(max_num_seqs=4, max_batch_tokens=16, page_size=16, num_pages=32, max_model_len=64)
    config = replace(small, weights="int4", dtype="bfloat16", attention="xla", matmul="xla", decode_steps=1)
    requests = [
        Request(str(i), tuple(range(7, 7 + length)), SamplingParams(max_tokens=5, temperature=0.0))
        for i, length in enumerate((21, 2))
    ]
    expected = drive(Engine.from_checkpoint(directory, config), requests)
    models: list[Any] = []

    def with_kernels(*args: Any, **kwargs: Any) -> Any:
        models.append(prepare_for_tpu(load_model(*args, **kwargs), None, interpret=True))
        return models[0]

    attention = FusedAttention(interpret=pltpu.InterpretParams(dma_execution_mode="eager"))
    monkeypatch.setattr("penstock.engine.deployment.deployment.attention_for", lambda *_, **__: attention)
    monkeypatch.setattr(opening, "load_model", with_kernels)
    results = drive(Engine.from_checkpoint(directory, replace(config, attention="auto")), requests)
    mlp = models[0].blocks[0].mlp
    assert isinstance((mlp if family == "qwen3" else mlp.experts).down.held, TPUKernel)
    assert {key: result.token_ids for key, result in results.items()} == {
        key: result.token_ids for key, result in expected.items()
    }


def test_each_device_multiplies_by_its_share() -> None:
    """A process has eight devices; kernels_process.py says how far 1, 2 and 4 of them are from exact sums."""
    found = said_by("tests.engine.kernels.kernels_process")
    assert found["kernels"] == {"1": 7, "2": 7, "4": 5}  # each of four has half of a block and of a group
    assert max(found["errors"].values()) < 1e-5
    for of_layout in found["mixtures"].values():  # XLA rounds scaled weights to bf16
        assert max(of_layout.values()) < 0.02


@pytest.mark.parametrize(
    ("name", "num_rows", "num_out", "sizes"),
    pairs(
        [
            "int8 in groups of 32 with zeros",
            "int8 per channel",
            "int4 with minimums",
            "fp8 in blocks",
            "fp8 per channel",
            "fp8 per tensor",
            "mxfp4",
        ],
        [
            (40, 200, (20, 0, 13, 5)),  # the last rows are nobody's
            (8, 128, (0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4)),  # more experts than rows
            (24, 128, (0, 0, 0)),
            (40, 48, (0, 0, 40)),  # one expert has all rows
            (300, 128, (290, 0, 1, 9)),  # more than one tile of rows
        ],
    ),
)
def test_rows_are_multiplied_by_the_weights_of_their_experts(
    name: str, num_rows: int, num_out: int, sizes: tuple[int, ...]
) -> None:
    packing, form, num_in = EXPERTS[name], KernelForm(EXPERTS[name]), 192 if name == "mxfp4" else 256
    assert KernelForm.serves(packing, of_experts=True)
    leaves = random_stack(packing, num_out, num_in, 2, len(sizes))
    held = held_of(form, {leaf: jnp.asarray(array) for leaf, array in leaves.items()}, num_out)
    rows = jnp.asarray(np.random.default_rng(3).normal(size=(num_rows, num_in)), jnp.bfloat16)
    multiply = jax.jit(partial(grouped_quantized_matmul, form, num_out=num_out, interpret=True))
    y = np.asarray(multiply(rows, jnp.array(sizes, jnp.int32), held, jnp.int32(1)), np.float64)
    whole = unpacked(packing, {leaf: jnp.asarray(array[1]) for leaf, array in leaves.items()})
    weights = np.asarray(whole.astype(jnp.bfloat16) if packing.group else whole, np.float64)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    for row, expert in enumerate(owners):
        x = np.asarray(rows[row], np.float64)
        largest = np.abs(weights[expert]) @ np.abs(x)
        assert (np.abs(y[row] - weights[expert] @ x) <= 1e-5 * largest + 1e-30).all()


@pytest.mark.parametrize("name", ["int4 with minimums", "fp8 in blocks", "mxfp4"])
def test_scales_of_experts_that_have_no_rows_are_not_looked_at(name: str) -> None:
    """Scales of other layers are not either: all of them are infinite or no numbers."""
    packing, form, sizes = FORMS[name], KernelForm(FORMS[name]), (0, 5, 0, 3)
    leaves = {leaf: jnp.asarray(array) for leaf, array in random_stack(packing, 256, 256, 2, len(sizes)).items()}
    is_used = jnp.zeros((2, len(sizes), 1, 1), bool).at[1].set(jnp.array(sizes)[:, None, None] > 0)
    poisoned = {
        leaf: array if leaf == "codes" else jnp.where(is_used, array, 255 if array.dtype == jnp.uint8 else jnp.nan)
        for leaf, array in leaves.items()
    }
    rows = jnp.asarray(np.random.default_rng(3).normal(size=(8, 256)), jnp.bfloat16)
    multiply = jax.jit(partial(grouped_quantized_matmul, form, num_out=256, interpret=True))
    expected, y = (
        np.asarray(multiply(rows, jnp.array(sizes, jnp.int32), held_of(form, of, 256), jnp.int32(1)))
        for of in (leaves, poisoned)
    )
    assert np.isfinite(expected).all()
    assert (y == expected).all()


def test_each_expert_is_fetched_once_and_nothing_behind_the_last_rows() -> None:
    tiles = tiles_of(jnp.array([20, 0, 13, 5]), 40, 16)
    assert tiles.experts.tolist() == [0, 0, 2, 3, 3, 3]
    assert tiles.num.tolist() == [4]
    assert tiles.places[:38].tolist() == [*range(20), *range(32, 45), *range(48, 53)]
    assert tiles.sources[tiles.places[:38]].tolist() == list(range(38))
    assert tiles_of(jnp.zeros(3, jnp.int32), 24, 16).num.tolist() == [1]
