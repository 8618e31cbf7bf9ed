"""Records of API keys."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from penstock.protocol.wire import ID_PATTERN

_Name = Annotated[str, Field(pattern=f"^{ID_PATTERN.pattern}$")]
Limit = Annotated[int, Field(ge=1, le=10**12)]


class KeyLimits(BaseModel):
    """Limits of a key over all gateways; None: unlimited."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    max_concurrent: Limit | None = None


class ApiKey(BaseModel):
    """A key as it was created; it is immutable. An unknown field may be a restriction from a later version, so a record
    that has one is not read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: _Name
    name: _Name
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$", repr=False)]
    tenant: _Name | None = None
    models: Annotated[frozenset[str], Field(min_length=1)] | None = None  # names of models and queues; None: all
    limits: KeyLimits = KeyLimits()
    admin: bool = False  # whether it may also use the operators' routes, which show the ids of requests
    created_ms: int  # server time, like the next
    expires_ms: int | None = None
