"""Directory of queues and the models that they serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from copy import copy

from penstock.gateway.damage import tell
from penstock.gateway.errors import RETRY_AFTER_S, ApiError
from penstock.gateway.metrics import FORGET_AFTER_S
from penstock.producer import AsyncClient, ModelCard, ServerRefused
from penstock.producer.aio import connections_of
from penstock.protocol import keys
from penstock.protocol.tasks import Joined

MAX_AGE_S = 2.0

MAX_KNOWN = 1024
"""Number of queues whose last card is kept."""


class Directory:
    """The cards of the queues that are served, at most `MAX_AGE_S` old. No request is refused because of an old card.

    Args:
        client: a client of any queue.
        queues: those to serve; empty: all.
    """

    def __init__(self, client: AsyncClient, queues: tuple[str, ...] = ()) -> None:
        self._served = _ServedCards(client, tuple(sorted(set(queues))))
        self._allowed: frozenset[str] | None = None

    def limited_to(self, allowed: frozenset[str] | None) -> Directory:
        """Returns the directory of a caller who may use these models and queues; None: all of them."""
        limited = copy(self)
        vars(limited).update(_allowed=allowed)
        return limited

    async def cards(self) -> Mapping[str, ModelCard]:
        """Returns cards by queue, in the order of the queues' names.

        Raises:
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        served = await self._served.cards()
        return self._allowed_of(served)

    async def standing(self) -> Mapping[tuple[str, str], bool]:
        """Returns, for each queue and its model ("": not known), whether it is served now. Queues are included if they
        are configured, have requests, or were served or asked for within `FORGET_AFTER_S`.

        Raises:
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        served = await self._served.cards()
        remembered, models = await self._served.remembered(), self._served.models()
        return {(queue, models.get(queue, "")): queue in served for queue in remembered}

    def model_of(self, queue: str) -> str:
        """Returns the model that the queue served last, as far as known."""
        return self._served.models().get(queue, "")

    def last_card_of(self, queue: str) -> ModelCard | None:
        """Returns the card that the queue had last, as far as known."""
        return self._served.known.get(queue)

    async def queue_of(self, model: str, *, may_wait: bool = False) -> str:
        """Returns the queue that `model` names: a queue's own name, or a model that only it serves.

        Args:
            model: the client's name for it.
            may_wait: whether to accept a queue that was served since this process began, but is not now.

        Raises:
            ApiError: the caller may use none (404), it is no longer served or nothing is served yet (503), or several
                match (400).
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        asked_s = time.monotonic()
        served = await self._served.cards()
        if not (queues := list(_named(model, self._allowed_of(served)))):  # a worker may have joined since
            served = await self._served.cards(asked_s)
            queues = list(_named(model, self._allowed_of(served)))
        known = [] if queues else list(_named(model, self._allowed_of(self._served.known)))
        if may_wait and not queues:
            queues = known
        if len(queues) == 1:
            return queues[0]
        if queues:
            message = f"model {model[:200]!r} is served by several queues, name one of them: {', '.join(queues)[:500]}"
            raise ApiError(400, message, param="model", code="ambiguous_model")
        self._served.note(known)
        if known or self._is_to_be_served(model) or not served:  # workers may still be loading
            raise _unserved(model)
        # A model that the caller may not use counts as missing: nobody learns what others are served.
        message = f"model {model[:200]!r} does not exist; GET /v1/models lists those that are served"
        raise ApiError(404, message, param="model", code="model_not_found")

    async def card_of(self, queue: str, *, may_wait: bool = False) -> ModelCard:
        """Returns the card of a queue from `queue_of`; with `may_wait` the last one, if nobody serves it any more.

        Raises:
            ApiError: nobody serves it any more (503).
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        asked_s = time.monotonic()
        card = (await self._served.cards()).get(queue) or (await self._served.cards(asked_s)).get(queue)
        if card is None and may_wait:
            card = self.last_card_of(queue)
        if card is None:
            raise _unserved(queue)
        return card

    def _allowed_of(self, cards: Mapping[str, ModelCard]) -> Mapping[str, ModelCard]:
        """Returns the cards that the caller may use."""
        if self._allowed is None:
            return cards
        return {queue: card for queue, card in cards.items() if self._allowed & {queue, *card.names}}

    def _is_to_be_served(self, queue: str) -> bool:
        return queue in self._served.only and (self._allowed is None or queue in self._allowed)


def _named(model: str, cards: Mapping[str, ModelCard]) -> Mapping[str, ModelCard]:
    """Returns the card of the queue with this name, or else those of the queues that serve the model."""
    if model in cards:
        return {model: cards[model]}
    return {queue: card for queue, card in cards.items() if model in card.names}


class _ServedCards:
    """Data shared by all callers' directories."""

    def __init__(self, client: AsyncClient, only: tuple[str, ...]) -> None:
        self._client = client
        self.only = only
        self._cards: Mapping[str, ModelCard] = {}
        self.known: dict[str, ModelCard] = {}
        """The last cards of queues that were served here."""
        self._wanted_s: dict[str, float] = {}  # when somebody last served a queue, or asked for one that nobody serves
        self._read_at_s: float | None = None  # when the read began
        self._reading = Joined(self._renew)  # shared: alone, each caller would wait for all earlier failures

    async def cards(self, since_s: float | None = None) -> Mapping[str, ModelCard]:
        """Returns the cards as a read found them that began at `since_s` or later; by default, `MAX_AGE_S` ago.

        Callers at the same time share one read, so that requests for what nobody serves put a bounded load on Redis.
        """
        least_s = time.monotonic() - MAX_AGE_S if since_s is None else since_s
        while self._read_at_s is None or self._read_at_s < least_s:
            await self._reading.run()
        return self._cards

    async def _renew(self) -> None:
        begun_s = time.monotonic()
        self._cards = await self._read()
        for queue, card in self._cards.items():
            self.known.pop(queue, None)  # keeps the last served one at the end
            self.known[queue] = card
        for queue in list(self.known)[:-MAX_KNOWN]:
            del self.known[queue]
            self._wanted_s.pop(queue, None)
        self.note(self._cards)
        self._read_at_s = begun_s

    def note(self, queues: Iterable[str]) -> None:
        """Notes that somebody serves these queues, or would like them served."""
        self._wanted_s.update(dict.fromkeys(queues, time.monotonic()))

    async def remembered(self) -> Sequence[str]:
        """Returns the configured queues, and those used within `FORGET_AFTER_S`."""
        old_s = time.monotonic() - FORGET_AFTER_S
        old = [queue for queue, at_s in self._wanted_s.items() if at_s <= old_s]
        for queue, has_requests in zip(old, await asyncio.gather(*map(self._has_requests, old)), strict=True):
            if not has_requests:
                self._wanted_s.pop(queue, None)
        return (*self.only, *(queue for queue in self._wanted_s if queue not in self.only))

    async def _has_requests(self, queue: str) -> bool:
        connections = connections_of(self._client)
        try:
            async with connections.redis() as redis:
                return bool(await redis.xlen(keys.requests(queue)))
        except ServerRefused as error:
            if not error.is_junk:
                raise
            return True

    def models(self) -> Mapping[str, str]:
        """Returns the last model of each configured queue and each queue served here; empty if there was none."""
        return dict.fromkeys(self.only, "") | {queue: card.model for queue, card in self.known.items()}

    async def _read(self) -> Mapping[str, ModelCard]:
        queues = self.only or await self._client.queues()  # a user of some queues may not read the list
        cards = await asyncio.gather(*map(self._card, queues))
        return {queue: card for queue, card in zip(queues, cards, strict=True) if card is not None}

    async def _card(self, queue: str) -> ModelCard | None:
        """Returns the card; None: nobody serves the queue, as far as can be read. A damaged card is rewritten by its
        workers.
        """
        try:
            return await self._client.model_card(queue=queue)
        except ServerRefused as error:
            if not error.is_junk:
                raise
            tell(keys.card(queue))
            return None


def _unserved(model: str) -> ApiError:
    message = f"no worker serves model {model[:200]!r} now"
    return ApiError(503, message, type="server_error", param="model", code="no_worker", retry_after_s=RETRY_AFTER_S)
