"""Which queue serves which model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from penstock.gateway.errors import ApiError
from penstock.producer import AsyncClient, ModelCard

MAX_AGE_S = 2.0


class Directory:
    """The cards of the queues that are served, as they were at most `MAX_AGE_S` ago.

    Args:
        client: of any queue.
        queues: those to serve; empty: all.
    """

    def __init__(self, client: AsyncClient, queues: tuple[str, ...] = ()) -> None:
        self._client = client
        self._only = tuple(sorted(set(queues)))
        self._cards: Mapping[str, ModelCard] = {}
        self._read_at_s: float | None = None
        self._reading = asyncio.Lock()

    async def cards(self) -> Mapping[str, ModelCard]:
        """By queue, in the order of their names.

        Raises:
            ConnectionLost, ServerRefused: Redis is away or says no.
        """
        if not self._is_fresh:
            async with self._reading:
                if not self._is_fresh:
                    self._cards = await self._read()
                    self._read_at_s = time.monotonic()
        return self._cards

    async def queue_of(self, model: str) -> str:
        """The queue that `model` names: its own name, or the model that it alone serves.

        Raises:
            ApiError: there is none (404), or there are several (400).
            ConnectionLost, ServerRefused: Redis is away or says no.
        """
        cards = await self.cards()
        if model in cards:
            return model
        queues = [queue for queue, card in cards.items() if card.model == model]
        if len(queues) == 1:
            return queues[0]
        if queues:
            message = f"model {model[:200]!r} is served by several queues, name one of them: {', '.join(queues)[:500]}"
            raise ApiError(400, message, param="model", code="ambiguous_model")
        message = f"model {model[:200]!r} does not exist; GET /v1/models lists those that are served"
        raise ApiError(404, message, param="model", code="model_not_found")

    @property
    def _is_fresh(self) -> bool:
        return self._read_at_s is not None and time.monotonic() - self._read_at_s < MAX_AGE_S

    async def _read(self) -> Mapping[str, ModelCard]:
        queues = self._only or await self._client.queues()  # whose list a user of some queues may not read
        cards = await asyncio.gather(*(self._client.model_card(queue=queue) for queue in queues))
        return {queue: card for queue, card in zip(queues, cards, strict=True) if card is not None}
