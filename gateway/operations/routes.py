"""The routes below `/operations/`. Each requires an admin key in a header, even if no other API keys exist.

A browser sends this header only if our own page tells it to, so another site's page can't use the key of its visitor:
there is no cookie, and nothing in a URL identifies the caller. Requests from other sites' pages are refused anyway,
whatever `cors_origins` says.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.gateway.context import Caller, caller_of
from penstock.gateway.errors import RETRY_AFTER_S, ApiError, invalid_value
from penstock.gateway.http.body import read_json
from penstock.gateway.operations.queue_admin import QueueAdmin
from penstock.protocol.wire import ID_PATTERN

PREFIX = "/operations/"
MAX_BODY_BYTES = 4096
_PRIVATE = {"cache-control": "no-store"}

_log = structlog.get_logger(__name__)

_Name = Annotated[str, Field(pattern=f"^{ID_PATTERN.pattern}$")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DrainBody(_Body):
    """The worker to drain."""

    worker: _Name


class CancelBody(_Body):
    """The request to cancel. An id is a secret, so it is never in a URL."""

    id: _Name


class ReplayBody(_Body):
    """The dead letter to replay."""

    letter: Annotated[str, Field(pattern=r"^\d{1,20}-\d{1,20}$")]


B = TypeVar("B", bound=_Body)


async def list_queues(asked: Request) -> Response:
    caller = _operator(asked)
    names = [name for name in await _admin_of(asked).queues() if _may_see(caller, name)]
    return JSONResponse({"queues": names}, headers=_PRIVATE)


async def show_queue(asked: Request) -> Response:
    _, queue = _operator_of_queue(asked)
    snapshot = await _admin_of(asked).look(queue)
    return JSONResponse(snapshot.to_document(), headers=_PRIVATE)


async def drain(asked: Request) -> Response:
    caller, queue = _operator_of_queue(asked)
    body = await _read(asked, DrainBody)
    async with _audited(caller, queue, "drain", body.worker):
        await _admin_of(asked).drain(queue, body.worker)
    return _done("drain", body.worker)


async def cancel(asked: Request) -> Response:
    caller, queue = _operator_of_queue(asked)
    body = await _read(asked, CancelBody)
    async with _audited(caller, queue, "cancel", body.id):
        await _admin_of(asked).cancel(queue, body.id)
    return _done("cancel", body.id)


async def replay(asked: Request) -> Response:
    caller, queue = _operator_of_queue(asked)
    body = await _read(asked, ReplayBody)
    async with _audited(caller, queue, "replay", body.letter):
        new_id = await _admin_of(asked).replay(queue, body.letter)
    return _done("replay", body.letter, new_id)


@asynccontextmanager
async def _audited(caller: Caller, queue: str, deed: str, target: str) -> AsyncIterator[None]:
    """Logs an action before it is done, and again if it is not done.

    Raises:
        ApiError: the log accepts no line (503); nothing may be done then.
    """
    said = {"key": caller.key_id, "queue": queue, "deed": deed, "target": target}
    if _log.info("operator_action", **said) is False:
        message = "the gateway's log takes no lines, and without one nothing is done for operators"
        raise ApiError(503, message, type="server_error", code="log_unavailable", retry_after_s=RETRY_AFTER_S)
    try:
        yield
    except Exception as error:
        _log.info("operator_action_failed", **said, error=str(error)[:200])
        raise


def _done(deed: str, target: str, new_id: str | None = None) -> Response:
    return JSONResponse({"done": deed, "target": target, "new_id": new_id}, headers=_PRIVATE)


def _operator(asked: Request) -> Caller:
    """Returns the operator who calls.

    Raises:
        ApiError: another site's page asks (403), there is no key (401), or it is not an admin key (403).
    """
    site = asked.headers.get("sec-fetch-site", "none")
    if site not in ("same-origin", "none"):
        message = f"pages of other sites may not look after queues (Sec-Fetch-Site: {site[:40]})"
        raise ApiError(403, message, type="permission_error", code="other_site")
    caller = caller_of(asked)
    if caller.key_id is None:
        message = "an admin key is needed: `penstock keys create --admin` makes one"
        raise ApiError(401, message, type="authentication_error", code="invalid_api_key")
    if not caller.is_admin:
        message = f"API key {caller.key_id} is not an admin key: `penstock keys create --admin` makes one"
        raise ApiError(403, message, type="permission_error", code="admin_key_required")
    return caller


def _operator_of_queue(asked: Request) -> tuple[Caller, str]:
    """Returns the operator and the queue. Raises as `_operator`, and if the key is not for this queue or the gateway
    does not serve it (404).
    """
    caller, queue = _operator(asked), asked.path_params["queue"]
    if not (_may_see(caller, queue) and ID_PATTERN.fullmatch(queue) and _admin_of(asked).serves(queue)):
        raise ApiError(404, f"there is no queue {queue[:128]!r} here", code="not_found")
    return caller, queue


def _may_see(caller: Caller, queue: str) -> bool:
    return caller.models is None or queue in caller.models


async def _read(asked: Request, kind: type[B]) -> B:
    try:
        return kind.model_validate(await read_json(asked, MAX_BODY_BYTES))
    except ValidationError as error:
        raise invalid_value(error) from None


def _admin_of(asked: Request) -> QueueAdmin:
    admin = asked.app.state.queue_admin
    assert isinstance(admin, QueueAdmin)  # noqa: S101  the application's lifespan has set it
    return admin


_QUEUE = f"{PREFIX}queues/{{queue}}"
ROUTES = [
    Route(f"{PREFIX}queues", list_queues, methods=["GET"]),
    Route(_QUEUE, show_queue, methods=["GET"]),
    Route(f"{_QUEUE}/drain", drain, methods=["POST"]),
    Route(f"{_QUEUE}/cancel", cancel, methods=["POST"]),
    Route(f"{_QUEUE}/replay", replay, methods=["POST"]),
]
