"""Undocumented parts of uvicorn that the HTTP servers override, and of Python that a worker uses.

A new version must fail here first. `tests/protocol/redis/test_redis_privates.py` does the same for redis-py.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from multiprocessing import forkserver
from typing import Any, cast

import httptools
import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_uvicorn_s_protocol_is_made_and_called_as_ours_expects() -> None:
    """`serving/http/guard.py` overrides these."""
    protocol = HttpToolsProtocol
    assert parameters(protocol.__init__) == ["self", "config", "server_state", "app_state", "_loop"]
    assert parameters(protocol.connection_made) == ["self", "transport"]
    assert parameters(protocol.data_received) == ["self", "data"]
    assert parameters(protocol.connection_lost) == ["self", "exc"]
    assert parameters(protocol.on_url) == ["self", "url"]
    assert parameters(protocol.on_header) == ["self", "name", "value"]
    assert parameters(protocol.on_body) == ["self", "body"]
    for name in (
        *("on_message_begin", "on_headers_complete", "on_message_complete", "on_response_complete"),
        *("pause_writing", "resume_writing"),
    ):
        assert parameters(getattr(protocol, name)) == ["self"]
    assert parameters(protocol.send_400_response) == ["self", "msg"]
    assert "except httptools.HttpParserError:" in inspect.getsource(protocol.data_received)
    assert "self.pipeline.appendleft" in inspect.getsource(protocol.on_headers_complete)
    assert issubclass(httptools.HttpParserCallbackError, httptools.HttpParserError)


def test_uvicorn_s_server_is_started_and_stopped_as_ours_expects() -> None:
    """`serving/http/guard.py` and `gateway/server.py` override these."""
    assert parameters(uvicorn.Server.startup) == ["self", "sockets"]
    assert parameters(uvicorn.Server.shutdown) == ["self", "sockets"]
    assert inspect.iscoroutinefunction(uvicorn.Server.startup)
    assert inspect.iscoroutinefunction(uvicorn.Server.shutdown)
    assert "self.servers" in inspect.getsource(uvicorn.Server.startup)
    assert {"http", "ws", "backlog", "timeout_keep_alive"} <= set(parameters(uvicorn.Config.__init__))


async def test_uvicorn_s_protocol_has_what_ours_reads() -> None:
    config = uvicorn.Config(lambda: None)
    config.load()
    protocol = cast("Any", HttpToolsProtocol(config, ServerState(), {}, asyncio.get_running_loop()))
    assert protocol.cycle is None
    assert not protocol.pipeline
    assert protocol.loop is asyncio.get_running_loop()
    assert protocol.transport is None
    cycle = inspect.getsource(RequestResponseCycle.__init__)
    for line in ("self.response_complete = False", "self.response_started = False", "self.more_body = True"):
        assert line in cycle
    assert "self.on_response()" in inspect.getsource(RequestResponseCycle.send)


@pytest.mark.skipif(sys.platform != "linux", reason="only there does a process of the chaos harness use it")
def test_a_fork_server_is_held_by_a_pipe_that_has_this_name() -> None:
    """`tools/chaos/process.py` closes it."""
    assert hasattr(forkserver._forkserver, "_forkserver_alive_fd")
