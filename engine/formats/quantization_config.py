"""Typed access to the fields of a `quantization_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.errors import ConfigError, shown

CONFIG = "quantization_config"


def integer(fields: Mapping[str, Any], name: str, accepted: tuple[int, ...], default: int | None = None) -> int:
    """Reads one of the `accepted` integers; `default` stands in for an absent field.

    Raises:
        ConfigError: the value is another.
    """
    value = fields.get(name, default)
    if isinstance(value, bool) or value not in accepted:
        raise unsupported(name, value, f"expected one of {', '.join(map(str, accepted))}")
    return int(value)


def flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise unsupported(name, value, "expected true or false")
    return value


def unsupported(name: str, value: object, why: str = "") -> ConfigError:
    return ConfigError(f"config.json: {CONFIG}.{name} = {shown(value)} is not supported{why and ': ' + why}")


def quantization_of(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the `quantization_config` of a config.json, or its `compression_config`; None if it has neither.

    Either may also be inside `text_config`.

    Raises:
        ConfigError: it is not an object.
    """
    inner = fields.get("text_config")
    places = (fields, inner if isinstance(inner, Mapping) else {})
    found = (place.get(name) for place in places for name in (CONFIG, "compression_config"))
    described = next(filter(None, found), None)
    if described is not None and not isinstance(described, Mapping):
        raise ConfigError(f"config.json: {CONFIG} is not an object: {shown(described)}")
    return described
