"""Use of a key's limits by one HTTP request, from its admission to the end of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from penstock.gateway.admission.tenancy import tenancy
from penstock.gateway.context import caller_of, gateway_of
from penstock.gateway.errors import ApiError
from penstock.gateway.http.events import EventWriter, ServerSentEvent
from penstock.gateway.keys.limits import Limiter, LimitUsage, OverLimit, RequestLease
from penstock.gateway.keys.manager import KeyManager
from penstock.gateway.keys.records import KeyLimits
from penstock.gateway.keys.settling import Settling
from penstock.gateway.keys.tabs import Order, Tab
from penstock.producer import Chunk, GenerateRequest, PenstockError, QueueFull, Reply

BYTES_A_TOKEN = 4  # for text in English and most programs
FINISH_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """A request that is about to be sent."""

    queue: str
    request_id: str
    request: GenerateRequest
    is_shared: bool  # a repeated request gets the same reply
    is_at_once: bool = True  # whether it counts as a concurrent request


class Meter:
    """Counts the tokens of one reply for its tab, which is closed at the reply's end or left for others to close."""

    def __init__(self, admission: RequestAdmission, settling: Settling | None = None, tab: Tab | None = None) -> None:
        self._admission = admission
        self._settling = settling
        self._tab = tab
        self._num_come = 0
        self._num_in_all: int | None = None  # once it has ended

    def counted(self, writer: EventWriter) -> EventWriter:
        """Returns `writer` wrapped so that its chunks are counted."""
        return _CountingWriter(writer, self) if self._admission.is_limited else writer

    def counting(self, each: Callable[[Chunk], object] | None) -> Callable[[Chunk], object] | None:
        """Returns `each` wrapped so that its chunks are counted."""
        if not self._admission.is_limited:
            return each
        if each is None:
            return self.count

        def count_and_give(chunk: Chunk) -> None:
            self.count(chunk)
            each(chunk)

        return count_and_give

    def told(self, told: Callable[[PenstockError], ApiError]) -> Callable[[PenstockError], ApiError]:
        """Returns `told` wrapped so that an error in place of the reply is noted."""

        def note_and_tell(error: PenstockError) -> ApiError:
            self.failed(error)
            return told(error)

        return note_and_tell

    def ended(self, reply: Reply) -> None:
        """Notes the whole reply. Its use is settled while its last bytes go to the client."""
        self._num_in_all = reply.usage.prompt_tokens + reply.usage.completion_tokens
        self._admission.ended_one()

    def failed(self, error: PenstockError) -> None:
        """Notes that there is no whole reply. A request that a full queue refused was never sent, unless somebody else
        sends it.
        """
        if isinstance(error, QueueFull) and self._tab is not None and not self._tab.is_shared:
            self._num_in_all = 0

    def count(self, chunk: Chunk) -> None:
        """Counts a chunk."""
        if self._settling is not None and self._tab is not None:
            self._num_come += len(chunk.tokens)
            self._settling.come(self._tab, self._num_come)

    async def settle(self) -> None:
        """Settles the tab. A reply that continues without its reader is left for others to settle."""
        if self._settling is None or self._tab is None:
            return
        if self._num_in_all is None:
            await self._settling.leave(self._tab)
        else:
            await self._settling.close(self._tab, self._num_in_all)


class _CountingWriter:
    def __init__(self, writer: EventWriter, meter: Meter) -> None:
        self._writer = writer
        self._meter = meter

    def chunk(self, chunk: Chunk) -> Iterable[ServerSentEvent | None]:
        self._meter.count(chunk)
        return self._writer.chunk(chunk)

    def end(self, reply: Reply) -> Iterable[ServerSentEvent | None]:
        self._meter.ended(reply)
        return self._writer.end(reply)

    def error(self, error: ApiError) -> Iterable[ServerSentEvent | None]:
        return self._writer.error(error)


class RequestAdmission:
    """Admission of one HTTP request. Without limits it does nothing."""

    def __init__(
        self, key_manager: KeyManager | None = None, limits: KeyLimits | None = None, lease: RequestLease | None = None
    ) -> None:
        self._key_manager = key_manager
        self._limits = limits or KeyLimits()
        self._lease = lease
        self._meters: list[Meter] = []
        self._num_open = 0  # number of meters
        self._tokens: LimitUsage | None = None
        self._finishing: asyncio.Task[None] | None = None

    @property
    def is_limited(self) -> bool:
        return self._lease is not None

    async def meters(self, sent: Sequence[OutgoingRequest], max_model_len: int | None) -> list[Meter]:
        """Opens tabs for all requests that are about to be sent, or for none, and gives each a meter.

        Raises:
            OverLimit: the key would exceed its limit of tokens or of concurrent requests.
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        orders = await self._orders(sent, max_model_len)
        if orders and self._key_manager is not None and self._lease is not None:
            try:
                usage = await self._key_manager.settling.open(
                    self._key_manager.limiter, self._lease, self._limits, orders
                )
            except OverLimit as error:
                self._tokens = error.usage
                raise
            self._tokens = usage
        tabs = {order.tab.request_id: order.tab for order in orders}
        settling = None if self._key_manager is None else self._key_manager.settling
        meters = [Meter(self, settling, tabs.get(each.request_id)) for each in sent]
        self._meters += meters
        self._num_open += len(meters)
        return meters

    async def _orders(self, sent: Sequence[OutgoingRequest], max_model_len: int | None) -> list[Order]:
        """Returns an order for each request that will use something.

        A reply that has ended was already charged to the first caller that asked for it.
        """
        if self._key_manager is None or self._lease is None or not has_tabs(self._limits):
            return []
        key_id, settling = self._lease.key_id, self._key_manager.settling
        orders = [order_for(key_id, each, max_model_len) for each in sent]
        shared = [order.tab for order in orders if order.tab.is_shared]
        have_ended = await asyncio.gather(*(settling.settle_ended(tab) for tab in shared))
        ended = {tab for tab, has_ended in zip(shared, have_ended, strict=True) if has_ended}
        return [order for order in orders if order.tab not in ended]

    def ended_one(self) -> None:
        """Notes that one of the replies is there. The last one releases the lease."""
        self._num_open -= 1
        if not self._num_open:
            self._begin_to_finish()

    def _begin_to_finish(self) -> asyncio.Task[None] | None:
        if self._key_manager is not None and self._finishing is None:
            self._finishing = asyncio.create_task(self._finish(self._key_manager.limiter))
        return self._finishing

    async def _finish(self, limiter: Limiter) -> None:
        releases = [] if self._lease is None else [limiter.release(self._lease)]
        await asyncio.gather(*releases, *(meter.settle() for meter in self._meters))

    async def finish(self) -> None:
        """Releases the lease before the client knows that the answer has ended, so that it may ask again at once. If
        Redis is away, nobody waits for it: leases lapse.
        """
        finishing = self._begin_to_finish()
        if finishing is not None and not finishing.done():
            await asyncio.wait([finishing], timeout=FINISH_TIMEOUT_S)

    @property
    def headers(self) -> Mapping[str, str]:
        """The `x-ratelimit-*` headers, like OpenAI's."""
        requests = None if self._lease is None else self._lease.requests
        return {**headers_of("requests", requests), **headers_of("tokens", self._tokens)}


def headers_of(kind: str, usage: LimitUsage | None) -> Mapping[str, str]:
    if usage is None:
        return {}
    return {
        f"x-ratelimit-limit-{kind}": str(usage.limit),
        f"x-ratelimit-remaining-{kind}": str(usage.remaining),
        f"x-ratelimit-reset-{kind}": f"{usage.reset_ms / 1000:g}s",
    }


def admission_of(connection: HTTPConnection) -> RequestAdmission:
    admission = getattr(connection.state, "admission", None) or RequestAdmission()
    assert isinstance(admission, RequestAdmission)  # noqa: S101  the guard has set it
    return admission


def for_tenant(asked: HTTPConnection, request: GenerateRequest) -> GenerateRequest:
    """Returns the request to queue for a caller: for its key's tenant."""
    isolates = gateway_of(asked).settings.isolate_prefix_cache
    return request.model_copy(update=tenancy(request, caller_of(asked).tenant, isolates=isolates))


async def metered(asked: HTTPConnection, sent: Sequence[OutgoingRequest]) -> list[Meter]:
    """Returns meters for the replies to all that an HTTP request is about to send to one queue.

    Raises:
        OverLimit: the key would exceed its limit of tokens or of concurrent requests.
        ConnectionLost, ServerRefused: Redis is away or refuses.
    """
    gateway, admission = gateway_of(asked), admission_of(asked)
    card = await gateway.directory.card_of(sent[0].queue, may_wait=True) if admission.is_limited else None
    return await admission.meters(sent, None if card is None else card.max_model_len)


def has_tabs(limits: KeyLimits) -> bool:
    """Whether the limits depend on what a request uses, and not only on the number of requests."""
    return not (limits.tokens_per_minute is None and limits.max_concurrent is None)


def order_for(key_id: str, sent: OutgoingRequest, max_model_len: int | None) -> Order:
    """Returns the most that a request may use, before its actual use is known."""
    request = sent.request
    tab = Tab(key_id, sent.queue, sent.request_id, sent.is_shared)
    num_prompt = num_least = _num_prompt_tokens(request)
    num_wanted = request.max_tokens
    is_as_long_as_can_be = max_model_len is not None and num_wanted >= max_model_len
    if max_model_len is not None:
        num_wanted = min(num_wanted, max(0, max_model_len - num_prompt))
    num_least += request.n * (min(num_wanted, 1) if is_as_long_as_can_be else num_wanted)
    return Order(tab, request.n if sent.is_at_once else 0, num_least, num_prompt + request.n * num_wanted)


def _num_prompt_tokens(request: GenerateRequest) -> int:
    """Estimates the prompt's tokens; only a worker knows the number."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    text = request.model_dump_json(include={"prompt", "messages", "tools"}, exclude_defaults=True)
    return len(text.encode()) // BYTES_A_TOKEN
