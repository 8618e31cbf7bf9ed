"""Reads mixtures of experts from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.engine.errors import ConfigError, shown
from penstock.engine.models.config import ExpertsConfig, MLPConfig
from penstock.engine.models.hf.blocks import read_activation
from penstock.engine.models.hf.config import HFConfig


def read_experts(
    config: HFConfig,
    *counts: str,
    intermediate_size: str,
    normalized: bool,
    chosen: str = "num_experts_per_tok",
    activation: str = "hidden_act",
) -> ExpertsConfig:
    """Reads experts scored by a softmax over all of them. One of the fields `counts` states their number; the others
    are named by the arguments.

    Raises:
        ConfigError: a field is missing, contradicts another, or asks for a computation that is not implemented.
    """
    num_experts = _count(config, counts)
    num_chosen = config.integer(chosen)
    if num_chosen > num_experts:
        raise ConfigError(f"config.json: {chosen} = {num_chosen} is above the {num_experts} experts that there are")
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=config.integer(intermediate_size),
        activation=read_activation(config, activation),
        normalized=normalized,
    )


def read_sigmoid_experts(
    config: HFConfig,
    *counts: str,
    num_shared: str = "n_shared_experts",
) -> ExpertsConfig:
    """Reads DeepSeek-V3's experts (arXiv 2412.19437). Scores are sigmoids, with a correction for the choice, which is
    from the best groups only. Shared experts run beside them.

    Raises:
        ConfigError: as `read_experts`; or the experts cannot be split into these groups, or the groups hold too few.
    """
    experts = read_experts(
        config,
        *(counts or ("n_routed_experts", "num_local_experts")),
        intermediate_size="moe_intermediate_size",
        normalized=config.flag("norm_topk_prob"),
    )
    num_groups, groups_chosen = _groups(config, experts)
    return replace(
        experts,
        scores="sigmoid",
        has_correction=True,
        scale=config.number("routed_scaling_factor"),
        num_groups=num_groups,
        groups_chosen=groups_chosen,
        shared=MLPConfig(experts.intermediate_size * config.integer(num_shared), experts.activation),
    )


def dense_first(
    config: HFConfig, dense: MLPConfig, experts: ExpertsConfig, num_dense: int
) -> list[MLPConfig | ExpertsConfig]:
    """Returns a feed-forward per layer: the first `num_dense` have no experts."""
    return [dense if layer < num_dense else experts for layer in range(config.integer("num_hidden_layers"))]


def typed_layers(
    config: HFConfig, dense: MLPConfig, experts: ExpertsConfig, num_dense: int
) -> list[MLPConfig | ExpertsConfig]:
    """Returns a feed-forward per layer: `mlp_layer_types` says which have experts; without it, all but the first
    `num_dense` do.
    """
    num_layers, types = config.integer("num_hidden_layers"), config.get("mlp_layer_types")
    if types is None:
        return dense_first(config, dense, experts, num_dense)
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(kind not in ("dense", "sparse") for kind in types)
    ):
        raise ConfigError(
            f"config.json: mlp_layer_types must list dense or sparse for {num_layers} layers, not {shown(types)}"
        )
    return [dense if kind == "dense" else experts for kind in types]


def sparse_layers(
    config: HFConfig, dense: MLPConfig, experts: ExpertsConfig, otherwise: Sequence[int] = ()
) -> list[MLPConfig | ExpertsConfig]:
    """Returns a feed-forward per layer by Qwen's rule: every `decoder_sparse_step`th has experts, unless it is listed
    as dense. Without a list, those of `otherwise` are.
    """
    num_layers, step = config.integer("num_hidden_layers"), config.integer("decoder_sparse_step")
    named = config.get("mlp_only_layers")
    named = list(otherwise) if named is None else named
    if not isinstance(named, list) or not all(isinstance(layer, int) for layer in named):
        raise ConfigError(f"config.json: mlp_only_layers must list numbers of layers, not {shown(named)}")
    return [dense if layer in named or (layer + 1) % step else experts for layer in range(num_layers)]


def _groups(config: HFConfig, experts: ExpertsConfig) -> tuple[int, int]:
    """Returns the number of groups, and the number of them that may be chosen from."""
    num_groups, groups_chosen = config.integer("n_group"), config.integer("topk_group")
    per_group, rest = divmod(experts.num_experts, num_groups)
    if rest or (num_groups > 1 and per_group < 2):
        raise ConfigError(
            f"config.json: n_group = {num_groups} does not part {experts.num_experts} experts into groups of 2 or more"
        )
    if groups_chosen > num_groups or experts.num_chosen > groups_chosen * per_group:
        raise ConfigError(
            f"config.json: {experts.num_chosen} experts cannot be chosen from topk_group = {groups_chosen} "
            f"of {num_groups} groups of {per_group}"
        )
    return num_groups, groups_chosen


def _count(config: HFConfig, names: tuple[str, ...]) -> int:
    """Returns the number of experts. Its field differs by dialect, and a config.json may have several that agree."""
    stated = {name: config.integer(name) for name in names if config.fields.get(name) is not None}
    if len(set(stated.values())) > 1:
        raise ConfigError(f"config.json: the number of experts is stated as {shown(stated)}")
    return next(iter(stated.values()), None) or config.integer(names[0])
