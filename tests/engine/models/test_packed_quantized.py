"""Quantized weights in panels for the CPU kernel: each form, row by row, and whole models."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from examples.demo_model.stories import draw_request, question, tell
from penstock.engine import Engine, Request, SamplingParams
from penstock.engine.demo import MODEL_DIR
from penstock.engine.formats.packing import Packing
from penstock.engine.kernels.cpu import load_library
from penstock.engine.loading.checkpoint import load_model, read_model_config
from penstock.engine.models import Decoder
from penstock.engine.models.cpu.block import pack_blocks
from penstock.engine.models.cpu.held import QuantizedPanels
from penstock.engine.models.cpu.panels import GATES, joined, pack_head
from penstock.engine.models.cpu.quantized import has_kernel
from penstock.engine.models.layers.linear import GroupedLinear, Linear, RowGroups
from penstock.engine.models.layers.quantized import Quantized, unpack_in_pieces
from tests.engine.engines import EOS, SMALL, VOCAB_SIZE, drive, forget_prefixes, preempt_all, write_model
from tests.engine.formats.quantized_checkpoints import write_quantized
from tests.engine.formats.quantized_weights import SCHEMES, Scheme
from tests.engine.formats.test_quantized import FORMS, IN, filled, random_leaves, weight_of
from tests.engine.models.test_models_parity import dense_attend
from tests.engine.tokenizers_for_tests import CHAT_TEMPLATE, byte_level
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
DTYPES = ("float32", "bfloat16")
PLAIN = {
    name: packing
    for name, packing in FORMS.items()
    if packing.code in ("int8", "int4") and not packing.super_group and not packing.has_order
}
WHOLE = {f"{name}, int8 activations": replace(p, has_int8_activations=True) for name, p in PLAIN.items()}
SUPPORTED = {**PLAIN, **WHOLE}
OUT = 150  # more than a panel, and no whole number of them


@cache
def library() -> Any:
    return load_library(Path.home() / ".cache" / "penstock" / "native")


def rows_of(num_rows: int, dtype: str, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(num_rows, IN)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SUPPORTED)
def test_a_product_is_that_of_the_values(name: str, dtype: str) -> None:
    packing, rng = SUPPORTED[name], np.random.default_rng(1)
    layer = filled(packing, rng, dtype, bias=True, num_out=OUT)
    assert layer.bias is not None
    weight, bias = np.asarray(weight_of(layer), np.float64), np.asarray(layer.bias[...], np.float64)
    packed = joined(library(), layer)
    for num_rows in (1, 5, 103):
        x = rows_of(num_rows, dtype)
        found = packed.wide(x)
        expected = layer.wide(x) if packing.has_int8_activations else np.asarray(x, np.float64) @ weight.T + bias
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
        np.testing.assert_array_equal(packed(x), found.astype(dtype))
        for count in {1, num_rows // 2, num_rows + 1}:
            first = packed.wide_first(x, jnp.asarray([count]))
            np.testing.assert_array_equal(first[:count], found[:count])
    np.testing.assert_array_equal(packed.columns(jnp.arange(OUT)), weight_of(layer))


@pytest.mark.parametrize("name", sorted(FORMS.keys() - PLAIN.keys()))
def test_forms_without_a_kernel_stay_as_they_are(name: str) -> None:
    assert not has_kernel(filled(FORMS[name], np.random.default_rng(0), "float32", bias=False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name",
    [
        "int8 per channel",
        "int4 with minimums",
        "int8 with zeros, int8 activations",
        "int4 with minimums, int8 activations",
    ],
)
@settings(deadline=None, max_examples=15)
@given(first=st.integers(0, 119), count=st.integers(1, 120))
def test_a_row_does_not_depend_on_the_other_rows(name: str, dtype: str, first: int, count: int) -> None:
    together, packed = _together(name, dtype)
    some = rows_of(120, dtype)[first : first + count]
    np.testing.assert_array_equal(np.asarray(packed(some), np.float32), together[first : first + count])


@cache
def _together(name: str, dtype: str) -> tuple[np.ndarray, Linear]:
    layer = filled(SUPPORTED[name], np.random.default_rng(3), dtype, bias=False, num_out=OUT)
    packed = joined(library(), layer)
    return np.asarray(packed(rows_of(120, dtype)), np.float32), packed


@pytest.mark.parametrize("sign", [1, -1])
def test_whole_numbers_are_summed_without_saturation(sign: int) -> None:
    """Products are the largest there are; sums of two exceed 16 bits."""
    packing = Packing("int8", 0, has_int8_activations=True)
    layer = filled(packing, np.random.default_rng(0), "float32", bias=False, num_out=OUT)
    for name, array in (("codes", jnp.full((OUT, IN), -128, jnp.int8)), ("scales", jnp.ones((OUT, 1)))):
        setattr(layer, name, nnx.Param(array))
    found = joined(library(), layer).wide(jnp.full((7, IN), 127.0 * sign))
    np.testing.assert_array_equal(found, np.full((7, OUT), -128.0 * 127 * IN * sign))


def test_rows_of_zeros_and_of_what_is_no_number() -> None:
    layer = filled(SUPPORTED["int8 per channel, int8 activations"], np.random.default_rng(0), "float32", bias=False)
    x = rows_of(5, "float32").at[0].set(0).at[1, 3].set(jnp.inf).at[2, 5].set(jnp.nan).at[3].set(1e-38)
    found = np.asarray(joined(library(), layer).wide(x))
    assert np.isnan(found).all(axis=1).tolist() == [False, True, True, False, False]
    assert not found[[0, 3]].any()
    np.testing.assert_array_equal(found, layer.wide(x))


@pytest.mark.parametrize("name", ["int8 per channel", "int4 in groups of 32", "int8 per channel, int8 activations"])
def test_joined_and_gated_layers_stand_side_by_side(name: str) -> None:
    layers = [
        filled(SUPPORTED[name], np.random.default_rng(seed), "float32", bias=seed == 1, num_out=100) for seed in (1, 2)
    ]
    x = rows_of(9, "float32")
    apart = [joined(library(), layer)(x) for layer in layers]
    np.testing.assert_array_equal(joined(library(), *layers)(x), jnp.concatenate(apart, axis=1))
    gated = joined(library(), *layers, gate=GATES["silu"])(x)
    np.testing.assert_allclose(gated, jax.nn.silu(apart[0]) * apart[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SUPPORTED)
def test_each_row_goes_through_its_own_expert(name: str) -> None:
    packing, rng = SUPPORTED[name], np.random.default_rng(5)
    leaves = {leaf: jnp.asarray(values) for leaf, values in random_leaves(packing, rng, 4, num_out=OUT).items()}
    experts = GroupedLinear(Quantized(packing, (OUT, IN)), leaves, jnp.asarray(rng.normal(size=(4, OUT)), jnp.float32))
    unpack_in_pieces(experts)
    x, groups = rows_of(130, "float32"), RowGroups(jnp.asarray([3, 0, 110, 9], jnp.int32))
    packed = joined(library(), experts)
    found, expected = packed(x, groups)[:122], experts(x, groups)[:122]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * float(jnp.abs(expected).max()))
    alone = packed(x[3:40], RowGroups(jnp.asarray([0, 0, 37, 0], jnp.int32)))
    np.testing.assert_array_equal(alone, found[3:40])


def test_an_embedding_that_is_the_head_too() -> None:
    packing = PLAIN["int8 in groups of 32"]
    table = filled(packing, np.random.default_rng(6), "float32", bias=False, num_out=OUT)
    packed, ids = joined(library(), table), jnp.asarray([149, 0, 64, 64])
    np.testing.assert_array_equal(packed.columns(ids), table.columns(ids))
    x = rows_of(3, "float32")
    np.testing.assert_allclose(packed.wide(x), table.wide(x), rtol=0, atol=1e-5 * float(jnp.abs(table.wide(x)).max()))


GEOMETRY: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "bos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}


def by_int8(name: str) -> Scheme:
    """Returns a scheme of compressed-tensors, with activations quantized token by token."""
    scheme = SCHEMES[name]
    ((group, fields),) = scheme.fields["config_groups"].items()
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    groups = {group: {**fields, "input_activations": activations}}
    return replace(scheme, fields={**scheme.fields, "config_groups": groups})


W8A8 = by_int8("compressed int8")
MODELS: dict[str, tuple[Scheme, str, dict[str, Any]]] = {
    "W8A8": (W8A8, "qwen3", {"head_dim": 32}),
    "W8A8 experts": (W8A8, "qwen3_moe", EXPERTS),
    "W4A8": (by_int8("compressed int4 g32"), "qwen3", {"head_dim": 32}),
    "AWQ": (SCHEMES["awq g32"], "llama", {}),
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    scheme, family, geometry = MODELS[request.param]
    directory, _ = write_quantized(tmp_path_factory.mktemp("model"), scheme, family, **GEOMETRY, **geometry)
    byte_level(chat_template=CHAT_TEMPLATE).save_pretrained(directory)
    return directory


def test_tokens_are_the_same_alone_in_company_and_preempted_and_those_of_xla(checkpoint: Path) -> None:
    engine = Engine.from_checkpoint(checkpoint, replace(SMALL, matmul="native", dtype="float32"))
    modules = [module for _, module in nnx.iter_modules(_loaded(checkpoint, native=True))]
    assert any(isinstance(module, Linear) and isinstance(module.held, QuantizedPanels) for module in modules)
    requests = [
        Request(str(i), tuple(range(3 + i, 12 + 3 * i)), SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
        for i in range(3)
    ]
    alone = {request.id: drive(engine, [request])[request.id, 0].token_ids for request in requests}

    def preempt(step: int) -> None:
        if step in (4, 9):
            preempt_all(engine)

    for before_step, num_preemptions in ((lambda step: None, 0), (preempt, 2)):
        forget_prefixes(engine)
        together = drive(engine, requests, before_step=before_step)
        assert {request.id: together[request.id, 0].token_ids for request in requests} == alone
        assert engine.stats().preemptions_total >= num_preemptions
    xla = Engine.from_checkpoint(checkpoint, replace(SMALL, matmul="xla", dtype="float32"))
    assert {key[0]: result.token_ids for key, result in drive(xla, requests).items()} == alone


def _loaded(path: Path, *, native: bool, weights: str = "auto", whole: bool = False) -> Decoder:
    config = read_model_config(path, "float32", weights)
    if whole:
        blocks = tuple(
            replace(block, packed=tuple((at, replace(p, has_int8_activations=True)) for at, p in block.packed))
            for block in config.blocks
        )
        config = replace(config, blocks=blocks)
    model = load_model(path, config)
    return _packed(model) if native else model


def _packed(model: Decoder) -> Decoder:
    pack_head(model, library())
    return pack_blocks(model, library())


@cache
def _story() -> list[int]:
    rng, tokenizer = random.Random(5), Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    texts = [(request := draw_request(rng), f"{question(request, rng)} {tell(request, rng)}")[1] for _ in range(12)]
    ids: list[int] = tokenizer.encode(" ".join(texts)).ids
    return ids[:600]


def _perplexity(model: Decoder) -> float:
    ids = jnp.asarray(_story(), jnp.int32)

    @nnx.jit
    def loss(model: Any) -> jax.Array:
        hidden, _ = model(ids, jnp.arange(ids.shape[0]), (None,) * model.config.num_layers, dense_attend)
        found = jax.nn.log_softmax(model.logits(hidden)[:-1])
        return -jnp.take_along_axis(found, ids[1:, None], axis=1).mean()

    return float(jnp.exp(loss(model)))


@cache
def _of_floats() -> float:
    return _perplexity(_loaded(MODEL_DIR, native=True))


@pytest.mark.parametrize(
    ("weights", "whole", "most"),
    [("int8", False, 0.005), ("int8", True, 0.005), ("int4", False, 0.03), ("int4", True, 0.03)],
)
def test_perplexity_of_a_trained_model_hardly_rises(weights: str, whole: bool, most: float) -> None:
    found = _perplexity(_loaded(MODEL_DIR, native=True, weights=weights, whole=whole))
    assert 1 < found <= (1 + most) * _of_floats()


def test_packing_holds_one_matmul_twice_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.loading.weights.PIECE_BYTES", 2**15)
    shape = {**GEOMETRY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16}
    write_model(tmp_path, "llama", dtype="bfloat16", **shape)
    stored, packed = (_bytes(_loaded(tmp_path, native=native, weights="int4")) for native in (False, True))
    assert packed <= 1.03 * stored  # panels that are not full are few
    tracemalloc.start()
    model = _loaded(tmp_path, native=False, weights="int4")
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    model = _packed(model)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert packed <= held <= before + 0.03 * stored + 2**19  # what was read is gone; the rest is objects of Python
    assert peak <= before + 0.06 * packed + 2**19


def _bytes(model: Decoder) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
