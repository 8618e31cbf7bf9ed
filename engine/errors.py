"""The engine's exceptions.

EngineError
├── ConfigError            a setting or a checkpoint's config that the engine cannot honour
├── CheckpointError        a tensor that is missing, unexpected or misshapen; a file that is not there
├── KernelLayoutError      C++ kernels and Python that disagree on what they pass each other
└── RequestError           a request that is refused; the engine goes on
    ├── PromptTooLong      more prompt tokens than the model, the page pool or a limit can hold
    └── InvalidRequest     a value out of range, an unknown token id, a duplicate id
"""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import Repr

_repr = Repr()
_repr.maxlevel, _repr.maxdict, _repr.maxlist = 3, 8, 8
_repr.maxstring = _repr.maxother = _repr.maxlong = 120


class EngineError(Exception):
    """Base of all errors of this package."""


class ConfigError(EngineError):
    """A setting, or a checkpoint's configuration, that the engine cannot honour.

    Args:
        message: names the setting and its value.
        settings: fields of `EngineConfig` whose values alone are to blame, if any.
    """

    def __init__(self, message: str, *settings: str) -> None:
        super().__init__(message)
        self.settings = settings


class CheckpointError(EngineError):
    """A checkpoint on disk that does not hold what its configuration promises."""


class KernelLayoutError(EngineError):
    """The C++ kernels and Python disagree on what they pass each other: one side was changed alone."""


class RequestError(EngineError):
    """A request that cannot be served. `code` is stable and goes to the client."""

    code = "invalid_request"


class InvalidRequest(RequestError):
    """A value that is out of range or contradicts another."""


class PromptTooLong(RequestError):
    """A prompt, or prompt and max_tokens, that can never fit."""

    code = "too_long"


def failure_message(error: Exception) -> str:
    """Returns the error text for the client whose request made the engine raise `error`."""
    return f"the engine failed at this request: {type(error).__name__}: {error}"


def listed(names: Sequence[str], at_most: int) -> str:
    """Returns the first names for a message, and how many more there are."""
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return f"{', '.join(names[:at_most])}{more}"


def shown(value: object) -> str:
    """Returns a shortened `repr` of a value from a file, for messages, however large or deep the value is."""
    return _repr.repr(value)
