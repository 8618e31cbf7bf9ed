"""Checks PEM files that settings name: explains what is wrong with one where OpenSSL does not, or would wait."""

from __future__ import annotations

import stat
from pathlib import Path

MAX_BYTES = 16 << 20
"""Size limit of a file; all authorities that a system trusts take a quarter of a megabyte."""

_CERTIFICATES = (
    b"-----BEGIN CERTIFICATE-----",
    b"-----BEGIN TRUSTED CERTIFICATE-----",
    b"-----BEGIN X509 CERTIFICATE-----",
)
_KEY = b"PRIVATE KEY-----"
_ENCRYPTED = (b"-----BEGIN ENCRYPTED PRIVATE KEY-----", b"Proc-Type: 4,ENCRYPTED")


def check_certificates(file: str | Path) -> None:
    """Passes if the file holds a certificate, perhaps a damaged one.

    Raises:
        OSError: it can't be read. All messages have the file's name.
        ValueError: it has none, or is not a regular file, which can be read repeatedly.
    """
    content = _content(file)
    if not any(mark in content for mark in _CERTIFICATES):
        but = ", but a key" if _KEY in content else ""
        raise ValueError(f"no certificate in PEM form is in {str(file)!r}{but}")


def check_key(file: str | Path) -> None:
    """Passes if the file holds a private key that needs no password. Raises as `check_certificates`."""
    content = _content(file)
    if _KEY not in content:
        but = ", but a certificate" if any(mark in content for mark in _CERTIFICATES) else ""
        raise ValueError(f"no private key in PEM form is in {str(file)!r}{but}")
    if any(mark in content for mark in _ENCRYPTED):
        raise ValueError(f"the key in {str(file)!r} needs a password: give one that needs none")


def check_pair(certificate: str | Path, key: str | Path | None) -> None:
    """Passes if a certificate and a key are there. Raises as `check_certificates`.

    Args:
        certificate: the file of the certificate.
        key: the file of its key; None: the same file.
    """
    check_certificates(certificate)
    check_key(certificate if key is None else key)


def _content(file: str | Path) -> bytes:
    path = Path(file)
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(f"{str(file)!r} is a folder")
    if not stat.S_ISREG(found.st_mode):  # a pipe would block, and can be read only once
        raise ValueError(f"{str(file)!r} is not a regular file")
    if found.st_size > MAX_BYTES:
        raise ValueError(f"{str(file)!r} has over {MAX_BYTES} bytes")
    return path.read_bytes()
