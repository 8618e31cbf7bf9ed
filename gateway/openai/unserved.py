"""Routes of OpenAI's API that are not offered, for which clients get an explanation."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway.errors import ApiError

UNSERVED: Mapping[str, str] = {
    "/v1/embeddings": "embeddings are not served, answers are text",
    "/v1/responses/compact": "no conversation is compacted",
    "/v1/responses/input_tokens": "input is not counted here; POST /v1/count_tokens counts prompts and messages",
}
"""Maps routes to the explanation."""

_METHODS = ("GET", "POST", "DELETE")


async def _refuse(asked: Request) -> Response:
    path = asked.scope["path"]
    raise ApiError(404, f"{asked.method} {path}: {UNSERVED[path]}", code="not_found")


ROUTES = [Route(path, _refuse, methods=_METHODS) for path in UNSERVED]
