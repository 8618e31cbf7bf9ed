"""The body of a request for a batch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from penstock.gateway.common.fields import Body, Policy, read_fields
from penstock.gateway.files.form import check_ttl
from penstock.gateway.responses.request import described

MAX_WINDOW_S = 7 * 86_400
"""Largest `timeout_s` of a request."""

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def window_s(text: str) -> int:
    """Returns the seconds of a `completion_window` such as 24h.

    Raises:
        ValueError: it is not a window.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", text)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise ValueError("must be a time such as 24h, at most 7d: a number and s, m, h or d")
    return seconds


def _window(text: str) -> str:
    window_s(text)
    return text


class OutputExpiresAfter(Body):
    """`output_expires_after`."""

    anchor: Literal["created_at"]
    seconds: int


class BatchBody(Body):
    """The body's supported fields."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Annotated[str, AfterValidator(_window)]
    metadata: Annotated[dict[str, str], AfterValidator(described)] | None = None
    output_expires_after: OutputExpiresAfter | None = Field(None)

    @property
    def window_s(self) -> int:
        return window_s(self.completion_window)


BATCH_POLICY = Policy(frozenset(BatchBody.model_fields), {}, {})


def read_batch(body: Mapping[str, Any]) -> BatchBody:
    """Raises ApiError naming the field that is wrong."""
    asked = read_fields(BATCH_POLICY, BatchBody, body)
    if asked.output_expires_after is not None:
        check_ttl(asked.output_expires_after.seconds, "output_expires_after.seconds")
    return asked
