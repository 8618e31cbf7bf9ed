"""Bounds on what is read of a body, and on what all bodies together take."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request

from penstock.gateway.errors import ApiError
from penstock.gateway.http.body import SMALL_BYTES, BodyBudget, read_body, read_json
from tests.support.patience import eventually

MAX_BYTES = 4 * SMALL_BYTES


class Sender:
    """Sends a body part by part, each when it may."""

    def __init__(self, parts: Iterable[bytes], *, is_held: bool = False) -> None:
        self._parts = [*parts]
        self.may_end = asyncio.Event()
        if not is_held:
            self.may_end.set()
        self.num_sent = 0

    async def receive(self) -> dict[str, Any]:
        if self._parts:
            self.num_sent += 1
            return {"type": "http.request", "body": self._parts.pop(0), "more_body": True}
        await self.may_end.wait()
        return {"type": "http.request", "body": b"", "more_body": False}


def request(sender: Sender, budget: BodyBudget | None = None, *headers: tuple[bytes, bytes]) -> Request:
    app = Starlette()
    app.state.bodies = budget or BodyBudget(MAX_BYTES)
    return Request({"type": "http", "method": "POST", "headers": [*headers], "app": app}, sender.receive)


async def parsed(body: bytes) -> dict[str, Any]:
    return await read_json(request(Sender([body])), MAX_BYTES)


async def test_an_object_is_read_from_its_parts() -> None:
    sender = Sender([b'{"a"', b": [1, ", b'"\xc3\xbc"]}'])
    assert await read_json(request(sender), MAX_BYTES) == {"a": [1, "ü"]}


@pytest.mark.parametrize("num_fields", [1, SMALL_BYTES // 4])
async def test_small_and_large_ones_are_parsed_alike(num_fields: int) -> None:
    value = {f"{number}": number for number in range(num_fields)}
    assert await parsed(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "is not JSON: EOF"),
        (b"{", "is not JSON: EOF"),
        (b"[]", "is a list, not an object"),
        (b"null", "is null, not an object"),
        (b"{'a': 1}", "is not JSON: "),
        (b'{"a": NaN}', "is not JSON: "),
        (b'{"a": 1e999}', "is not JSON: holds inf, which JSON has no number for"),
        (b'{"a": "\\ud800"}', "is not JSON: "),
        (b'{"a": "\xff"}', "is not JSON: "),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON: number out of range"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "is not JSON: is nested more than 64 deep"),
        (b"[" * 500_000, "is not JSON: recursion limit"),
        ('{"a": 1}'.encode("utf-16"), "is not JSON: "),
    ],
)
async def test_what_is_no_object_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=f"^the body {message}") as caught:
        await parsed(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


async def test_one_that_says_it_is_too_large_is_not_read() -> None:
    sender = Sender([b"x"])
    announced = (b"content-length", str(MAX_BYTES + 1).encode())
    with pytest.raises(ApiError, match=f"over the limit of {MAX_BYTES} bytes") as caught:
        await read_body(request(sender, None, announced), MAX_BYTES)
    assert (caught.value.status, sender.num_sent) == (413, 0)


async def test_one_that_is_too_large_is_read_no_further() -> None:
    sender = Sender([b"x" * SMALL_BYTES] * 100)
    with pytest.raises(ApiError) as caught:
        await read_body(request(sender, BodyBudget(100 * MAX_BYTES)), MAX_BYTES)
    assert (caught.value.status, sender.num_sent) == (413, 5)


async def test_large_ones_share_a_budget_and_small_ones_need_none() -> None:
    budget = BodyBudget(2 * SMALL_BYTES)
    large = [b"x" * SMALL_BYTES] * 3
    held = Sender(large, is_held=True)
    reading = asyncio.create_task(read_body(request(held, budget), MAX_BYTES))
    await eventually(lambda: held.num_sent == 3)
    with pytest.raises(ApiError, match="too many large bodies") as caught:
        await read_body(request(Sender(large), budget), MAX_BYTES)
    assert (caught.value.status, caught.value.headers["retry-after"]) == (503, "1")
    assert len(await read_body(request(Sender([b"x" * SMALL_BYTES]), budget), MAX_BYTES)) == SMALL_BYTES
    held.may_end.set()
    assert len(await reading) == 3 * SMALL_BYTES
    assert len(await read_body(request(Sender(large), budget), MAX_BYTES)) == 3 * SMALL_BYTES  # it is free again


GZIP = (b"content-encoding", b"gzip")
PACKED = gzip.compress(b'{"a": [1, 2]}', mtime=0)


@pytest.mark.parametrize("num_bytes", [1, 7, 1000])
async def test_a_packed_one_is_read_in_any_parts(num_bytes: int) -> None:
    sender = Sender([PACKED[at : at + num_bytes] for at in range(0, len(PACKED), num_bytes)])
    assert await read_json(request(sender, None, GZIP), MAX_BYTES) == {"a": [1, 2]}


@pytest.mark.parametrize("num_more", [0, 1, 100 * MAX_BYTES])
async def test_the_limit_of_a_packed_one_is_on_what_comes_out(num_more: int) -> None:
    sender = Sender([gzip.compress(b" " * (MAX_BYTES + num_more), mtime=0)])
    reading = read_body(request(sender, BodyBudget(2 * MAX_BYTES), GZIP), MAX_BYTES)
    if num_more == 0:
        assert len(await reading) == MAX_BYTES
        return
    with pytest.raises(ApiError) as caught:
        await reading
    assert (caught.value.status, caught.value.code) == (413, "too_large")


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        (b"gzip", b'{"a": 1}', 400),
        (b"gzip", PACKED[:-9], 400),
        (b"gzip", PACKED + b"x", 400),
        (b"gzip", b"", 400),
        (b"br", PACKED, 415),
        (b"gzip, gzip", PACKED, 415),
    ],
)
async def test_one_that_is_packed_otherwise_is_refused(encoding: bytes, body: bytes, status: int) -> None:
    with pytest.raises(ApiError) as caught:
        await read_json(request(Sender([body]), None, (b"content-encoding", encoding)), MAX_BYTES)
    assert (caught.value.status, caught.value.code) == (status, "invalid_encoding")
