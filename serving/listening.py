"""Ports that our servers listen on."""

from __future__ import annotations

import errno
import socket

EVERY = "*"
"""The host that stands for all IPv6 and IPv4 addresses. `::` and `0.0.0.0` stand for those of one family."""

_WITHOUT_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


def listen(host: str, port: int) -> socket.socket:
    """Listens at an address, or at a name with IPv4; port 0 is any free one.

    Raises:
        OSError: it can't be listened on.
    """
    if host != EVERY:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in _WITHOUT_IPV6:
                raise
    return socket.create_server(("", port))


def shown(host: str, port: int) -> str:
    """Returns host and port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
