"""Routes of OpenAI's API and of others that are not offered, for which clients get an explanation."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway.errors import ApiError

_SPEAKS = "is not spoken here, but OpenAI's (/v1/chat/completions, /v1/responses) and Anthropic's (/v1/messages)"

UNSERVED: Mapping[str, str] = {
    "/v1/embeddings": "embeddings are not served, answers are text",
    **dict.fromkeys(("/api/chat", "/api/generate", "/api/tags", "/api/show"), f"Ollama's own API {_SPEAKS}"),
    "/v1beta/{rest:path}": f"Gemini's API {_SPEAKS}",
    "/v2/chat": f"Cohere's API {_SPEAKS}",
    "/v1/responses/compact": "no conversation is compacted",
    "/v1/responses/input_tokens": "input is not counted here; POST /v1/count_tokens counts prompts and messages",
}
"""Maps routes to the explanation."""

_METHODS = ("GET", "POST", "DELETE")


async def _refuse(asked: Request) -> Response:
    why = UNSERVED[asked.scope["route"].path]
    raise ApiError(404, f"{asked.method} {asked.scope['path'][:200]}: {why}", code="not_found")


ROUTES = [Route(path, _refuse, methods=_METHODS) for path in UNSERVED]
