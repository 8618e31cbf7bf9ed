"""Pages of lists in OpenAI's API: their query parameters and their form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from penstock.gateway.errors import ApiError


def is_ascending(asked: Request) -> bool:
    """Returns whether `order` is ascending; by default the newest come first."""
    order = asked.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order: must be asc or desc, not {order[:80]!r}", param="order", code="invalid_value")
    return order == "asc"


def limit_of(asked: Request, *, default: int, largest: int) -> int:
    """Returns `limit`."""
    return number_of(asked, "limit", default=default, smallest=1, largest=largest)


def number_of(asked: Request, name: str, *, default: int, smallest: int, largest: int) -> int:
    """Returns a number from the query; `default` if it is left out.

    Raises:
        ApiError: it is not a number within the bounds.
    """
    text = asked.query_params.get(name)
    if text is None:
        return default
    if text.isascii() and text.isdigit() and len(text) < 20 and smallest <= int(text) <= largest:
        return int(text)
    message = f"{name}: must be a number from {smallest} to {largest}, not {text[:80]!r}"
    raise ApiError(400, message, param=name, code="invalid_value")


def start_of(asked: Request, ids: Sequence[str], what: str = "") -> int:
    """Returns the index in `ids` where the page begins: after the element `after`. `what` names them in messages.

    Raises:
        ApiError: it is not there (404).
    """
    after = asked.query_params.get("after")
    if after is None:
        return 0
    if after not in ids:
        raise ApiError(404, f"after: {what}{after[:200]!r} is not there", param="after", code="not_found")
    return ids.index(after) + 1


def page(documents: Sequence[dict[str, Any]], *, has_more: bool, nothing: str | None = None) -> dict[str, Any]:
    """Returns a page. An empty page has `nothing` for ids."""
    return {
        "object": "list",
        "data": documents,
        "first_id": documents[0]["id"] if documents else nothing,
        "last_id": documents[-1]["id"] if documents else nothing,
        "has_more": has_more,
    }
