"""Weights that stay packed: what each form unpacks to, and the matmul with it."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.engine.errors import ConfigError
from penstock.engine.formats.bits import pack, unpack
from penstock.engine.formats.packing import INTEGERS, Packing, leaf_shapes
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.layers.quantized import Quantized, quantized_rows, unpacked

OUT, IN = 3, 256

FORMS = {
    "int8 per channel": Packing("int8", 0, scale="bfloat16"),
    "int8 in groups of 16": Packing("int8", 16, scale="float16"),
    "int8 in groups of 32": Packing("int8", 32, scale="float16"),
    "int8 with zeros": Packing("int8", 128, offset="zeros"),
    "int6 in groups of 16": Packing("int6", 16, scale="int8", super_group=256),
    "int4 in groups of 32": Packing("int4", 32, scale="float16"),
    "int4 with minimums": Packing("int4", 32, scale="float16", offset="minimums"),
    "int4 with minimums in super groups": Packing("int4", 32, scale="uint8", offset="minimums", super_group=256),
    "int4 in groups of 128 with zeros": Packing("int4", 128, scale="float16", offset="zeros"),
    "int4 in an order of its own": Packing("int4", 64, offset="zeros", has_order=True),
    "fp8 in blocks": Packing("fp8", 128, rows=2),
    "fp8 in blocks that are cut": Packing("fp8", 96, rows=2),
    "fp8 per tensor": Packing("fp8", 0, rows=0),
    "mxfp4": Packing("fp4", 32, scale="e8m0"),
}


def random_leaves(
    packing: Packing, rng: np.random.Generator, *leading: int, num_out: int = OUT
) -> dict[str, np.ndarray]:
    return {
        name: _random(name, (*leading, *shape), kind, packing, rng)
        for name, (shape, kind) in leaf_shapes(packing, num_out, IN).items()
    }


def _random(name: str, shape: tuple[int, ...], kind: str, packing: Packing, rng: np.random.Generator) -> np.ndarray:
    if name == "group_of":
        return rng.permutation(np.arange(IN) // packing.group).astype(np.int32)
    if packing.scale == "e8m0" and name == "scales":
        return rng.integers(120, 134, shape, np.uint8)
    if packing.code == "fp8" and name == "codes":
        return rng.normal(0, 1, shape).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    if kind in ("uint8", "int8"):
        limits = (0, 16) if name == "zeros" and packing.code == "int4" else np.iinfo(kind)
        low, high = limits if isinstance(limits, tuple) else (limits.min, limits.max + 1)
        return rng.integers(low, high, shape).astype(kind)
    values = rng.normal(0, 1, shape).astype(np.float32)
    return values.astype(np.dtype(getattr(ml_dtypes, kind, kind)))


def by_element(packing: Packing, leaves: dict[str, np.ndarray], out: int, feature: int) -> np.float32:
    """Returns one weight, by the docstring of Packing."""
    group = feature // packing.group if packing.group else 0
    if packing.has_order:
        group = int(leaves["group_of"][feature])
    row = out // packing.rows if packing.rows else 0
    scale, minimum = (
        np.float32(leaves[name][row, group]) if name in leaves else None for name in ("scales", "minimums")
    )
    assert scale is not None
    if packing.scale == "e8m0":
        scale = np.float32(2.0 ** (float(scale) - 127))
    if packing.super_group:
        scale *= np.float32(leaves["super_scales"][out, feature // packing.super_group])
    if minimum is not None and packing.super_group:
        minimum *= np.float32(leaves["super_minimums"][out, feature // packing.super_group])
    zero = np.float32(leaves["zeros"][row, group]) if "zeros" in leaves else np.float32(0)
    code = _code(packing, leaves, out, feature)
    return scale * (code - zero) - (np.float32(0) if minimum is None else minimum)


def _code(packing: Packing, leaves: dict[str, np.ndarray], out: int, feature: int) -> np.float32:
    if packing.code == "fp8":
        return np.float32(leaves["codes"][out, feature].view(ml_dtypes.float8_e4m3fn))
    if packing.code == "int8":
        return np.float32(leaves["codes"][out, feature])
    code = int(leaves["codes"][out, feature // 2]) >> 4 * (feature % 2) & 15
    if packing.code == "int6":
        code |= (int(leaves["high_bits"][out, feature // 4]) >> 2 * (feature % 4) & 3) << 4
    if packing.code == "fp4":
        return _fp4(code)
    constant = {"int4": 8, "int6": 32}[packing.code] if packing.offset == "none" else 0
    return np.float32(code - constant)


def _fp4(code: int) -> np.float32:
    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    return np.float32(-sizes[code - 8] if code >= 8 else sizes[code])


@pytest.mark.parametrize("name", FORMS)
def test_each_form_unpacks_to_what_it_says(name: str) -> None:
    packing = FORMS[name]
    leaves = random_leaves(packing, np.random.default_rng(0))
    found = np.asarray(unpacked(packing, {name: jnp.asarray(leaf) for name, leaf in leaves.items()}))
    expected = np.array([[by_element(packing, leaves, out, at) for at in range(IN)] for out in range(OUT)], np.float32)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", FORMS)
def test_leading_axes_of_layers_or_experts_are_kept(name: str) -> None:
    packing = FORMS[name]
    leaves = random_leaves(packing, np.random.default_rng(1))
    two = {name: jnp.stack([jnp.asarray(leaf)] * 2) for name, leaf in leaves.items()}
    one = unpacked(packing, {name: jnp.asarray(leaf) for name, leaf in leaves.items()})
    np.testing.assert_array_equal(unpacked(packing, two), jnp.stack([one, one]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_matmul_rounds_each_weight_once_and_sums_in_f32(dtype: str, bias: bool) -> None:
    packing, rng = FORMS["int4 with minimums in super groups"], np.random.default_rng(2)
    linear = filled(packing, rng, dtype, bias=bias)
    x = jnp.asarray(rng.normal(size=(5, IN)), dtype)
    weight = weight_of(linear).astype(dtype).astype(jnp.float32)
    expected = x.astype(jnp.float32) @ weight.T + (0 if linear.bias is None else linear.bias[...].astype(jnp.float32))
    np.testing.assert_allclose(linear.wide(x), expected, rtol=1e-5, atol=1e-4)
    assert linear(x).dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(linear(x), linear.wide(x).astype(dtype))


@pytest.mark.parametrize("name", [name for name, packing in FORMS.items() if packing.code in INTEGERS])
def test_a_matmul_by_int8_activations_is_that_of_the_quantized_rows(name: str) -> None:
    linear = filled(replace(FORMS[name], has_int8_activations=True), np.random.default_rng(3), "float32", bias=False)
    x = jnp.asarray(np.random.default_rng(4).normal(size=(5, IN)), jnp.float32)
    rows, scales = (np.asarray(part, np.float64) for part in quantized_rows(x))
    expected = (rows * scales) @ np.asarray(weight_of(linear), np.float64).T
    np.testing.assert_allclose(linear.wide(x), expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def filled(packing: Packing, rng: np.random.Generator, dtype: str, *, bias: bool, num_out: int = OUT) -> Linear:
    leaves = {name: jnp.asarray(leaf) for name, leaf in random_leaves(packing, rng, num_out=num_out).items()}
    biases = jnp.asarray(rng.normal(size=num_out), dtype) if bias else None
    return Linear(Quantized(packing, (num_out, IN)), leaves, biases)


def weight_of(linear: Linear) -> jax.Array:
    """Returns the weight of a quantized matmul in f32, `[out, in]`."""
    assert isinstance(linear.held, Quantized)
    return unpacked(linear.held.packing, linear.arrays)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("int8 per channel", 8 + 16 / 256),
        ("int8 in groups of 32", 8 + 16 / 32),
        ("int6 in groups of 16", 6 + 8 / 16 + 16 / 256),  # as stored by GGUF
        (
            "int4 with minimums in super groups",
            4 + 16 / 32 + 32 / 256,
        ),  # GGUF has 6 bits for each scale and minimum: 4.5
        ("int4 in groups of 128 with zeros", 4 + 24 / 128),
        ("mxfp4", 4 + 8 / 32),
    ],
)
def test_what_a_weight_takes(name: str, bits: float) -> None:
    leaves = random_leaves(FORMS[name], np.random.default_rng(0))
    assert sum(leaf.nbytes for leaf in leaves.values()) * 8 == bits * OUT * IN


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_codes_are_packed_low_bits_first(bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 2**bits, (3, 16)).astype(np.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, 16 * bits // 8)
    np.testing.assert_array_equal(unpack(packed, bits), codes)
    assert packed[0, 0] & (2**bits - 1) == codes[0, 0]


@pytest.mark.parametrize(
    "fields",
    [
        {"code": "int3", "group": 32},
        {"code": "int4", "group": 48},
        {"code": "int4", "group": 32, "scale": "float64"},
        {"code": "int4", "group": 32, "offset": "means"},
        {"code": "int4", "group": 32, "rows": 2},
        {"code": "int4", "group": 32, "scale": "uint8"},  # integers of what?
        {"code": "int4", "group": 32, "scale": "float16", "super_group": 256},
        {"code": "int6", "group": 32, "scale": "int8", "super_group": 48},
        {"code": "fp8", "group": 128, "offset": "zeros"},
        {"code": "fp8", "group": -1},
        {"code": "fp4", "group": 32},
        {"code": "int8", "group": 32, "scale": "e8m0"},
    ],
)
def test_other_forms_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="cannot be held as Packing"):
        Packing(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("packing", "num_in"),
    [
        (Packing("int4", 32), 48),
        (Packing("int4", 0), 7),
        (Packing("int6", 0), 6),
        (Packing("fp4", 32, scale="e8m0"), 8),
    ],
)
def test_an_input_that_does_not_divide_is_refused(packing: Packing, num_in: int) -> None:
    with pytest.raises(ConfigError, match=f"{num_in} input features are not a multiple of"):
        leaf_shapes(packing, OUT, num_in)
