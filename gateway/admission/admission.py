"""What one HTTP request takes of its key's limits, from its admission to the end of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from starlette.requests import HTTPConnection

from penstock.gateway.context import caller_of, gateway_of
from penstock.gateway.errors import ApiError
from penstock.gateway.http.events import Event, EventWriter
from penstock.gateway.keys.limits import BackgroundRequest, Charge, Lease, Limiter, OverLimit, Usage, new_charge
from penstock.gateway.keys.records import Limits
from penstock.producer import Chunk, GenerateRequest, Reply

BYTES_A_TOKEN = 4  # of text in English and most programs
FINISH_TIMEOUT_S = 1.0


class Meter:
    """Counts the tokens of one reply, for what its key may use in a minute."""

    def __init__(self, admission: Admission, charge: Charge | None = None, num_prompt_tokens: int = 0) -> None:
        self._admission = admission
        self._charge = charge
        self._num_tokens = num_prompt_tokens
        self._has_ended = False

    def counted(self, writer: EventWriter) -> EventWriter:
        """`writer`, with what goes through it counted."""
        return _CountingWriter(writer, self) if self._admission.is_limited else writer

    def goes_on(self, queue: str, request_id: str) -> None:
        """It does in the background. Nobody here will see what it takes, so what was reserved for it counts."""
        if self._charge is not None:
            self._num_tokens = self._charge.num_tokens
        self._admission.goes_on(BackgroundRequest(queue, request_id))

    def ended(self, reply: Reply) -> None:
        """The whole reply is there. What it has taken is settled while its last bytes go to the client."""
        self._num_tokens = reply.usage.prompt_tokens + reply.usage.completion_tokens
        self._has_ended = True
        self._admission.ended_one()

    def count(self, num_tokens: int) -> None:
        """So many more have come."""
        self._num_tokens += num_tokens

    async def settle(self, limiter: Limiter) -> None:
        """A reply that others may read to its end is left for them to settle."""
        if self._charge is not None and (self._has_ended or not self._charge.is_shared):
            await limiter.settle(self._charge, self._num_tokens)


class _CountingWriter:
    def __init__(self, writer: EventWriter, meter: Meter) -> None:
        self._writer = writer
        self._meter = meter

    def chunk(self, chunk: Chunk) -> Iterable[Event | None]:
        self._meter.count(len(chunk.tokens))
        return self._writer.chunk(chunk)

    def end(self, reply: Reply) -> Iterable[Event | None]:
        self._meter.ended(reply)
        return self._writer.end(reply)

    def error(self, error: ApiError) -> Iterable[Event | None]:
        return self._writer.error(error)


class Admission:
    """One HTTP request's. Without limits it does nothing."""

    def __init__(
        self, limiter: Limiter | None = None, limits: Limits | None = None, lease: Lease | None = None
    ) -> None:
        self._limiter = limiter
        self._limits = limits or Limits()
        self._lease = lease
        self._meters: list[Meter] = []
        self._num_open = 0  # meters
        self._tokens: Usage | None = None
        self._goes_on: BackgroundRequest | None = None
        self._finishing: asyncio.Task[None] | None = None

    @property
    def is_limited(self) -> bool:
        return self._limiter is not None

    async def meter(self, request: GenerateRequest, max_model_len: int | None, shared_id: str | None) -> Meter:
        """Reserves what a request to the queue is about to take; once for all who ask for the same `shared_id`.

        Raises:
            OverLimit: its key would use more tokens than it may.
            ConnectionLost, ServerRefused: Redis is away or says no.
        """
        meter = Meter(self)
        if self._limiter is not None and self._lease is not None:
            charge = charge_for(self._lease.key_id, self._limits, request, max_model_len, shared_id)
            if charge is not None:
                await self._reserve(self._limiter, charge)
                meter = Meter(self, charge, _num_prompt_tokens(request))
        self._meters.append(meter)
        self._num_open += 1
        return meter

    async def _reserve(self, limiter: Limiter, charge: Charge) -> None:
        try:
            self._tokens = await limiter.reserve(charge)
        except OverLimit as error:
            self._tokens = error.usage
            raise

    def goes_on(self, request: BackgroundRequest) -> None:
        """It counts as running until its reply has ended."""
        self._goes_on = request

    def ended_one(self) -> None:
        """One of the replies is there. With the last of them, what was taken is given back."""
        self._num_open -= 1
        if not self._num_open:
            self._begin_to_finish()

    def _begin_to_finish(self) -> asyncio.Task[None] | None:
        if self._limiter is not None and self._finishing is None:
            self._finishing = asyncio.create_task(self._finish(self._limiter))
        return self._finishing

    async def _finish(self, limiter: Limiter) -> None:
        releases = [] if self._lease is None else [limiter.release(self._lease, self._goes_on)]
        await asyncio.gather(*releases, *(meter.settle(limiter) for meter in self._meters))

    async def finish(self) -> None:
        """Gives back what is no longer taken, before the client knows that the answer has ended, so that it may ask
        again at once. Where Redis is away, nobody waits for it: leases lapse.
        """
        finishing = self._begin_to_finish()
        if finishing is not None and not finishing.done():
            await asyncio.wait([finishing], timeout=FINISH_TIMEOUT_S)

    @property
    def headers(self) -> Mapping[str, str]:
        """`x-ratelimit-*`, as OpenAI's."""
        requests = None if self._lease is None else self._lease.requests
        return {**headers_of("requests", requests), **headers_of("tokens", self._tokens)}


def headers_of(kind: str, usage: Usage | None) -> Mapping[str, str]:
    if usage is None:
        return {}
    return {
        f"x-ratelimit-limit-{kind}": str(usage.limit),
        f"x-ratelimit-remaining-{kind}": str(usage.remaining),
        f"x-ratelimit-reset-{kind}": f"{usage.reset_ms / 1000:g}s",
    }


def admission_of(connection: HTTPConnection) -> Admission:
    admission = getattr(connection.state, "admission", None) or Admission()
    assert isinstance(admission, Admission)  # noqa: S101  the guard has set it
    return admission


async def admitted(
    asked: HTTPConnection, queue: str, request: GenerateRequest, shared_id: str | None = None
) -> tuple[GenerateRequest, Meter]:
    """What goes to the queue for a caller, and the meter for its reply.

    Args:
        asked: the HTTP request.
        queue: where it goes.
        request: what.
        shared_id: the request's, if whoever asks again is to get the same reply.

    Raises:
        OverLimit: its key would use more tokens than it may.
        ConnectionLost, ServerRefused: Redis is away or says no.
    """
    gateway, caller, admission = gateway_of(asked), caller_of(asked), admission_of(asked)
    if caller.key_id is not None:
        request = request.model_copy(update={"tenant": caller.tenant})  # whatever the client says that it is
    card = await gateway.directory.card_of(queue, may_wait=True) if admission.is_limited else None
    return request, await admission.meter(request, None if card is None else card.max_model_len, shared_id)


def charge_for(
    key_id: str, limits: Limits, request: GenerateRequest, max_model_len: int | None, shared_id: str | None
) -> Charge | None:
    """What a key is charged for a request to the queue, before anybody knows what it takes; None: it has no limit."""
    if limits.tokens_per_minute is None:
        return None
    num_tokens = _num_prompt_tokens(request) + _num_wanted_tokens(request, max_model_len)
    return new_charge(key_id, num_tokens, limits.tokens_per_minute, shared_id)


def _num_prompt_tokens(request: GenerateRequest) -> int:
    """About so many; only a worker can tell."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    text = request.model_dump_json(include={"prompt", "messages", "tools"}, exclude_defaults=True)
    return len(text.encode()) // BYTES_A_TOKEN


def _num_wanted_tokens(request: GenerateRequest, max_model_len: int | None) -> int:
    """Those that a client has asked for; none where it asked for as many as there can be."""
    if max_model_len is not None and request.max_tokens >= max_model_len:
        return 0
    return request.n * request.max_tokens
