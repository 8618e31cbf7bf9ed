"""Matches modules against the lists of a `quantization_config`: needed if no file says which weights are quantized."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.errors import ConfigError
from penstock.engine.formats.quantization_config import unsupported

REGEX = "re:"  # prefix of regular expressions in the lists of compressed-tensors
HEAD = "lm_head"  # not quantized in most formats
_REPEATS = re.compile(r"[*+?{]")
_MOST_REPEATS = 4  # so that matching a name of a hundred letters is fast, whatever the expression
_LONGEST = 200


def names(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Reads a list of patterns; empty if the field is absent.

    Raises:
        ConfigError: it is not a list of strings.
    """
    found = fields.get(name) or ()
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise unsupported(name, found, "expected a list of names")
    return tuple(found)


def is_left(module: str, patterns: Sequence[str]) -> bool:
    """Checks whether transformers' `modules_to_not_convert` names a module: by its end, or as an expression that
    matches its beginning, up to a dot.
    """
    return any(module.endswith(one) or _expression(f"(?:{one})(?=\\.|$)", one).match(module) for one in patterns)


def is_named(module: str, patterns: Sequence[str]) -> bool:
    """Checks whether compressed-tensors' `targets` or `ignore` names a Linear: by its class, its name, or an
    expression.
    """
    return any(
        _expression(one.removeprefix(REGEX), one).match(module) if one.startswith(REGEX) else one in ("Linear", module)
        for one in patterns
    )


def _expression(text: str, pattern: str) -> re.Pattern[str]:
    """Compiles an expression. Raises ConfigError if it is invalid or may be slow to match: the file may come from
    anywhere.
    """
    repeats = _REPEATS.findall(pattern)
    if len(pattern) > _LONGEST or len(repeats) > _MOST_REPEATS or re.search(r"\)[*+?{]", pattern):
        raise unsupported("modules", pattern, "the expression is too long; give the checkpoint's folder")
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"config.json: {pattern!r} names no modules: {error}") from None
