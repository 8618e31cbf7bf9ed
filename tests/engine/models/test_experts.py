"""The mixture of experts against its plainest form, which sends each token through each of its experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from penstock.engine import Engine, Request, SamplingParams
from penstock.engine.loading.checkpoint import random_model
from penstock.engine.models import ClampedSwiGLU, ExpertsConfig
from penstock.engine.models.layers.experts import Experts, GroupedMLP, route
from penstock.engine.models.layers.linear import RowGroups, present
from penstock.engine.sharding.linears import prepare_for_tpu
from tests.engine.engines import SMALL, TINY, drive, write_model
from tests.support.patience import pairs

pytestmark = pytest.mark.versions

HIDDEN = 16


def experts(**fields: Any) -> Experts:
    config = ExpertsConfig(**{"num_experts": 6, "num_chosen": 2, "intermediate_size": 10, **fields})
    mixture = Experts(config, HIDDEN, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    for _, param in nnx.to_flat_state(nnx.state(mixture)):
        param[...] = param[...] * 20
    return mixture


def tokens(num_tokens: int) -> jax.Array:
    return jax.random.normal(jax.random.key(3), (num_tokens, HIDDEN))


def one_by_one(mixture: Experts, x: jax.Array) -> np.ndarray:
    chosen, weights = route(mixture.router.wide(x), None, mixture.config)
    linears = present(mixture.experts.gate, mixture.experts.up, mixture.experts.down)
    gate, up, down = (np.asarray(linear.kernel[...]) for linear in linears)
    result = np.zeros(x.shape, np.float32)
    for row, token in enumerate(np.asarray(x)):
        for expert, weight in zip(np.asarray(chosen[row]), np.asarray(weights[row]), strict=True):
            inner = jax.nn.silu(token @ gate[expert]) * (token @ up[expert])
            result[row] += weight * np.asarray(inner @ down[expert])
    return result


def experts_of(model: Any) -> GroupedMLP:
    experts = model.blocks[0].mlp.experts
    assert isinstance(experts, GroupedMLP)
    return experts


@pytest.mark.parametrize(
    ("num_tokens", "fields"),
    pairs([1, 7, 40], [{}, {"num_chosen": 1}, {"num_chosen": 6, "normalized": True}, {"scale": 2.5}]),
)
def test_each_token_is_the_weighted_sum_of_its_experts(num_tokens: int, fields: dict[str, Any]) -> None:
    mixture, x = experts(**fields), tokens(num_tokens)
    np.testing.assert_allclose(mixture(x), one_by_one(mixture, x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "stacked"),
    pairs([{"bias": True}, {"activation": "gelu", "clamped": ClampedSwiGLU(1.7, 7.0)}], [True, False]),
)
def test_features_that_tpus_are_given_beside_whole_tiles_change_nothing(fields: dict[str, Any], stacked: bool) -> None:
    mixture = ExpertsConfig(num_experts=6, num_chosen=2, intermediate_size=150, **fields)
    config = replace(TINY, blocks=(replace(TINY.blocks[0], mlp=mixture),) * 2)
    model, x = random_model(config, 0, stacked=stacked), jax.random.normal(jax.random.key(3), (9, config.hidden_size))

    def computed() -> jax.Array:
        experts = experts_of(model)
        layer = jnp.int32(1) if stacked else None
        if fields.get("bias") and stacked:  # a layer is given its own
            for linear in present(experts.gate, experts.up, experts.down):
                assert linear.bias is not None
                linear.bias = nnx.Param(linear.bias[...][0])
        y: jax.Array = experts(jnp.tile(x, (2, 1)), RowGroups(jnp.array([3, 0, 5, 4, 0, 6], jnp.int32), layer))
        return y

    graph, state = nnx.split(model)
    expected = computed()
    model = prepare_for_tpu(nnx.merge(graph, state), None)
    padded = experts_of(model)
    shapes = [linear.kernel.shape[-2:] for linear in present(padded.gate, padded.up, padded.down)]
    assert shapes == [(64, 256), (64, 256), (256, 64)]
    np.testing.assert_allclose(computed(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("as_shipped")
def test_padding_goes_to_no_expert_and_moves_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding may hold anything. Among fewer rows XLA sums a row in another order: in jax 0.12 for a router of few
    features.
    """
    mixture, x, is_real = experts(), tokens(9), jnp.arange(9) < 4
    alone, expected = mixture(x[:4]), mixture(x, is_real)
    sizes, compute = [], GroupedMLP.__call__

    def recording(experts: GroupedMLP, rows: jax.Array, groups: RowGroups) -> jax.Array:
        sizes.append(int(groups.sizes.sum()))
        return compute(experts, rows, groups)

    monkeypatch.setattr(GroupedMLP, "__call__", recording)
    padded = mixture(x.at[6].set(jnp.nan), is_real)
    np.testing.assert_array_equal(padded, expected)
    np.testing.assert_allclose(padded[:4], alone, rtol=1e-5, atol=1e-6)
    assert not padded[4:].any()
    assert sizes == [4 * mixture.config.num_chosen]


def test_padding_of_a_step_goes_to_no_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    compute = GroupedMLP.__call__

    def recording(experts: GroupedMLP, rows: jax.Array, groups: RowGroups) -> jax.Array:
        jax.debug.callback(lambda size: sizes.append(int(size)), groups.sizes.sum())
        return compute(experts, rows, groups)

    monkeypatch.setattr(GroupedMLP, "__call__", recording)
    fields = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "num_hidden_layers": 2}
    engine = Engine.from_checkpoint(write_model(tmp_path, "qwen3_moe", **fields), replace(SMALL, matmul="xla"))
    drive(engine, [Request("a", (5, 6, 7), SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))])
    jax.effects_barrier()
    # Of steps of 16 tokens; the last layer computes what is sampled.
    assert sorted(sizes) == [1 * 2] * 5 + [3 * 2]


@pytest.mark.usefixtures("as_shipped")
def test_a_nan_stays_in_its_token() -> None:
    mixture, x = experts(), tokens(5)
    spoilt = mixture(x.at[2].set(jnp.nan))
    assert jnp.isnan(spoilt[2]).all()
    np.testing.assert_array_equal(spoilt[:2], mixture(x)[:2])


def test_of_equal_scores_the_lower_number_wins() -> None:
    config = ExpertsConfig(num_experts=5, num_chosen=2, intermediate_size=1)
    chosen, weights = route(jnp.asarray([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0] * 5]), None, config)
    assert chosen.tolist() == [[1, 2], [0, 1]]
    np.testing.assert_allclose(weights[1], [0.2, 0.2], rtol=1e-6)


def test_a_correction_chooses_and_does_not_weigh() -> None:
    config = ExpertsConfig(num_experts=3, num_chosen=1, intermediate_size=1, scores="sigmoid", has_correction=True)
    chosen, weights = route(jnp.asarray([[1.0, 0.0, -1.0]]), jnp.asarray([0.0, 0.0, 1.0]), config)
    assert chosen.tolist() == [[2]]
    np.testing.assert_allclose(weights, [[1 / (1 + np.e)]], rtol=1e-6)


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    config = ExpertsConfig(
        num_experts=6, num_chosen=2, intermediate_size=1, scores="sigmoid", num_groups=3, groups_chosen=1
    )
    # The best expert of all is in a group whose best two are less than those of the last.
    chosen, _ = route(jnp.asarray([[9.0, -9.0, 0.0, 0.0, 1.0, 2.0]]), None, config)
    assert chosen.tolist() == [[5, 4]]


def test_router_weights_that_underflow_give_zeros() -> None:
    config = ExpertsConfig(num_experts=3, num_chosen=2, intermediate_size=1, scores="sigmoid", normalized=True)
    _, weights = route(jnp.full((1, 3), -500.0), None, config)
    assert weights.tolist() == [[0.0, 0.0]]
