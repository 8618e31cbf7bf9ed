"""`/v1/models`: https://platform.openai.com/docs/api-reference/models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.gateway.context import gateway_of
from penstock.producer import ModelCard

UNKNOWN_TIME = 0
"""Cards do not say when a model was made."""


async def list_models(asked: Request) -> Response:
    cards = await gateway_of(asked).directory.cards()
    data = [_model(name, queue, cards[queue]) for queue, names in _names(cards).items() for name in names]
    return JSONResponse({"object": "list", "data": data})


async def retrieve_model(asked: Request) -> Response:
    """Returns a model by one of its names."""
    directory = gateway_of(asked).directory
    model: str = asked.path_params["model"]
    queue = await directory.queue_of(model)
    return JSONResponse(_model(model, queue, await directory.card_of(queue)))


def _names(cards: Mapping[str, ModelCard]) -> Mapping[str, Sequence[str]]:
    """Returns, by queue, the names of its model that lead to no other queue, or the queue's own name if none does."""
    times = Counter(name for card in cards.values() for name in {*card.names})
    return {
        queue: [name for name in dict.fromkeys(card.names) if times[name] == 1 and cards.get(name, card) is card]
        or [queue]
        for queue, card in cards.items()
    }


def _model(name: str, queue: str, card: ModelCard) -> dict[str, Any]:
    """Returns a model with vLLM's fields, and its queue."""
    return {
        "id": name,
        "object": "model",
        "created": UNKNOWN_TIME,
        "owned_by": "penstock",
        "root": card.model,
        "parent": None,
        "max_model_len": card.max_model_len,
        "queue": queue,
    }
