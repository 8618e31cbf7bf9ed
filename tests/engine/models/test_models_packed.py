from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from penstock.engine import Engine, EngineConfig, Request, SamplingParams
from penstock.engine.errors import ConfigError
from penstock.engine.kernels.cpu import load_library
from penstock.engine.models import ClampedSwiGLU, ExpertsConfig, MLPConfig
from penstock.engine.models.cpu.panels import PackedExperts, joined, pack_mlp, tied
from penstock.engine.models.layers.basic import GatedMLP
from penstock.engine.models.layers.experts import GroupedMLP, route
from penstock.engine.models.layers.linear import Linear, RowGroups, present
from tests.engine.engines import SMALL, drive, write_model
from tests.support.needs import needs_compiler

TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3}


@cache
def library() -> Any:
    return load_library(Path.home() / ".cache" / "penstock" / "native")


def linear(in_features: int, out_features: int, dtype: str, *, bias: bool = False, seed: int = 0) -> Linear:
    layer = Linear.plain(in_features, out_features, bias=bias, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(seed))
    if layer.bias is not None:
        layer.bias[...] = jax.random.normal(jax.random.key(seed), (out_features,), dtype)
    return layer


def tokens(num_tokens: int, features: int, dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(9), (num_tokens, features), dtype)


def assert_close(got: jax.Array, expected: jax.Array, dtype: str, times: float = 1.0) -> None:
    assert got.dtype == expected.dtype
    scale = float(jnp.max(jnp.abs(expected.astype(jnp.float32)))) or 1.0
    error = float(jnp.max(jnp.abs(got.astype(jnp.float32) - expected.astype(jnp.float32))))
    assert error <= times * TOLERANCE[dtype] * scale


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_columns_come_back_out_of_the_panels(dtype: str) -> None:
    layer, numbers = linear(6, 130, dtype), jnp.asarray([129, 0, 64, 5])
    expected = layer.kernel[...].T[numbers]
    embedding = tied(layer.kernel[...].T, library())
    for columns in (
        layer.columns(numbers),
        joined(library(), layer).columns(numbers),
        embedding.columns(numbers),
    ):
        np.testing.assert_array_equal(columns, expected)


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("depth", "sizes"), [(6, (130,)), (300, (70, 5, 64)), (1026, (1,))])
def test_panels_have_their_columns_side_by_side(dtype: str, depth: int, sizes: tuple[int, ...]) -> None:
    """The kernels' order: a feature of all columns after the other or, in bf16, two features of a column."""
    layers = [linear(depth, size, dtype, seed=number) for number, size in enumerate(sizes)]
    panels = np.asarray(joined(library(), *layers).arrays["weights"])
    if dtype == "bfloat16":
        panels = panels.swapaxes(2, 3).reshape(len(panels), depth, -1)
    found = panels.swapaxes(1, 2).reshape(-1, depth)
    columns = np.concatenate([layer.kernel[...].T for layer in layers])
    np.testing.assert_array_equal(found[: len(columns)], columns)
    assert not found[len(columns) :].any()


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_first_rows_are_those_of_all(dtype: str) -> None:
    layer, x = linear(48, 130, dtype, bias=True), tokens(70, 48, dtype)
    for each in (layer, joined(library(), layer)):
        whole = each.wide(x)
        for count in (0, 1, 5, 69, 70, 99):
            first = each.wide_first(x, jnp.asarray([count]))
            np.testing.assert_array_equal(first[:count], whole[:count])


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens", [1, 5, 6, 17, 97, 200])
def test_a_packed_product_is_the_product(num_tokens: int, dtype: str) -> None:
    layer, x = linear(600, 130, dtype, bias=True), tokens(num_tokens, 600, dtype)
    assert_close(jax.jit(joined(library(), layer))(x), layer(x), dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_several_layers_in_one_product_stand_side_by_side(dtype: str) -> None:
    layers = [linear(64, size, dtype, bias=size == 24, seed=size) for size in (96, 24, 8)]
    x = tokens(7, 64, dtype)
    expected = jnp.concatenate([layer(x) for layer in layers], axis=1)
    assert_close(joined(library(), *layers)(x), expected, dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [False, True])
def test_the_gated_product_is_the_feed_forward(dtype: str, bias: bool) -> None:
    mlp = GatedMLP(MLPConfig(100, bias=bias), 48, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(1))
    for layer in present(mlp.gate, mlp.up, mlp.down):
        layer.kernel[...] = layer.kernel[...] * 20  # so that SiLU is far from a line
        if layer.bias is not None:
            layer.bias[...] = jnp.linspace(-2, 2, layer.bias.shape[0], dtype=dtype)
    x = tokens(11, 48, dtype)
    expected = mlp(x)
    pack_mlp(mlp, library())
    assert_close(mlp(x), expected, dtype)


@needs_compiler
def test_logits_are_not_rounded_to_the_type_of_the_weights() -> None:
    layer, x = linear(64, 80, "bfloat16"), tokens(3, 64, "bfloat16")
    wide = joined(library(), layer).wide(x)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, layer.wide(x), atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_does_not_depend_on_the_other_rows(dtype: str) -> None:
    layer, x = joined(library(), linear(256, 70, dtype)), tokens(100, 256, dtype)
    together = np.asarray(layer(x), np.float32)
    for start, end in ((0, 1), (3, 8), (90, 100)):
        np.testing.assert_array_equal(np.asarray(layer(x[start:end]), np.float32), together[start:end])


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "options", [{}, {"activation": "gelu"}, {"bias": True}, {"bias": True, "clamped": ClampedSwiGLU(1.7, 0.5)}], ids=str
)
def test_each_row_goes_through_its_own_expert(dtype: str, options: dict[str, Any]) -> None:
    config = ExpertsConfig(num_experts=5, num_chosen=1, intermediate_size=70, **options)
    experts = GroupedMLP(config, 48, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(2))
    for linear in present(experts.gate, experts.up, experts.down):
        linear.kernel[...] = linear.kernel[...] * 20
        if linear.bias is not None:
            linear.bias[...] = jax.random.normal(jax.random.key(3), linear.bias.shape, dtype)
    groups = RowGroups(jnp.asarray([3, 0, 100, 1, 0], jnp.int32))  # more than a task's rows, and none
    x, packed = tokens(110, 48, dtype), jax.jit(PackedExperts(experts, library()))
    got = packed(x, groups)[:104]
    assert_close(got, experts(x, groups)[:104], dtype)
    alone = packed(x[3:40], RowGroups(jnp.asarray([0, 0, 37, 0, 0], jnp.int32)))
    np.testing.assert_array_equal(alone, got[3:40])


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, normalized": {"normalized": True},
    "softmax of groups": {"num_groups": 3, "groups_chosen": 2, "scale": 2.5},
    "sigmoid": {"scores": "sigmoid", "scale": 0.5},
    "corrected": {"scores": "sigmoid", "normalized": True, "has_correction": True, "num_groups": 3, "groups_chosen": 2},
    "all": {"num_chosen": 6, "normalized": True},
    "one": {"num_chosen": 1},
}


@needs_compiler
@pytest.mark.parametrize("options", ROUTERS.values(), ids=ROUTERS)
def test_tokens_go_to_the_experts_that_the_reference_says(options: dict[str, Any]) -> None:
    config = ExpertsConfig(**{"num_experts": 6, "num_chosen": 2, "intermediate_size": 8, **options})
    packed = PackedExperts(GroupedMLP(config, 16, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0)), library())
    logits = jax.random.normal(jax.random.key(1), (40, 6)) * 3
    logits = logits.at[0].set(0.0).at[1, 2:5].set(7.0).at[2].set(-500.0).at[3].set(jnp.arange(6) * 40.0)  # ties, ends
    correction = jnp.linspace(0.5, -0.5, 6) if config.has_correction else None
    chosen, weights = packed.route(logits, correction, config)
    expected_chosen, expected_weights = route(logits, correction, config)
    np.testing.assert_array_equal(chosen, expected_chosen)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5, atol=1e-7)
    spoilt, spoilt_weights = packed.route(logits.at[5].set(jnp.nan), correction, config)
    assert jnp.isnan(spoilt_weights[5]).all()
    assert bool(((spoilt >= 0) & (spoilt < 6)).all())
    np.testing.assert_array_equal(spoilt_weights[6:], weights[6:])


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_each_token_is_the_sum_of_what_its_experts_make_of_it(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ExpertsConfig(num_experts=5, num_chosen=3, intermediate_size=14)
    experts = GroupedMLP(config, 48, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(2))
    for linear in present(experts.gate, experts.up, experts.down):
        linear.kernel[...] = linear.kernel[...] * 20
    x, packed = tokens(70, 48, dtype), PackedExperts(experts, library())
    chosen = jax.random.randint(jax.random.key(4), (70, 3), 0, 6).at[60:].set(5)  # 5: an expert that is not here
    weights = jax.random.uniform(jax.random.key(5), (70, 3))
    sizes, compute = [], PackedExperts.__call__

    def recording(experts: PackedExperts, rows: jax.Array, groups: RowGroups) -> jax.Array:
        sizes.append(groups.sizes)
        return compute(experts, rows, groups)

    monkeypatch.setattr(PackedExperts, "__call__", recording)
    got = packed.mix(x.at[65].set(jnp.nan), chosen, weights)
    np.testing.assert_array_equal(sizes[0], [(chosen == expert).sum() for expert in range(5)])
    times = 1.5 if dtype == "float16" else 1.0  # three matmuls round, not two, which jax 0.12 shows in float16
    assert_close(got[:60], experts.mix(x, chosen, weights)[:60], dtype, times)
    assert not got[60:].any()
    np.testing.assert_array_equal(packed.mix(x[7:19], chosen[7:19], weights[7:19]), got[7:19])


@needs_compiler
def test_a_nan_or_an_infinity_stays_in_its_row() -> None:
    gated = GatedMLP(MLPConfig(64), 32, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    pack_mlp(gated, library())
    out = gated(tokens(4, 32, "float32").at[1, 3].set(jnp.nan).at[2, 0].set(jnp.inf))
    assert not jnp.isfinite(out[1]).any()
    assert not jnp.isfinite(out[2]).any()
    assert jnp.isfinite(out[jnp.array([0, 3])]).all()


@needs_compiler
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen2", {}),  # biases of queries, keys and values
        ("qwen3", {"tie_word_embeddings": True}),
        ("llama", {"hidden_act": "gelu", "mlp_bias": True, "attention_bias": True}),
        ("mixtral", {"num_local_experts": 5, "tie_word_embeddings": True}),
        ("gpt_oss", {"num_local_experts": 5, "sliding_window": 7}),
    ],
)
def test_an_engine_gives_the_same_tokens_with_and_without(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    model = write_model(tmp_path, family, **fields)
    requests = [
        Request(str(i), tuple(range(3 + i, 20 + 3 * i)), SamplingParams(temperature=0, max_tokens=12)) for i in range(3)
    ]
    run = partial(run_engine, model, requests)
    assert run(matmul="native") == run(matmul="xla", attention="xla")


def run_engine(model: Path, requests: list[Request], **choices: str) -> list[list[int]]:
    results = drive(Engine.from_checkpoint(model, replace(SMALL, **choices)), requests)  # type: ignore[arg-type]
    return [result.token_ids for result in results.values()]


def test_a_kernel_that_there_is_not_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="matmul must be one of auto, xla, native, not 'onednn'"):
        Engine.from_checkpoint(tiny_model, EngineConfig(matmul="onednn"))


def test_without_a_compiler_auto_leaves_products_to_xla_and_native_says_why(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = replace(SMALL, compile_cache_dir=tmp_path / "compiled")
    monkeypatch.setattr(
        "penstock.engine.deployment.opening.keep_compilations", lambda directory: None
    )  # it would change this process
    request = Request("a", (3, 4, 5), SamplingParams(temperature=0, max_tokens=3))
    assert drive(Engine.from_checkpoint(tiny_model, config), [request])["a", 0].finish_reason == "length"
    with pytest.raises(ConfigError, match="matmul 'native' cannot be built: there is no C\\+\\+ compiler"):
        Engine.from_checkpoint(tiny_model, replace(config, matmul="native"))
