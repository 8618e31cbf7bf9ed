"""Malformed forms get a status, whatever they hold."""

from __future__ import annotations

import pytest

from tests.support.programs.gateway_client import bare_client
from tests.support.programs.gateway_harness import running_gateway


@pytest.mark.parametrize("boundary", ["", "a" * 5000, '"', "a b"])
async def test_a_boundary_that_cannot_be_one_is_refused(redis_url: str, boundary: str) -> None:
    headers = {"content-type": f"multipart/form-data; boundary={boundary}"}
    async with running_gateway(redis_url) as gateway, bare_client(gateway) as client:
        answer = await client.post("/v1/files", content=b"--a", headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_form"
