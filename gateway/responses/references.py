"""References to items of stored responses, which clients send instead of the items."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request

from penstock.gateway.common.documents import Document
from penstock.gateway.context import caller_of, gateway_of
from penstock.gateway.errors import ApiError
from penstock.gateway.responses.reading import snapshot
from penstock.gateway.responses.stored import PREFIX, ResponseStore

_ITEM_ID = re.compile(r"[a-z]+_(.+)_(in)?[0-9]+")
"""An item's id has the request's id in it."""


async def resolved(asked: Request, value: Any) -> Any:
    """Returns `input` with each reference replaced by its item.

    Raises:
        ApiError: the caller has no such item (404).
    """
    if not isinstance(value, list):
        return value
    known: dict[str, list[Document]] = {}  # items by response
    return [
        await _item(asked, f"input[{place}]", str(each.get("id")), known) if _is_reference(each) else each
        for place, each in enumerate(value)
    ]


def _is_reference(value: object) -> bool:
    return isinstance(value, dict) and value.get("type") == "item_reference"


async def _item(asked: Request, place: str, item_id: str, known: dict[str, list[Document]]) -> Document:
    match = _ITEM_ID.fullmatch(item_id)
    if match is None:
        raise _not_found(place, item_id)
    response_id = PREFIX + match[1]
    if response_id not in known:
        store = ResponseStore(gateway_of(asked).records)
        response = await store.read(response_id, caller_of(asked), param=f"{place}.id")
        known[response_id] = [*response.items, *(await snapshot(asked, response))["output"]]
    found = next((item for item in known[response_id] if item["id"] == item_id), None)
    if found is None:
        raise _not_found(place, item_id)
    return {name: each for name, each in found.items() if name != "status"}


def _not_found(place: str, item_id: str) -> ApiError:
    message = f"{place}.id: item {item_id[:200]!r} is not there, or its response is not stored"
    return ApiError(404, message, param=f"{place}.id", code="not_found")
