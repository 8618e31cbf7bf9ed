"""`/v1/files`: https://platform.openai.com/docs/api-reference/files."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from penstock.gateway.context import caller_of, gateway_of
from penstock.gateway.errors import ApiError
from penstock.gateway.files.bodies import UPLOADED, Upload
from penstock.gateway.files.form import Form, read_form, seconds_of
from penstock.gateway.files.stored import GRACE_S, KIND, PREFIX, FileStore, StoredFile, restored
from penstock.gateway.http.interruptions import interruption_of
from penstock.gateway.http.paging import is_ascending, limit_of, page, start_of
from penstock.gateway.store.records import name_of

MAX_LISTED = 10_000
_PURPOSES = ("batch",)
_KNOWN = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}


async def create_file(asked: Request) -> Response:
    gateway = gateway_of(asked)
    file_id = PREFIX + secrets.token_hex(16)
    max_bytes = gateway.settings.max_file_bytes
    charged_to = name_of(KIND, file_id)
    upload = Upload(gateway.store, gateway.ledger, home=file_id, charged_to=charged_to, max_bytes=max_bytes)
    try:
        form = await read_form(asked, upload)
        ttl_s = _checked(form, gateway.settings.keep_files_s)
        await upload.close(ttl_s + GRACE_S)
        file = await _files(asked).create(_described(asked, file_id, form, upload.num_bytes, ttl_s))
    except BaseException:
        await upload.drop()
        raise
    return JSONResponse(file.document())


async def list_files(asked: Request) -> Response:
    """Lists files. To filter by purpose it reads as many as needed."""
    files, owner = _files(asked), caller_of(asked).owner
    purpose = asked.query_params.get("purpose")
    limit = limit_of(asked, default=MAX_LISTED, largest=MAX_LISTED)
    ids = await files.listing.ids(owner)
    ids = ids if is_ascending(asked) else ids[::-1]
    found = map(restored, await files.listing.read(owner, ids[start_of(asked, ids) :]))
    documents = [file.document() for file in found if file is not None and purpose in (None, file.purpose)]
    return JSONResponse(page(documents[:limit], has_more=len(documents) > limit))


async def retrieve_file(asked: Request) -> Response:
    return JSONResponse((await _asked_for(asked)).document())


async def read_content(asked: Request) -> Response:
    file = await _asked_for(asked)
    headers = {"content-length": str(file.num_bytes), "x-content-type-options": "nosniff"}
    content = _content(asked, file)
    first = await anext(content, b"")  # an error before it has its own status
    return StreamingResponse(_following(first, content), media_type="application/octet-stream", headers=headers)


async def delete_file(asked: Request) -> Response:
    file = await _asked_for(asked)
    await _files(asked).delete(file)
    return JSONResponse({"id": file.id, "object": "file", "deleted": True})


async def _content(asked: Request, file: StoredFile) -> AsyncIterator[bytes]:
    """Yields the content. An interruption cuts it short, which the client notices by the length."""
    interruption = interruption_of(asked)
    async for data in _files(asked).pieces(file):
        if interruption.error is not None:
            raise interruption.error
        yield data


async def _following(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for data in rest:
        yield data


def _files(asked: Request) -> FileStore:
    gateway = gateway_of(asked)
    return FileStore(gateway.store, gateway.records)


async def _asked_for(asked: Request) -> StoredFile:
    return await _files(asked).read(asked.path_params["file_id"], caller_of(asked))


def _checked(form: Form, default_s: int) -> int:
    """Returns how long to keep the file.

    Raises:
        ApiError: the form lacks something, or has an impossible value.
    """
    for name in form.fields.keys() - _KNOWN:
        raise ApiError(400, f"unknown field {name[:80]!r}", param=name[:80], code="unknown_parameter")
    if form.filename is None:
        raise ApiError(400, "file: is missing", param="file", code="missing_required_parameter")
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise ApiError(400, "purpose: is missing", param="purpose", code="missing_required_parameter")
    if purpose not in _PURPOSES:
        message = f"purpose: must be one of {', '.join(_PURPOSES)}, not {purpose[:80]!r}"
        raise ApiError(400, message, param="purpose", code="unsupported_value")
    return seconds_of(form.fields) or default_s


def _described(asked: Request, file_id: str, form: Form, num_bytes: int, ttl_s: int) -> StoredFile:
    return StoredFile(
        id=file_id,
        owner=caller_of(asked).owner,
        filename=form.filename or "",
        purpose=form.fields["purpose"],
        num_bytes=num_bytes,
        ttl_s=ttl_s,
        home=file_id,
        body=UPLOADED,
    )
