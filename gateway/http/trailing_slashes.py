"""Serves paths of the APIs with a slash at their end as those without."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

PREFIX = "/v1/"


class TrailingSlashes:
    """Takes the slash off, as programs add one when they join addresses. A redirect would turn a POST into a GET.

    Args:
        app: the application that it wraps.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(PREFIX):
            scope["path"] = scope["path"].rstrip("/")
        await self._app(scope, receive, send)
