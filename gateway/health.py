"""Whether the process is there, and whether it can serve. No key is needed, and nothing is shown that needs one."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.gateway.context import Gateway

READY_WITHIN_S = 2.0
"""Probes wait for little more. Redis may take commands and answer none."""


async def liveness(_: Request) -> Response:
    """Whoever answers is alive."""
    return JSONResponse({"alive": True})


async def readiness(asked: Request) -> Response:
    """Ready is who takes requests, reaches Redis, and is let write there. Without a worker there are answers too: what
    they say is for the client.
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
