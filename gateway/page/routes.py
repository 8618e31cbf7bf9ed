"""Serves the files of both pages. They are the same for everybody: the key is required by the API that they call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_log = structlog.get_logger(__name__)

_FOLDER = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".mjs": "text/javascript"}
_FILES: Mapping[str, str] = {
    "/": "index.html",
    "/page/style.css": "style.css",
    "/page/chat.mjs": "chat.mjs",
    "/page/elements.mjs": "elements.mjs",
    "/page/history.mjs": "history.mjs",
    "/page/markdown.mjs": "markdown.mjs",
    "/page/messages.mjs": "messages.mjs",
    "/page/requests.mjs": "requests.mjs",
    "/operations": "operations.html",
    "/page/operations.mjs": "operations.mjs",
    "/page/tables.mjs": "tables.mjs",
    "/page/docs.css": "docs.css",
}
PATHS = frozenset(_FILES)
MADE_PATHS = frozenset({"/docs", "/openapi.json"})
"""Paths whose answers `openapi/` makes. They are the same for everybody, too."""

HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes() -> list[Route]:
    """Returns the routes, whose files are read once. If one is missing there is no page, and the API works without."""
    try:
        return [_route(path, _FOLDER / name) for path, name in _FILES.items()]
    except OSError as error:
        _log.warning("no_page", why=str(error))
        return []


def _route(path: str, file: Path) -> Route:
    content, media_type = file.read_bytes(), _TYPES[file.suffix]

    async def answer(_: Request) -> Response:
        return Response(content, headers=dict(HEADERS), media_type=media_type)

    return Route(path, answer, methods=["GET"])
