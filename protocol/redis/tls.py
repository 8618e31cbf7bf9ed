"""TLS to Redis with files that are renewed while the process runs: each new connection uses their current content."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from typing import Any, TypeAlias

from redis.asyncio.connection import RedisSSLContext, SSLConnection

from penstock.protocol.redis.pem import check_certificates, check_pair
from penstock.protocol.redis.renewal import Renewal

_Wanted: TypeAlias = tuple[str | None, str | None, str | None, ssl.VerifyMode, bool]

_log = logging.getLogger(__name__)
_renewals: dict[_Wanted, Renewal[ssl.SSLContext]] = {}
"""Shared by all clients of the process, so that a problem with a file is logged once."""


class Renewed(SSLConnection):
    """Shares the parsed files among all connections that name them, instead of reading them each time."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = _current(self.ssl_context)
        return super()._connection_arguments()  # uses what it finds there


def look_again() -> None:
    """Checks all files in use now, instead of at the next connection. Unusable ones are logged."""
    for wanted, renewal in _renewals.items():
        _look(wanted, renewal)


def _current(ours: RedisSSLContext) -> ssl.SSLContext:
    """Returns the current context.

    Raises:
        OSError, ValueError: the files could never be used so far, and can't be now.
    """
    wanted = (ours.ca_certs, ours.certfile, ours.keyfile, ours.cert_reqs, ours.check_hostname)
    renewal = _renewals.get(wanted)
    if renewal is None:
        files = [file for file in wanted[:3] if file is not None]
        renewal = _renewals[wanted] = Renewal(files, lambda: _made(wanted))
    else:
        _look(wanted, renewal)
    return renewal.value


def _look(wanted: _Wanted, renewal: Renewal[ssl.SSLContext]) -> None:
    outcome = renewal.look()
    files = ", ".join(file for file in wanted[:3] if file is not None)
    if outcome == "renewed":
        _log.info("TLS to Redis uses the renewed files: %s", files)
    elif outcome == "refused":
        _log.error("TLS to Redis keeps the files it read before: %s cannot be used: %s", files, renewal.error)


def _made(wanted: _Wanted) -> ssl.SSLContext:
    authorities, certificate, key, cert_reqs, check_hostname = wanted
    if authorities is not None:
        check_certificates(authorities)
    if certificate is not None:
        check_pair(certificate, key)
    # Without a password, OpenSSL would ask for it at the terminal.
    of_library = RedisSSLContext(
        ca_certs=authorities, certfile=certificate, keyfile=key, check_hostname=check_hostname, password=""
    )
    of_library.cert_reqs, of_library.check_hostname = cert_reqs, check_hostname
    return of_library.get()
