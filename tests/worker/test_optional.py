"""What our programs go on without: each is taken away, at the start and later, and what is asked is answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from cli_process import command
from fakes import eventually
from gateway_harness import running_gateway
from patience import WAIT_S
from refusing_proxy import REFUSED, RefusingProxy
from worker_harness import running_worker

from docs.scripts.pages import page
from penstock import AsyncClient
from penstock.producer.redis import connection
from penstock.producer.redis.connection import RedisClient, connect
from penstock.worker.protocol.permissions import OPTIONAL, optional_denied

TESTS = Path(__file__).parents[1]
ELSEWHERE = {
    "the log": "e2e/test_log_trouble.py::test_a_worker_serves_without_its_log",
    "the collector of traces and metrics": "gateway/test_metric_push.py::test_an_exporter_that_breaks_ends_nothing",
    "compile_cache_dir": "engine/test_kept_files.py::test_without_its_folder_a_program_is_compiled_and_no_more",
    "C++ kernels": "engine/test_native_library.py::test_a_harmed_library_is_built_anew_before_it_is_mapped",
    "a home folder": "worker/test_settings.py::test_without_a_home_folder_nothing_is_kept",
    "huge pages": "engine/test_huge_pages.py::test_no_thread_where_there_are_none_to_have",
    "fields of the model card": "worker/test_card.py::test_what_is_not_known_is_left_out",
}
"""By how a row of the table begins: what takes that away."""


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[RefusingProxy]:
    async with RefusingProxy(redis_url) as proxy:
        yield proxy


def test_each_row_of_the_table_has_a_test() -> None:
    rows = [row[0].text for row in page("docs/operations.md").table("What it goes on without")]
    told = {name for row in rows for name in (*OPTIONAL, *ELSEWHERE) if row.startswith(name)}
    assert (len(rows), told) == (len(OPTIONAL) + len(ELSEWHERE), {*OPTIONAL, *ELSEWHERE})
    for place in ELSEWHERE.values():
        path, _, name = place.partition("::")
        assert f"def {name}" in (TESTS / path).read_text(), place


@pytest.mark.parametrize("answer", [REFUSED["NOPERM"], "ERR unknown command 'X', with args beginning with:"])
@pytest.mark.parametrize("is_later", [False, True])
async def test_no_command_that_is_nice_to_have_is_needed(
    proxy: RefusingProxy, answer: str, is_later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    connection._say_nameless.cache_clear()
    if not is_later:
        proxy.refuse(answer, *OPTIONAL)
    async with (
        running_worker(proxy.url, name="w0"),
        AsyncClient(proxy.url, queue="q") as client,
        running_gateway(proxy.url) as gateway,
        httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        if is_later:
            await client.generate("before", max_tokens=3)
            proxy.refuse(answer, *OPTIONAL)
            proxy.cut()
        assert (await client.generate("x", max_tokens=3)).finish_reason == "length"
        file = {"file": ("a.jsonl", b"{}"), "purpose": (None, "batch")}
        assert (await http.post("/v1/files", files=file)).status_code == 200
        await eventually(lambda: _is_ready(http))  # where connections were cut, each part sees it in its own time
        shown = await asyncio.to_thread(command, "workers", "--queue", "q", "--json", "--redis-url", proxy.url)
        assert (shown.status, '"w0"' in shown.out) == (0, True)
    assert proxy.refused["CLIENT SETNAME"] > 0
    assert proxy.refused["INFO"] > 0
    assert caplog.text.count("Redis takes no names of connections") == 1


async def _is_ready(http: httpx2.AsyncClient) -> bool:
    return (await http.get("/readiness")).status_code == 200


async def test_what_the_user_may_not_run_is_named(redis: RedisClient, redis_url: str) -> None:
    assert await optional_denied(redis) == []
    await redis.execute_command("ACL", "SETUSER", "some", "on", "nopass", "~*", "+@all", "-info", "-client")
    try:
        some = connect(redis_url.replace("://", "://some:@"), decode=False, name="has a name")
        assert await optional_denied(some) == ["CLIENT SETNAME", "INFO"]
        await some.aclose()
    finally:
        await redis.execute_command("ACL", "DELUSER", "some")
