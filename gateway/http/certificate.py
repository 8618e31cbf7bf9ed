"""The certificate that a server shows."""

from __future__ import annotations

import ssl
from pathlib import Path

from penstock.producer.pem import check_pair
from penstock.producer.renewal import Renewal


def certificate_of(certificate: Path | None, key: Path | None) -> Renewal[ssl.SSLContext] | None:
    """What a server speaks TLS by; None: it speaks none.

    Raises:
        OSError, ValueError: the files are not there, or do not go together.
    """
    if certificate is None or key is None:
        return None
    return Renewal((certificate, key), lambda: _context(certificate, key))


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    check_pair(certificate, key)
    # A new one each time: one that exists would keep a pair of another kind of key beside the new one.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key, "")  # without a password it would be asked for at the terminal
    return context
