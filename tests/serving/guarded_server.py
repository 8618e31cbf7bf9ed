"""A guarded server with an application of the test's own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from penstock.serving.http.guard import GuardedServer, PortLimits

FOREVER_S = 1000.0


@asynccontextmanager
async def guarded(
    app: Any, bounds: PortLimits, *, log_level: str = "error"
) -> AsyncIterator[tuple[GuardedServer, int]]:
    """Runs a guarded server; gives it and its port on 127.0.0.1.

    Answers that are under way when the block ends have some seconds to end.
    """
    server = GuardedServer(
        app, bounds, log_config=None, log_level=log_level, lifespan="off", timeout_graceful_shutdown=5
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield server, listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


def limits(max_connections: int = 8, **others: Any) -> PortLimits:
    """Makes limits; times that are not given last for ever."""
    forever = {"header_timeout_s": FOREVER_S, "body_timeout_s": FOREVER_S, "idle_timeout_s": FOREVER_S}
    return PortLimits(max_connections=max_connections, **{**forever, **others})
