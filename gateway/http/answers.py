"""Errors as responses, in the form of the API that was asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from penstock.gateway.errors import ApiError

ErrorForm: TypeAlias = Callable[[ApiError, str], dict[str, Any]]
"""Makes an error's body from the error and the id of the HTTP request."""

ErrorForms: TypeAlias = Mapping[str, ErrorForm]
"""Forms by the path below which they apply, other than OpenAI's. The application has them in its state."""


def error_response(error: ApiError, scope: Scope) -> Response:
    headers = dict(error.headers)
    scope["state"]["error_code"] = error.code or error.type
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    form = _form_of(scope)
    body = error.body() if form is None else form(error, request_id_of(scope))
    return JSONResponse(body, error.status, headers)


def request_id_of(scope: Scope) -> str:
    """Returns the `x-request-id` of the answer."""
    request_id: str = scope["state"]["request_id"]
    return request_id


def _form_of(scope: Scope) -> ErrorForm | None:
    forms: ErrorForms = scope["app"].state.error_forms
    path = scope["path"]
    return next((form for route, form in forms.items() if path == route or path.startswith(f"{route}/")), None)
