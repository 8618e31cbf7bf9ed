"""Listeners, for each way to write their host."""

from __future__ import annotations

import ast
import errno
import socket
from typing import Any

import pytest

from penstock.serving.listening import EVERY, listen, shown
from tests.support.packages import PACKAGES, ROOT

HAS_IPV6 = socket.has_dualstack_ipv6()


def reaches(listener: socket.socket, host: str) -> bool:
    try:
        socket.create_connection((host, listener.getsockname()[1])).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "reached"),
    [("0.0.0.0", {"127.0.0.1"}), ("::", {"::1"}), (EVERY, {"127.0.0.1", "::1"}), ("127.0.0.1", {"127.0.0.1"})],
)
def test_which_addresses_a_host_stands_for(host: str, reached: set[str]) -> None:
    if host == "::" and not HAS_IPV6:
        pytest.skip("no IPv6 here")
    with listen(host, 0) as listener:
        found = {address for address in ("127.0.0.1", "::1") if reaches(listener, address)}
        assert found == (reached if HAS_IPV6 else reached - {"::1"})
        assert host == "::" or reaches(listener, "localhost")  # it need not be a name of ::1


@pytest.mark.parametrize("code", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, None])
def test_all_addresses_are_those_of_ipv4_where_there_is_no_other(
    code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = socket.create_server

    def without(address: Any, *, family: int = socket.AF_INET, **options: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(code, "no IPv6")
        return create(address, family=family, **options)

    monkeypatch.setattr(socket, "create_server", without)
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: code is not None)
    with listen(EVERY, 0) as listener:
        assert reaches(listener, "127.0.0.1")


def test_a_port_that_is_taken_is_no_reason_to_listen_at_fewer() -> None:
    with listen(EVERY, 0) as taken, pytest.raises(OSError, match="in use"):
        listen(EVERY, taken.getsockname()[1])


def test_how_it_is_shown() -> None:
    assert [shown(host, 1) for host in ("*", "::", "h")] == ["*:1", "[::]:1", "h:1"]


def test_each_server_of_ours_listens_by_it() -> None:
    """Harnesses are the exception, as they serve this machine alone."""
    found, wanted = set(), ("create_server", "start_server", "bind")
    for package in (*PACKAGES, "penstock"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in wanted:
                    found.add((path.relative_to(ROOT).as_posix(), ast.unparse(node.func)))
    assert found == {
        ("serving/listening.py", "socket.create_server"),
        ("serving/http/guard.py", "loop.create_server"),  # at a socket that listens
        ("tools/chaos/proxy.py", "asyncio.start_server"),
        ("local/data_folder.py", "socket.create_server"),  # to see whether a port is free
        ("local/embedded.py", "probe.bind"),
        ("local/progress.py", "structlog.get_logger().bind"),
        ("worker/logs.py", "_REQUESTS.bind"),
    }
