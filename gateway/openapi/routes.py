"""`/openapi.json`, and `/docs`, which is one of the pages. They are the same for everybody, and need no key."""

from __future__ import annotations

from functools import cache

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.gateway.openapi.document import openapi
from penstock.gateway.openapi.page import page
from penstock.gateway.page.routes import HEADERS


async def _document(_: Request) -> Response:
    return JSONResponse(openapi())


async def _page(_: Request) -> Response:
    return Response(_made(), headers=dict(HEADERS), media_type="text/html")


@cache
def _made() -> str:
    return page(openapi())


ROUTES = [Route("/openapi.json", _document, methods=["GET"])]
PAGE_ROUTES = [Route("/docs", _page, methods=["GET"])]
