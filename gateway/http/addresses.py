"""Finds the client of an HTTP request, also through trusted proxies."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias

from starlette.requests import HTTPConnection

Network: TypeAlias = IPv4Network | IPv6Network

_HOME_BITS = 64
"""Prefix that identifies one IPv6 client: it chooses the rest as it likes (RFC 6177)."""


def networks(names: Sequence[str]) -> tuple[Network, ...]:
    """Parses networks.

    Args:
        names: addresses, or networks such as `10.0.0.0/8`.

    Raises:
        ValueError: one is neither.
    """
    return tuple(ip_network(name, strict=False) for name in names)


def client_network(connection: HTTPConnection, proxies: Sequence[Network]) -> str:
    """Returns the address that the request comes from; for IPv6 its network of 64 bits.

    If that is a trusted proxy's, it is the last address in `X-Forwarded-For` that is not.
    """
    peer = connection.client.host if connection.client else ""
    passed_on = [each.strip() for value in connection.headers.getlist("x-forwarded-for") for each in value.split(",")]
    found = _address(peer)
    while found is not None and passed_on and any(found in network for network in proxies):
        nearer = _address(passed_on.pop())
        if nearer is None:
            break
        found = nearer
    if found is None:
        return peer
    if isinstance(found, IPv6Address):
        return str(ip_network((found, _HOME_BITS), strict=False))
    return str(found)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """Parses an address; None: it is not one. A port, as some proxies add it, is dropped."""
    host = text.partition("]")[0].removeprefix("[") if text.startswith("[") else text
    if host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
