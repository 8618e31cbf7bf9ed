"""Experts over several devices give the same tokens; no device is sent another's weights or tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec

from penstock.engine import ConfigError, EngineConfig
from penstock.engine.deployment.deployment import deploy
from penstock.engine.models import ExpertsConfig, MLPConfig, ModelConfig, active_parameters, num_parameters
from penstock.engine.models.axes import logical_axes
from penstock.engine.sharding.placement import place, split_model
from tests.engine.engines import TINY, write_model
from tests.engine.sharding.devices import run_on_devices

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # 2 does not divide the experts, which are one tensor per layer and have biases
    "biased": ("1,2x2", "gpt_oss", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    # a tensor for each expert, a shared one, and a dense layer
    "shared": ("1,2", "glm4_moe", {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}),
}
Runs = Callable[[str], dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of a model by devices; `2x2` has 2 tensor_parallel and 2 expert_parallel."""

    @cache
    def run(model: str) -> dict[str, dict[str, Any]]:
        layouts, family, config = MODELS[model]
        return run_on_devices(write_model(tmp_path_factory.mktemp(model), family, **HEADS, **config), layouts)

    return run


divided = pytest.mark.parametrize(
    ("model", "devices", "shares"),
    [("biased", "2x2", 4), pytest.param("shared", "2", 2, marks=pytest.mark.slow)],  # each is two engines more
)


@divided
def test_several_devices_give_the_tokens_of_one(runs: Runs, model: str, devices: str, shares: int) -> None:
    assert runs(model)[devices]["tokens"] == runs(model)["1"]["tokens"]
    assert all(len(tokens) == 12 for tokens in runs(model)["1"]["tokens"])


@divided
def test_results_are_summed_and_nothing_else_is_sent(runs: Runs, model: str, devices: str, shares: int) -> None:
    assert runs(model)[devices]["all_reduces"] > 0
    assert runs(model)[devices]["other_collectives"] == 0


@divided
def test_experts_and_the_cache_are_split_over_all_devices(runs: Runs, model: str, devices: str, shares: int) -> None:
    assert runs(model)[devices]["expert_shares"] == [shares]
    assert runs(model)[devices]["cache_shares"] == [shares]


def with_experts(**fields: Any) -> ModelConfig:
    """Returns the tiny model with a mixture in each layer but the first."""
    mixture = ExpertsConfig(**{"num_experts": 6, "num_chosen": 2, "intermediate_size": 40, **fields})
    first, *others = TINY.blocks
    return replace(TINY, blocks=(first, *(replace(block, mlp=mixture) for block in others)))


def test_experts_are_padded_where_the_groups_do_not_divide_them() -> None:
    model = with_experts()
    split = split_model(model, 1, 4)
    assert [block.mlp.num_padding for block in split.blocks[1:] if isinstance(block.mlp, ExpertsConfig)] == [2, 2]
    assert split_model(split, 1, 4) == split
    assert num_parameters(split) == num_parameters(model)
    assert active_parameters(split) == active_parameters(model)


def test_parameters_that_a_token_goes_through_are_counted_by_hand() -> None:
    model = with_experts(shared=MLPConfig(24))
    of_one_expert = 3 * 64 * 40
    assert num_parameters(model) - active_parameters(model) == 2 * (6 - 2) * of_one_expert
    assert num_parameters(model) - num_parameters(TINY) == 2 * (
        6 * of_one_expert + 64 * 6 + 3 * 64 * 24 - 3 * 64 * 96
    )  # experts, routers, shared experts, less the feed-forwards that they stand for
    assert active_parameters(TINY) == num_parameters(TINY)


@pytest.mark.parametrize(
    ("model", "tensor", "expert", "message"),
    [
        (TINY, 1, 2, "expert_parallel = 2, and the model has no experts"),
        (with_experts(), 1, 8, "expert_parallel = 8 is above the model's 6 experts"),
        (
            with_experts(intermediate_size=41),
            2,
            1,
            "tensor_parallel = 2 does not divide the model's 41 features of an exp",
        ),
        (
            with_experts(shared=MLPConfig(25)),
            2,
            1,
            "does not divide the model's 25 features of the shared expert; 1 do",
        ),
        (with_experts(), 1, 3, "tensor_parallel = 1 times expert_parallel = 3 does not divide the model's 4 attention"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(model: ModelConfig, tensor: int, expert: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_model(model, tensor, expert)


def test_too_few_devices_are_named_with_what_was_asked_for() -> None:
    config = EngineConfig(tensor_parallel=32, expert_parallel=2, max_num_seqs=4)
    with pytest.raises(ConfigError, match=r"tensor_parallel = 32 times expert_parallel = 2, and there are \d+ cpu dev"):
        deploy(config, with_experts())


def test_experts_lie_along_their_own_axis_and_the_rest_along_both() -> None:
    assert place(jax.devices()[:1], 1).mesh.axis_names == ("data", "tensor")
    mesh: Any = jax.sharding.AbstractMesh((1, 2, 4), ("data", "expert", "tensor"))
    placement = replace(place(jax.devices()[:1], 1), mesh=mesh)
    experts = ("blocks", 0, "mlp", "experts")
    specs = {
        (*experts, "gate", "kernel"): PartitionSpec("expert", None, "tensor"),
        (*experts, "down", "kernel"): PartitionSpec("expert", "tensor", None),
        (*experts, "down", "bias"): PartitionSpec("expert", None),
        ("blocks", 0, "attention", "q", "kernel"): PartitionSpec(None, ("expert", "tensor")),
        ("blocks", 0, "mlp", "router", "kernel"): PartitionSpec(None, None),
    }
    assert {path: placement.spec(logical_axes(path, len(spec))) for path, spec in specs.items()} == specs
    assert placement.num_shares == 8
