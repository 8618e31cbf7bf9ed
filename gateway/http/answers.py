"""Errors as responses."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from penstock.gateway.errors import ApiError


def error_response(error: ApiError) -> Response:
    headers = dict(error.headers)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)
