"""`/v1/models`: https://platform.openai.com/docs/api-reference/models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.gateway.context import gateway_of
from penstock.producer import ModelCard

UNKNOWN_TIME = 0
"""Cards do not say when a model was made."""


async def list_models(asked: Request) -> Response:
    cards = await gateway_of(asked).directory.cards()
    names = _names(cards)
    return JSONResponse({"object": "list", "data": [_model(names[queue], queue, cards[queue]) for queue in cards]})


async def retrieve_model(asked: Request) -> Response:
    """Returns a model by either of its names."""
    directory = gateway_of(asked).directory
    model: str = asked.path_params["model"]
    queue = await directory.queue_of(model)
    return JSONResponse(_model(model, queue, await directory.card_of(queue)))


def _names(cards: Mapping[str, ModelCard]) -> Mapping[str, str]:
    """Returns a name for each queue's model: its own, if that leads only to this queue."""
    times = Counter(card.model for card in cards.values())
    return {
        queue: card.model if times[card.model] == 1 and card.model not in cards else queue
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
