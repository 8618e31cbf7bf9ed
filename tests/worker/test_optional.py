"""Our programs go on without optional parts: each is taken away, at the start and later, and requests are answered."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client import ProcessCollector
from structlog.testing import capture_logs

from docs.scripts.pages import page
from penstock import AsyncClient
from penstock.cli import need_no_affinity
from penstock.gateway.page import routes
from penstock.gateway.serve import _descriptors_for
from penstock.local.embedded import EmbeddedServer, EmbeddedServerError
from penstock.protocol.redis import connection
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.serving import exposition
from penstock.tools.bench.machine import describe_machine
from penstock.worker.config import default_name
from penstock.worker.redis.permissions import OPTIONAL, optional_denied
from tests.cli.cli_process import command
from tests.support.packages import ROOT
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.gateway_harness import running_gateway
from tests.support.programs.worker_harness import running_worker
from tests.support.redis_servers.refusing_proxy import REFUSED, RefusingProxy
from tests.support.taken_away import no_files_and_no_favours

ELSEWHERE = {
    "the log": "e2e/trouble/test_log_trouble.py::test_a_worker_serves_without_its_log",
    "the collector of traces and metrics": "serving/test_metric_push.py::test_an_exporter_that_breaks_ends_nothing",
    "compile_cache_dir": (
        "engine/execution/test_kept_files.py::test_without_its_folder_a_program_is_compiled_and_no_more"
    ),
    "C++ kernels": "engine/kernels/test_native_library.py::test_a_harmed_library_is_built_anew_before_it_is_mapped",
    "a home folder": "worker/settings/test_settings.py::test_without_a_home_folder_nothing_is_kept",
    "huge pages": "engine/execution/test_huge_pages.py::test_no_thread_where_there_are_none_to_have",
    "fields of the model card": "worker/test_card.py::test_what_is_not_known_is_left_out",
    "files: /proc": "worker/test_optional.py::test_nobody_needs_files_or_favours",
    "help from the system": "worker/test_optional.py::test_nobody_needs_files_or_favours",
    "the gateway's page": "worker/test_optional.py::test_without_its_page_a_gateway_serves",
    "lines that libraries write": "worker/test_native_lines.py::test_what_libraries_write_never_waits",
}
"""Tests that take each part away, by how its row of the table begins."""


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[RefusingProxy]:
    async with RefusingProxy(redis_url) as proxy:
        yield proxy


def test_each_row_of_the_table_has_a_test() -> None:
    rows = [row[0].text for row in page("docs/operations.md").table("What it can do without")]
    told = {name for row in rows for name in (*OPTIONAL, *ELSEWHERE) if row.startswith(name)}
    assert (len(rows), told) == (len(OPTIONAL) + len(ELSEWHERE), {*OPTIONAL, *ELSEWHERE})
    for place in ELSEWHERE.values():
        path, _, name = place.partition("::")
        assert f"def {name}" in (ROOT / "tests" / path).read_text(), place


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
        file: dict[str, Any] = {"file": ("a.jsonl", b"{}"), "purpose": (None, "batch")}
        assert (await http.post("/v1/files", files=file)).status_code == 200
        await eventually(lambda: _is_ready(http))  # where connections were cut, each part sees it in its own time
        shown = await asyncio.to_thread(command, "workers", "--queue", "q", "--json", "--redis-url", proxy.url)
        assert (shown.status, '"w0"' in shown.out) == (0, True)
    assert proxy.refused["CLIENT SETNAME"] > 0
    assert proxy.refused["INFO"] > 0
    assert caplog.text.count("Redis does not accept names of connections") == 1


async def _is_ready(http: httpx2.AsyncClient) -> bool:
    return (await http.get("/readiness")).status_code == 200


@pytest.mark.parametrize("is_later", [False, True])
async def test_nobody_needs_files_or_favours(
    redis_url: str, is_later: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.version_info >= (3, 13):
        monkeypatch.setattr(os, "process_cpu_count", os.process_cpu_count)  # it is put back
    with ExitStack() as taken:
        need_no_affinity()  # as `penstock` does when it starts
        if not is_later:
            refused = taken.enter_context(no_files_and_no_favours())
        async with (
            running_worker(redis_url, name="w0", health_port=0) as worker,
            AsyncClient(redis_url, queue="q") as client,
            running_gateway(redis_url) as gateway,
            httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
        ):
            if is_later:
                await client.generate("before", max_tokens=3)
                refused = taken.enter_context(no_files_and_no_favours())
            assert (await client.generate("x", max_tokens=3)).finish_reason == "length"
            said = {"model": "q", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
            assert (await http.post("/v1/chat/completions", json=said)).status_code == 200
            file: dict[str, Any] = {"file": ("a.jsonl", b"{}" * 2**20), "purpose": (None, "batch")}
            assert (await http.post("/v1/files", files=file)).status_code == 200
            said["messages"] = [{"role": "user", "content": "hello" * 100_000}]  # a thread parses it
            assert (await http.post("/v1/chat/completions", json=said)).status_code == 400  # too long for the model
            assert (await http.get("/")).status_code == 200
            metrics = (await http.get(f"http://127.0.0.1:{worker.service.health_port}/metrics")).text
            assert "penstock_build_info" in metrics
            shown = await asyncio.to_thread(command, "workers", "--queue", "q", "--json", "--redis-url", redis_url)
            assert (shown.status, '"w0"' in shown.out) == (0, True)
            assert describe_machine()["cores"] == os.cpu_count()
            assert default_name().startswith("host-")
            assert _descriptors_for(2**40) >= 1
            with pytest.raises(EmbeddedServerError, match="no folder to be in"):
                EmbeddedServer().start()
            assert any(name.startswith("/proc") for name in refused)
    assert [line for line in caplog.records if line.levelno >= logging.ERROR] == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no /proc")
@pytest.mark.parametrize("path", ["stat", "self/stat", "self/limits"])
@pytest.mark.parametrize("content", [b"", b"junk", b"btime x\n", b"\xff" * 9, b"btime 1 1\n(x) 1 2\nMax open files\n"])
def test_what_the_kernel_says_of_a_process_may_be_junk(
    path: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "self" / "fd").mkdir(parents=True)
    for name in ("stat", "self/stat", "self/limits"):
        (tmp_path / name).write_bytes(Path("/proc", name).read_bytes())
    (tmp_path / path).write_bytes(content)
    monkeypatch.setattr(exposition, "ProcessCollector", partial(ProcessCollector, proc=str(tmp_path)))
    registry = exposition.Registry("1")
    for _ in range(2):
        assert b"penstock_build_info" in exposition.render(registry, "")[0]


async def test_without_its_page_a_gateway_serves(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_FOLDER", tmp_path)
    with capture_logs() as logs:
        async with (
            running_gateway(redis_url) as gateway,
            httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
        ):
            await eventually(lambda: _is_ready(http))
            assert (await http.get("/operations")).status_code == 404
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["no_page"]


async def test_what_the_user_may_not_run_is_named(redis: RedisClient, redis_url: str) -> None:
    assert await optional_denied(redis) == []
    await redis.execute_command("ACL", "SETUSER", "some", "on", "nopass", "~*", "+@all", "-info", "-client")
    try:
        some = connect(redis_url.replace("://", "://some:@"), decode=False, name="has a name")
        assert await optional_denied(some) == ["CLIENT SETNAME", "INFO"]
        await some.aclose()
    finally:
        await redis.execute_command("ACL", "DELUSER", "some")
