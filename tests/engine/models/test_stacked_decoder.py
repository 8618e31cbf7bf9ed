"""The decoder as TPUs run it, one loop over stacked layers, here with our kernel interpreted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu

from penstock.engine import Engine, EngineConfig, Request, SamplingParams
from penstock.engine.attention.fused import FusedAttention
from penstock.engine.loading.checkpoint import load_model, read_model_config
from penstock.engine.models import (
    QKV,
    AttentionOptions,
    Decoder,
    ExpertsConfig,
    GroupCache,
    LayerRun,
    ModelConfig,
    layer_groups,
    layer_runs,
    stacked_layers,
)
from penstock.engine.models.hf.blocks import sliding
from penstock.engine.models.layers import experts
from tests.engine.engines import TINY, drive, write_model
from tests.support.patience import slow


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers: the first sees everything, the others a window."""
    return write_model(
        tmp_path_factory.mktemp("mixed"),
        "qwen2",
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
    )


@pytest.fixture(scope="module")
def alternating(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two pairs of layers, one with a window and one without; all have attention sinks and experts."""
    return write_model(tmp_path_factory.mktemp("alternating"), "gpt_oss", num_hidden_layers=4, sliding_window=8)


@pytest.fixture(scope="module")
def two_kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two kinds of pages, layers that read those of others, and per-layer vectors."""
    return write_model(
        tmp_path_factory.mktemp("two-kinds"),
        "gemma4_text",
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=12,
        sliding_window=8,
    )


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with twice a pattern of two recurrent layers and one with attention, and one more recurrent layer."""
    types = ["conv", "conv", "full_attention"] * 2 + ["conv"]
    return write_model(tmp_path_factory.mktemp("hybrid"), "lfm2", num_hidden_layers=7, layer_types=types)


def test_layers_that_are_alike_become_one_run_and_are_stacked_from_the_file(mixed: Path) -> None:
    config = read_model_config(mixed)
    first, *others = config.blocks
    assert layer_runs(config) == (LayerRun(0, (first,), 1), LayerRun(1, (others[0],), 2))
    assert_stacked_as_single(mixed, num_blocks=2)


def test_a_pattern_that_repeats_is_stacked_from_tensors_that_hold_all_experts(alternating: Path) -> None:
    config = read_model_config(alternating)
    assert layer_runs(config) == (LayerRun(0, config.blocks[:2], 2),)
    assert_stacked_as_single(alternating, num_blocks=2)


def test_layers_that_keep_states_are_in_the_loops_of_the_others(hybrid: Path) -> None:
    config = read_model_config(hybrid)
    assert [(run.first, len(run.pattern), run.repeats) for run in layer_runs(config)] == [(0, 3, 2), (6, 1, 1)]
    assert_stacked_as_single(hybrid, num_blocks=4)


def assert_stacked_as_single(directory: Path, num_blocks: int) -> None:
    config = read_model_config(directory)
    single, stacked = load_model(directory, config), load_model(directory, config, stacked=True)
    assert len(stacked.blocks) == num_blocks
    for held, block in zip(stacked_layers(config), stacked.blocks, strict=True):
        layers = [nnx.to_flat_state(nnx.state(single.blocks[layer])) for layer in held]
        for (path, leaf), *others in zip(nnx.to_flat_state(nnx.state(block)), *layers, strict=True):
            assert all(other[0] == path for other in others)
            np.testing.assert_array_equal(leaf[...], np.stack([other[1][...] for other in others]))


def test_layers_that_alternate_are_traced_once_per_place_in_their_pattern_and_compute_the_same() -> None:
    windows = [4, None, 4, None, 4, None, 4]
    config = replace(TINY, blocks=tuple(sliding(TINY.blocks[0], windows)))
    expected, written, traced = run(config, stacked=False)
    assert traced == windows
    hidden, together, traced = run(config, stacked=True)
    assert traced == [4, None, 4]  # the pattern, and what is left of it at the end
    np.testing.assert_allclose(hidden, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(together, written, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("most", "groups"), [(0, 18), (64 * 2**20, 6)])
def test_experts_are_read_in_the_stack_where_they_would_be_copied_out_of_it(
    monkeypatch: pytest.MonkeyPatch, most: int, groups: int
) -> None:
    """Experts are selected by number: those of the layers before and behind have no rows."""
    mixture = ExpertsConfig(num_experts=6, num_chosen=2, intermediate_size=20, bias=True)
    dense = TINY.blocks[0]
    config = replace(TINY, blocks=(dense, *[replace(dense, mlp=mixture)] * 3))
    expected, _, _ = run(config, stacked=False)
    held, multiply = set(), jax.lax.ragged_dot

    def recording(rows: jax.Array, kernels: jax.Array, sizes: jax.Array, **options: Any) -> jax.Array:
        held.add((kernels.shape[0], sizes.shape[0]))
        return multiply(rows, kernels, sizes, **options)

    monkeypatch.setattr(experts, "MOST_FETCHED_AHEAD", most)
    monkeypatch.setattr(jax.lax, "ragged_dot", recording)
    hidden, _, _ = run(config, stacked=True)
    assert held == {(groups, groups)}
    np.testing.assert_allclose(hidden, expected, rtol=1e-5, atol=1e-5)


def run(config: ModelConfig, *, stacked: bool) -> tuple[Any, np.ndarray, list[int | None]]:
    """Returns hidden states of three tokens, the new pages, and the window of each traced layer.

    A stand-in for attention depends on the layer's window and on its share of its group's one page, and puts its keys
    there.
    """
    traced, groups = [], layer_groups(config)

    def attend(
        qkv: QKV,
        cache: GroupCache,
        *,
        options: AttentionOptions,
        sinks: jax.Array | None = None,
        kv_scales: Any = None,
    ) -> tuple[jax.Array, GroupCache]:
        assert sinks is None
        assert qkv.v is not None
        traced.append(options.sliding_window)
        held: Any = cache.pages
        pages, place = (held.pages, held.first_page + cache.group) if stacked else (held, cache.group)
        values = jnp.repeat(pages[place] + qkv.v, qkv.q.shape[1] // qkv.v.shape[1], axis=1)
        attended, pages = qkv.q * (options.sliding_window or 1) + values, pages.at[place].set(qkv.k)
        return attended, cache._replace(pages=replace(held, pages=pages) if stacked else pages)

    (kind,) = groups.page_kinds
    shape = (kind.size, len(groups.windows), 3, kind.num_kv_heads, kind.head_dim)
    pages = jax.random.normal(jax.random.key(1), shape)
    graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0), stacked=stacked))
    step = jax.jit(lambda params, ids, places, caches: nnx.merge(graph, params)(ids, places, caches, attend))
    caches = (pages.reshape(-1, *shape[2:]),) if stacked else tuple(pages)
    hidden, caches = step(params, jnp.array([5, 6, 7]), jnp.arange(3), caches)
    return hidden, np.stack(caches).reshape(shape), traced


@pytest.mark.parametrize("model", ["mixed", "alternating", "hybrid", slow("two_kinds")])
def test_stacked_layers_and_our_kernel_give_the_same_tokens(
    model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = request.getfixturevalue(model)
    config = EngineConfig(
        max_num_seqs=4,
        max_batch_tokens=16,
        page_size=8,
        num_pages=32,
        max_model_len=64,
        attention="xla",
        decode_steps=1,
    )
    requests = [
        Request(str(i), tuple(range(7, 7 + length)), SamplingParams(max_tokens=5, temperature=0.0))
        for i, length in enumerate((21, 2))
    ]
    expected = drive(Engine.from_checkpoint(directory, config), requests)
    interpreted = FusedAttention(interpret=pltpu.InterpretParams(dma_execution_mode="eager"))
    monkeypatch.setattr("penstock.engine.deployment.deployment.attention_for", lambda *_, **__: interpreted)
    engine = Engine.from_checkpoint(directory, replace(config, attention="auto"))
    results = drive(engine, requests)
    assert {key: result.token_ids for key, result in results.items()} == {
        key: result.token_ids for key, result in expected.items()
    }
