"""What the worker overrides in uvicorn and takes from Python, although it is not documented.

A new version must fail here first. `tests/producer/test_redis_privates.py` does the same for redis-py.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from multiprocessing import forkserver
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_uvicorn_s_protocol_is_made_and_called_as_ours_expects() -> None:
    """`worker/health/http_guard.py` overrides these."""
    assert parameters(H11Protocol.__init__) == ["self", "config", "server_state", "app_state", "_loop"]
    assert parameters(H11Protocol.connection_made) == ["self", "transport"]
    assert parameters(H11Protocol.data_received) == ["self", "data"]
    assert parameters(H11Protocol.on_response_complete) == ["self"]
    assert parameters(H11Protocol.connection_lost) == ["self", "exc"]
    assert parameters(uvicorn.Server.startup) == ["self", "sockets"]
    assert inspect.iscoroutinefunction(uvicorn.Server.startup)
    assert {"http", "ws", "backlog"} <= set(parameters(uvicorn.Config.__init__))


async def test_uvicorn_s_protocol_has_what_ours_reads() -> None:
    config = uvicorn.Config(lambda: None, timeout_keep_alive=7)
    config.load()
    protocol = H11Protocol(config, ServerState(), {}, asyncio.get_running_loop())
    assert protocol.cycle is None
    assert protocol.timeout_keep_alive == 7
    assert protocol.loop is asyncio.get_running_loop()
    assert protocol.transport is None
    assert "self.response_complete = False" in inspect.getsource(RequestResponseCycle.__init__)
    assert "self.on_response()" in inspect.getsource(RequestResponseCycle.send)


@pytest.mark.skipif(sys.platform != "linux", reason="only there does a process of the chaos harness use it")
def test_a_fork_server_is_held_by_a_pipe_that_has_this_name() -> None:
    """`worker/chaos/process.py` closes it."""
    assert hasattr(forkserver._forkserver, "_forkserver_alive_fd")  # type: ignore[attr-defined]
