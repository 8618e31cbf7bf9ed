"""What an operator can set of the gateway."""

from __future__ import annotations

from typing import Annotated

from pydantic import ByteSize, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from penstock.producer.wire import MIN_KEEP_S


class GatewaySettings(BaseSettings):
    """Every setting of a gateway. Nothing changes it once it is made."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_GATEWAY_", frozen=True, extra="forbid")

    redis_url: str = Field("redis://localhost:6379/0", repr=False)
    queues: tuple[str, ...] = ()  # those to serve; none: all that have a card
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    commit_after_s: Annotated[float, Field(gt=0.0)] = 10.0
    """How long the status of a streamed answer is held back for what may go wrong before the first token."""
    ping_interval_s: Annotated[float, Field(gt=0.0)] = 15.0
    """Between comments in a stream without news, which keep proxies from closing it."""
    abandon_after_s: Annotated[float, Field(gt=0.0)] = 30.0
    """How long a request with an Idempotency-Key goes on without anybody who reads it."""
    max_body_bytes: ByteSize = ByteSize(16 * 2**20)
    max_prompts: Annotated[int, Field(ge=1)] = 128
    """Prompts in one request for completions, each of which is a request to the queue."""
    max_queue_length: Annotated[int, Field(ge=1)] = 10_000
    """Requests in a queue, waiting and running, from which on more are turned away."""
    keep_responses_s: Annotated[int, Field(ge=MIN_KEEP_S)] = 86_400
    """How long a stored response can be read after its end, as far as the workers' `max_keep_s` allows."""
    max_store_share: Annotated[float, Field(gt=0.0, le=0.9)] = 0.25
    """Of Redis's `maxmemory` (of the machine's memory where it is 0) for what clients may ask for later: stored
    responses, files, batches. All gateways together keep no more."""
    max_store_bytes: Annotated[ByteSize, Field(ge=1)] | None = None
    """The same in bytes, where that is less."""
