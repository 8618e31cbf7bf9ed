"""Whether the process is there, and whether it can serve. No key is needed, and nothing is shown that needs one."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.gateway.context import gateway_of
from penstock.producer import PenstockError

READY_WITHIN_S = 2.0
"""Probes wait for little more. Redis may take commands and answer none."""


async def liveness(_: Request) -> Response:
    """Whoever answers is alive."""
    return JSONResponse({"alive": True})


async def readiness(asked: Request) -> Response:
    """Ready is who reaches Redis. Without a worker there are answers too: what they say is for the client."""
    try:
        async with asyncio.timeout(READY_WITHIN_S):
            await gateway_of(asked).directory.cards()
    except (PenstockError, TimeoutError):
        return JSONResponse({"ready": False, "reasons": {"redis": "no connection to Redis"}}, 503)
    return JSONResponse({"ready": True, "reasons": {}})


ROUTES = [
    Route("/liveness", liveness),
    Route("/readiness", readiness),
    Route("/health", readiness),
]
