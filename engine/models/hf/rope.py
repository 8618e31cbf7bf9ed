"""Reads rotary positions from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.engine.errors import ConfigError, shown
from penstock.engine.models.config import RopeConfig
from penstock.engine.models.hf.config import HFConfig
from penstock.engine.models.layers.rope import ROPE_KINDS, rotary_frequencies

FULL, SLIDING = "full_attention", "sliding_attention"
"""The layer types in `layer_types`."""


def read_rope(config: HFConfig, head_dim: int) -> RopeConfig:
    """Reads the rope of all layers, which rotates all features of each head.

    Raises:
        ConfigError: a field makes no sense, or asks for what is not implemented.
    """
    config.refuse_unless("partial_rotary_factor", None, 1)
    table = flat_rope_table(config)
    HFConfig(table, {}).refuse_unless("partial_rotary_factor", None, 1)
    return rope_from(config, table, head_dim)


def read_neighbours_rope(config: HFConfig, head_dim: int) -> RopeConfig:
    """Reads the rope like `read_rope`, for a family in which each feature rotates with its neighbour."""
    return replace(read_rope(config, head_dim), interleaved=True)


def read_partial_rope(config: HFConfig, head_dim: int) -> RopeConfig:
    """Reads the rope of all layers, which rotates the first `partial_rotary_factor` of each head.

    Raises:
        ConfigError: a field makes no sense, or asks for what is not implemented.
    """
    table = flat_rope_table(config)
    name = "partial_rotary_factor"
    share = HFConfig(table, {name: config.get(name)}).number(name, default=1.0)
    if share > 1 or int(head_dim * share) < 2:
        raise ConfigError(f"config.json: {name} = {share} leaves no features to rotate, or too many, of {head_dim}")
    return rope_from(config, table, int(head_dim * share))


def flat_rope_table(config: HFConfig) -> Mapping[str, Any]:
    """Returns a `rope_table` that does not differ between layers."""
    table = rope_table(config)
    if any(isinstance(value, dict) for value in table.values()):
        raise ConfigError(f"config.json: rotary parameters must be one flat table for all layers, not {shown(table)}")
    return table


def read_rope_of(layer_type: str, config: HFConfig, head_dim: int) -> RopeConfig:
    """Reads the rope of one type of layers, if `rope_parameters` has a table for each type.

    In the older dialect `rope_theta` and `rope_scaling` belong to full layers, and `rope_local_base_freq` to sliding
    ones.

    Raises:
        ConfigError: a field makes no sense, or asks for what is not implemented.
    """
    _refuse_beside_tables(config)
    theta = config.number("rope_theta" if layer_type == FULL else "rope_local_base_freq")
    scaling = _scaling_by_its_name(config) if layer_type == FULL else {}
    table = {"rope_theta": theta, **_table_of(layer_type, config), **scaling}
    HFConfig(table, {}).refuse_unless("partial_rotary_factor", None, 1)
    return rope_from(config, table, head_dim)


def read_proportional_rope_of(layer_type: str, config: HFConfig, head_dim: int) -> RopeConfig:
    """Reads the rope of one type of layers, if `rope_parameters` has a table for each type.

    In a `proportional` table all features of a head are paired, and the first `partial_rotary_factor` of the pairs
    rotates.

    Raises:
        ConfigError: a field makes no sense, or asks for what is not implemented.
    """
    _refuse_beside_tables(config)
    fields = _table_of(layer_type, config)
    table, share = HFConfig(fields, {}), "partial_rotary_factor"
    if table.get("rope_type") != "proportional":
        table.refuse_unless(share, None, 1)  # transformers ignores it
        return rope_from(config, {"rope_theta": table.number("rope_theta"), **fields}, head_dim)
    num_turning = int(table.number(share, default=1.0) * head_dim // 2)
    if not 0 < num_turning <= head_dim // 2:
        raise ConfigError(
            f"config.json: {share} = {shown(table.get(share))} leaves no features to rotate, or too many, of {head_dim}"
        )
    theta, factor = table.number("rope_theta"), table.number("factor", default=1.0)
    return _finite(RopeConfig(head_dim, theta, "proportional", factor, num_turning=num_turning))


def _refuse_beside_tables(config: HFConfig) -> None:
    """Refuses fields that only count inside the table of a layer type, or that are not meant for both types."""
    config.refuse_unless("partial_rotary_factor", None, 1)
    config.refuse_unless("original_max_position_embeddings", None)


def _scaling_by_its_name(config: HFConfig) -> Mapping[str, Any]:
    scaling = _table(config, "rope_scaling")
    if "rope_type" not in scaling and scaling.get("type") not in (None, "default"):
        raise ConfigError(
            f"config.json: rope_scaling has type = {shown(scaling['type'])}, which transformers passes over here; "
            "say rope_type"
        )
    return scaling


def _table_of(layer_type: str, config: HFConfig) -> Mapping[str, Any]:
    tables = {name: table for name, table in _table(config, "rope_parameters").items() if table is not None}
    by_type = {name: table for name, table in tables.items() if name in (FULL, SLIDING) and isinstance(table, dict)}
    if len(by_type) < min(len(tables), 2):  # if both are there, transformers ignores everything else
        raise ConfigError(
            f"config.json: rope_parameters must have a table for {FULL} and one for {SLIDING}, not {shown(tables)}"
        )
    found = by_type.get(layer_type, {})
    for table in (tables, found):  # transformers looks for it only beside the tables, for both of them
        HFConfig(table, {}).refuse_unless("truncate", None, True)
    return found


def _table(config: HFConfig, name: str) -> Mapping[str, Any]:
    table = config.get(name) or {}
    if not isinstance(table, dict):
        raise ConfigError(f"config.json: {name} must be a table, not {shown(table)}")
    return table


def rope_table(config: HFConfig) -> Mapping[str, Any]:
    """Reads both dialects: `rope_theta` with `rope_scaling`, and the single `rope_parameters` of transformers 5."""
    config.number("rope_theta", default=10_000.0)  # must be valid even if the table's own overrides it
    table = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(table, dict):
        raise ConfigError(f"config.json: rotary parameters must be one flat table for all layers, not {shown(table)}")
    return table


def rope_from(config: HFConfig, table: Mapping[str, Any], dim: int) -> RopeConfig:
    """Reads a flat table of rotary parameters, for `dim` features of each head.

    Raises:
        ConfigError: a field makes no sense, or asks for what is not implemented.
    """
    rope = HFConfig(table, defaults={"rope_theta": config.get("rope_theta")})
    theta = rope.number("rope_theta", default=10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(f"config.json: rope type {shown(kind)} is not one of {', '.join(ROPE_KINDS)}")
    return _finite(_scaled(config, rope, kind, RopeConfig(dim=dim, theta=theta)))


def _scaled(config: HFConfig, rope: HFConfig, kind: str, plain: RopeConfig) -> RopeConfig:
    if kind == "default":
        return plain
    if kind == "linear":
        return replace(plain, kind=kind, factor=rope.number("factor"))
    max_position = config.integer("max_position_embeddings")
    if kind == "dynamic":
        if plain.dim <= 2:
            raise ConfigError(f"config.json: rope type 'dynamic' needs more than {plain.dim} features that rotate")
        return replace(plain, kind=kind, factor=rope.number("factor"), original_max_position=max_position)
    # A value outside the table overrides one inside it, as in transformers.
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    original = HFConfig({"original_max_position_embeddings": original}, {}).integer(
        "original_max_position_embeddings", default=max_position
    )
    plain = replace(plain, kind=kind, original_max_position=original)
    if kind == "longrope":
        return _longrope(rope, plain, max_position)
    return _llama3(rope, plain) if kind == "llama3" else _yarn(rope, plain, max_position)


def _finite(rope: RopeConfig) -> RopeConfig:
    """Checks that the frequencies are finite: valid numbers can still give invalid ones together."""
    try:
        with np.errstate(all="ignore"):
            frequencies, scale = rotary_frequencies(rope)
            if rope.kind == "longrope":
                of_long, _ = rotary_frequencies(replace(rope, short_factors=rope.long_factors))
                frequencies = np.concatenate([frequencies, of_long])
    except (ArithmeticError, ValueError) as error:
        raise ConfigError(f"config.json: no rotary frequencies can be computed from {rope}: {error}") from error
    if not np.isfinite(frequencies).all() or not np.isfinite(np.float32(scale)):
        raise ConfigError(f"config.json: the rotary frequencies are not finite with {rope}")
    return rope


def _llama3(rope: HFConfig, plain: RopeConfig) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise ConfigError(f"config.json: high_freq_factor = {high} must be above low_freq_factor = {low}")
    return replace(plain, factor=rope.number("factor"), low_freq_factor=low, high_freq_factor=high)


def _longrope(rope: HFConfig, plain: RopeConfig, max_position: int) -> RopeConfig:
    def factors(name: str) -> tuple[float, ...]:
        values, count = rope.get(name), (plain.dim + 1) // 2
        if not isinstance(values, list) or len(values) != count:
            raise ConfigError(
                f"config.json: {name} must list {count} numbers, one per pair of features, not {shown(values)}"
            )
        return tuple(HFConfig({name: value}, {}).number(name) for value in values)

    return replace(
        plain,
        factor=rope.number("factor", default=max_position / plain.original_max_position),
        attention_factor=rope.number("attention_factor") if rope.get("attention_factor") is not None else None,
        short_factors=factors("short_factor"),
        long_factors=factors("long_factor"),
    )


def _yarn(rope: HFConfig, plain: RopeConfig, max_position: int) -> RopeConfig:
    def optional(name: str) -> float | None:
        return rope.number(name) if rope.get(name) else None

    return replace(
        plain,
        factor=rope.number("factor", default=max_position / plain.original_max_position),
        beta_fast=optional("beta_fast") or 32.0,
        beta_slow=optional("beta_slow") or 1.0,
        attention_factor=rope.number("attention_factor") if rope.get("attention_factor") is not None else None,
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=rope.flag("truncate") if rope.get("truncate") is not None else True,
    )
