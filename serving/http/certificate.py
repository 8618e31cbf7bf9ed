"""The certificate of a server."""

from __future__ import annotations

import ssl
from pathlib import Path

from penstock.protocol.redis.pem import check_pair
from penstock.protocol.redis.renewal import Renewal


def certificate_of(certificate: Path | None, key: Path | None) -> Renewal[ssl.SSLContext] | None:
    """Returns a server's TLS context; None: it does not use TLS.

    Raises:
        OSError, ValueError: the files are missing, or do not match.
    """
    if certificate is None or key is None:
        return None
    return Renewal((certificate, key), lambda: _context(certificate, key))


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    check_pair(certificate, key)
    # A new context each time: an existing one would keep an old pair with another kind of key beside the new one.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key, "")  # without a password it would be asked for at the terminal
    return context
