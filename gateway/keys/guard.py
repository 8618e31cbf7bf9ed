"""What stands before every handler: who asks, and what may end the answer."""

from __future__ import annotations

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.gateway.context import gateway_of


class KeyGuard:
    """Opens the interruption of each request (`interruption_of`)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        with gateway_of(connection).interruptions.opened() as interruption:
            connection.state.interruption = interruption
            await self._app(scope, receive, send)
