"""Routes of Anthropic's API. Errors below `PATH` are in its form."""

from __future__ import annotations

from starlette.routing import Route

from penstock.gateway.anthropic.messages import count_tokens, create_message

PATH = "/v1/messages"

ROUTES = [
    Route(PATH, create_message, methods=["POST"]),
    Route(f"{PATH}/count_tokens", count_tokens, methods=["POST"]),
]
