"""The trace of requests that a fleet is sized for, one JSON object a line.

    {"arrival_s": 0.35, "prompt_tokens": 812, "output_tokens": 120}
    {"arrival_s": 0.41, "prompt_tokens": 930, "output_tokens": 64, "prefix_id": "support", "prefix_tokens": 700}

`arrival_s` counts from any origin, and lines may be in any order. `max_tokens` is the request's limit on its output, if
that is more than it generated: then the scheduler does not know its end beforehand. Prompts with the same `prefix_id`
have the same tokens up to `prefix_tokens`, as far as both go.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine.errors import ConfigError, shown

_REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
_FIELDS = (*_REQUIRED, "max_tokens", "prefix_id", "prefix_tokens")
_MAX_S = 1e9
_MAX_TOKENS = 2**24  # of one request: more than any model takes, and a list of them still fits into memory
_OWN_IDS = 2**31  # token ids from here on belong to one request alone, lower ones to a prefix


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One line of a trace."""

    arrival_s: float
    num_prompt: int
    num_output: int
    max_tokens: int
    prefix: int = 0  # number of its prefix_id; requests with the same one share their first tokens
    num_prefix: int = 0
    line: int = 0

    def prompt_ids(self, number: int) -> tuple[int, ...]:
        """Returns token ids that no other request has, except in the prefix. `number` is the request's index."""
        return (self.prefix,) * self.num_prefix + (_OWN_IDS + number,) * (self.num_prompt - self.num_prefix)

    @staticmethod
    def output_id(number: int) -> int:
        return _OWN_IDS + number


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    requests: tuple[TracedRequest, ...]
    source: str = "the trace"

    def check(self, max_model_len: int) -> None:
        """Raises ConfigError if a request is longer than a sequence can be; the message names its line."""
        for request in self.requests:
            if request.num_prompt + request.num_output > max_model_len:
                raise ConfigError(
                    f"{self.source}, line {request.line}: {request.num_prompt} prompt tokens and {request.num_output} "
                    f"output tokens never fit max_model_len {max_model_len}"
                )


def read_trace(path: Path) -> Trace:
    """Reads a trace. Raises ConfigError if the file is unreadable or a line is wrong; the message names the value."""
    try:
        if not path.is_file():
            raise ConfigError(f"--trace {path} is not a file")
        with path.open(encoding="utf-8") as lines:
            requests = list(_requests(f"--trace {path}", lines))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path} cannot be read: {error}") from error
    if not requests:
        raise ConfigError(f"--trace {path} holds no requests")
    return Trace(tuple(sorted(requests, key=lambda request: request.arrival_s)), f"--trace {path}")


def _requests(source: str, lines: Iterator[str]) -> Iterator[TracedRequest]:
    prefixes: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _request(json.loads(line), number, prefixes)
            except ConfigError as error:
                raise ConfigError(f"{source}, line {number}: {error}") from None
            except (ValueError, RecursionError):
                raise ConfigError(f"{source}, line {number}: not JSON: {shown(line.strip())}") from None


def _request(fields: Any, line: int, prefixes: dict[str, int]) -> TracedRequest:
    if not isinstance(fields, dict):
        raise ConfigError(f"not a JSON object: {shown(fields)}")
    for name in _REQUIRED:
        if name not in fields:
            raise ConfigError(f"{name} is missing")
    for name in fields:
        if name not in _FIELDS:
            raise ConfigError(f"unknown field {shown(name)}; there are {', '.join(_FIELDS)}")
    num_prompt, num_output = _count(fields, "prompt_tokens", 1), _count(fields, "output_tokens", 1)
    prefix, num_prefix = _prefix(fields, num_prompt, prefixes)
    return TracedRequest(
        _arrival_s(fields["arrival_s"]),
        num_prompt,
        num_output,
        _count(fields, "max_tokens", num_output) if "max_tokens" in fields else num_output,
        prefix,
        num_prefix,
        line,
    )


def _prefix(fields: Mapping[str, Any], num_prompt: int, prefixes: dict[str, int]) -> tuple[int, int]:
    if ("prefix_id" in fields) != ("prefix_tokens" in fields):
        given = "prefix_id" if "prefix_id" in fields else "prefix_tokens"
        raise ConfigError(f"{given} {shown(fields[given])} needs both prefix_id and prefix_tokens")
    if "prefix_id" not in fields:
        return 0, 0
    name = fields["prefix_id"]
    if not isinstance(name, str) or not name:
        raise ConfigError(f"prefix_id must be a text that is not empty, not {shown(name)}")
    return prefixes.setdefault(name, len(prefixes)), _count(fields, "prefix_tokens", 1, num_prompt)


def _count(fields: Mapping[str, Any], name: str, at_least: int, at_most: int = _MAX_TOKENS) -> int:
    value = fields[name]
    if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
        raise ConfigError(f"{name} must be a whole number from {at_least} to {at_most}, not {shown(value)}")
    return value


def _arrival_s(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MAX_S:
        raise ConfigError(f"arrival_s must be a number from 0 to {_MAX_S:g}, not {shown(value)}")
    return float(value)
