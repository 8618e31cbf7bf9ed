"""Whether the process is there, and whether it can serve. No key is needed, and nothing is shown that needs one."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.gateway.context import gateway_of
from penstock.producer import PenstockError


async def liveness(_: Request) -> Response:
    """Whoever answers is alive."""
    return JSONResponse({"alive": True})


async def readiness(asked: Request) -> Response:
    """Ready is who reaches Redis. Without a worker there are answers too: what they say is for the client."""
    try:
        await gateway_of(asked).directory.cards()
    except PenstockError:
        return JSONResponse({"ready": False, "reasons": {"redis": "no connection to Redis"}}, 503)
    return JSONResponse({"ready": True, "reasons": {}})


ROUTES = [
    Route("/liveness", liveness),
    Route("/readiness", readiness),
    Route("/health", readiness),
]
