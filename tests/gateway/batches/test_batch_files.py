"""Files are uploaded, listed, read and deleted with the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from openai.types import FileObject

from penstock.gateway.files.bodies import PIECE_BYTES
from penstock.gateway.files.names import file_name
from penstock.gateway.store import names
from penstock.protocol.redis.connection import RedisClient
from tests.gateway.batches.batches_harness import Asked, asking, jsonl, line
from tests.support.patience import eventually

FORM = {"content-type": "multipart/form-data; boundary=x"}


@pytest.fixture
async def asked(redis: RedisClient, redis_url: str) -> AsyncIterator[Asked]:
    async with asking(redis, redis_url) as asked:
        yield asked


def part(name: str, value: str | bytes, filename: str | None = None) -> bytes:
    more = "" if filename is None else f'; filename="{filename}"'
    content = value if isinstance(value, bytes) else value.encode()
    return f'--x\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"


PURPOSE = part("purpose", "batch")
FILE = part("file", "{}", "a")


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 3 * PIECE_BYTES + 7])
async def test_a_file_comes_back_as_it_was(asked: Asked, size: int) -> None:
    content = bytes(number * 7 % 251 for number in range(size))
    file = await asked.upload(content)
    assert (file.bytes, file.filename, file.purpose, file.status) == (size, "in.jsonl", "batch", "processed")
    assert file.expires_at == file.created_at + 7 * 86_400
    assert await asked.openai.files.retrieve(file.id) == file
    assert (await asked.openai.files.content(file.id)).content == content


async def test_a_deleted_file_is_gone_with_its_bytes(asked: Asked) -> None:
    file = await asked.upload(b"x" * 10)
    assert (await asked.openai.files.delete(file.id)).deleted
    for ask in (asked.openai.files.retrieve, asked.openai.files.content, asked.openai.files.delete):
        with pytest.raises(openai.NotFoundError):
            await ask(file.id)
    assert not (await asked.openai.files.list()).data
    assert not await asked.redis.keys(f"*{file.id}*")
    assert await asked.redis.hget(names.ledger_sizes(), "total") in (None, "0", b"0")


async def test_the_input_of_a_batch_is_deleted_once_the_batch_has_ended(asked: Asked) -> None:
    batch = await asked.create(jsonl([line("a", "wait here")]))
    with pytest.raises(openai.ConflictError, match=f"is the input of {batch.id}"):
        await asked.openai.files.delete(batch.input_file_id)
    await asked.openai.batches.cancel(batch.id)
    await asked.ended(batch)
    await eventually(lambda: _is_free(asked, batch.input_file_id))
    assert (await asked.openai.files.delete(batch.input_file_id)).deleted


async def _is_free(asked: Asked, file_id: str) -> bool:
    return not await asked.redis.exists(names.file_users(file_id))


async def test_files_are_listed_in_pages(asked: Asked) -> None:
    files = [await asked.upload(b"x") for _ in range(3)]
    ids = [file.id for file in files]
    assert [file.id for file in (await asked.openai.files.list()).data] == ids[::-1]
    first = await asked.openai.files.list(limit=2, order="asc")
    assert [file.id for file in first.data] == ids[:2]
    assert [file.id async for file in first] == ids
    assert (await asked.openai.files.list(purpose="batch_output")).data == []
    for query in ("limit=0", "limit=x", "order=up"):
        assert (await asked.http.get(f"/v1/files?{query}")).status_code == 400
    assert (await asked.http.get("/v1/files?after=file-none")).status_code == 404


async def test_a_file_is_kept_for_as_long_as_its_client_says(asked: Asked) -> None:
    file = await asked.upload(b"x", expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    for key in (names.record("file", file.id), names.body(file.id, "uploaded")):
        assert 3600 < await asked.redis.ttl(key) <= 3600 + 600


@pytest.mark.parametrize(
    ("form", "param", "code"),
    [
        (FILE, "purpose", "missing_required_parameter"),
        (PURPOSE, "file", "missing_required_parameter"),
        (part("purpose", "fine-tune") + FILE, "purpose", "unsupported_value"),
        (PURPOSE + FILE + part("other", "1"), "other", "unknown_parameter"),
        (PURPOSE + FILE + part("expires_after[anchor]", "now"), "expires_after.anchor", "invalid_value"),
        (PURPOSE + FILE + part("expires_after[anchor]", "created_at"), "expires_after.seconds", "invalid_value"),
        (
            PURPOSE + FILE + part("expires_after[anchor]", "created_at") + part("expires_after[seconds]", "1"),
            "expires_after.seconds",
            "invalid_value",
        ),
        (PURPOSE + PURPOSE + FILE, None, "invalid_form"),
        (PURPOSE + FILE + FILE, None, "invalid_form"),
        (part("purpose", "b" * 2000) + FILE, None, "invalid_form"),
        (b"".join(part(str(number), "x") for number in range(20)), None, "invalid_form"),
        (b"--x\r\nContent-Disposition: form-data\r\n\r\nx\r\n", None, "invalid_form"),
        (b"--x\r\nX: " + b"y" * 9000 + b"\r\n\r\nx\r\n", None, "invalid_form"),
        (b"nothing", None, "invalid_form"),
    ],
)
async def test_a_form_that_is_none_is_refused_and_nothing_is_left(
    asked: Asked, form: bytes, param: str | None, code: str
) -> None:
    answer = await asked.http.post("/v1/files", content=form + b"--x--\r\n", headers=FORM)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert not await asked.redis.keys("penstock:gateway:{file-*")


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", ""])
async def test_a_body_of_another_type_is_refused(asked: Asked, kind: str) -> None:
    answer = await asked.http.post("/v1/files", content=b"{}", headers={"content-type": kind})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")


NAMES = {
    "../../etc/passwd": "passwd",
    "C:\\Users\\me\\in.jsonl": "in.jsonl",
    "a/": "file",
    "..": "file",
    ". .": "file",
    "": "file",
    ".hidden": "hidden",
    "in\tput\x7f\x85.jsonl": "input.jsonl",
    "a\u202elnosj.exe": "alnosj.exe",  # it would be shown from right to left
    "a\u2066\u2028\ufeff\u200eb": "ab",
    "\u0645\u06cc\u200c\u062e.jsonl": "\u0645\u06cc\u200c\u062e.jsonl",  # a joiner that Persian is spelled with
    "naïve 文件.jsonl": "naïve 文件.jsonl",
    "x" * 300: "x" * 255,
    "文" * 100: "文" * 85,  # three bytes each
    "x" * 254 + ". b": "x" * 254,
}


@pytest.mark.parametrize(("sent", "kept"), NAMES.items())
def test_a_name_is_one_that_any_system_can_take(sent: str, kept: str) -> None:
    assert file_name(sent) == kept


async def test_a_file_keeps_no_path_and_no_controls_in_its_name(asked: Asked) -> None:
    form = PURPOSE + part("file", "{}", "../a/\u202eb\tc.jsonl") + b"--x--\r\n"
    answer = await asked.http.post("/v1/files", content=form, headers=FORM)
    assert (answer.status_code, answer.json()["filename"]) == (200, "bc.jsonl")


async def test_a_form_that_ends_too_early_is_refused(asked: Asked) -> None:
    answer = await asked.http.post("/v1/files", content=PURPOSE + FILE, headers=FORM)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")


async def test_a_file_over_the_limit_is_refused_as_it_comes(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url, max_file_bytes=PIECE_BYTES + 10) as asked:
        assert (await asked.upload(b"x" * (PIECE_BYTES + 10))).bytes == PIECE_BYTES + 10
        with pytest.raises(openai.APIStatusError, match="over the limit") as caught:
            await asked.upload(b"x" * (PIECE_BYTES + 11))
        assert (caught.value.status_code, caught.value.code) == (413, "too_large")
        assert len((await asked.openai.files.list()).data) == 1


async def test_what_is_more_than_the_store_may_keep_is_refused(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url, max_store_bytes=4 * PIECE_BYTES) as asked:
        file = await asked.upload(b"x" * 3 * PIECE_BYTES)
        with pytest.raises(openai.InternalServerError) as caught:
            await asked.upload(b"x" * 2 * PIECE_BYTES)
        assert (caught.value.status_code, caught.value.code) == (507, "store_full")
        await asked.openai.files.delete(file.id)
        assert (await asked.upload(b"x" * 2 * PIECE_BYTES)).bytes == 2 * PIECE_BYTES


async def test_an_upload_that_breaks_off_leaves_nothing(asked: Asked) -> None:
    async def content() -> AsyncIterator[bytes]:
        yield PURPOSE + part("file", b"x" * 2 * PIECE_BYTES, "a")[:-2]
        await eventually(lambda: asked.redis.keys("penstock:gateway:{file-*"))
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await asked.http.post("/v1/files", content=content(), headers=FORM)
    await eventually(lambda: _is_empty(asked))


async def _is_empty(asked: Asked) -> bool:
    return not await asked.redis.keys("penstock:gateway:{file-*")


async def test_any_gateway_has_a_file(asked: Asked, redis: RedisClient, redis_url: str) -> None:
    file = await asked.upload(b"there")
    async with Asked.beside(None, redis, redis_url) as other:
        found: Any = await other.openai.files.retrieve(file.id)
        assert FileObject.model_validate(found) == file
        assert (await other.openai.files.content(file.id)).text == "there"
        assert isinstance(other.http, httpx2.AsyncClient)
