"""Liveness and readiness of the process. They need no key, and show nothing that needs one."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.gateway.context import Gateway

READY_WITHIN_S = 2.0
"""Probes wait little longer. Redis may accept commands and answer none."""


async def liveness(_: Request) -> Response:
    """Answers: a process that does is alive."""
    return JSONResponse({"alive": True})


async def readiness(asked: Request) -> Response:
    """Reports ready if the process takes requests, reaches Redis, and may write there. Without a worker it can still
    answer: that error is for the client.
    """
    gateway: Gateway | None = getattr(asked.app.state, "gateway", None)
    if gateway is None or asked.app.state.is_draining:
        return _unready("starting" if gateway is None else "draining", "gateway")
    standing = gateway.standing
    try:
        async with asyncio.timeout(READY_WITHIN_S):
            await standing.check()
    except TimeoutError:
        return _unready("no connection to Redis")
    reason = next(iter(standing.reasons.values()), None)
    return JSONResponse({"ready": True, "reasons": {}}) if reason is None else _unready(reason)


def _unready(reason: str, part: str = "redis") -> Response:
    return JSONResponse({"ready": False, "reasons": {part: reason}}, 503)


ROUTES = [
    Route("/liveness", liveness),
    Route("/readiness", readiness),
    Route("/health", readiness),
]
