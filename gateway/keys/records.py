"""What an API key is."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from penstock.producer.wire import ID_PATTERN

Name = Annotated[str, Field(pattern=f"^{ID_PATTERN.pattern}$")]
Limit = Annotated[int, Field(ge=1, le=10**12)]


class Limits(BaseModel):
    """How much a key may ask for, over all gateways; None: without limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    max_concurrent: Limit | None = None


class ApiKey(BaseModel):
    """A key as it was created; nothing changes it. A field that this version does not know may be a restriction, so a
    record that has one is not read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Name
    name: Name
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$", repr=False)]
    tenant: Name | None = None
    models: Annotated[frozenset[str], Field(min_length=1)] | None = None  # names of models and queues; None: all
    limits: Limits = Limits()
    admin: bool = False  # whether it may also look after queues, which shows the ids of requests
    created_ms: int  # server time, as the next
    expires_ms: int | None = None
