"""Secrets by which clients identify themselves: 256 random bits; Redis has only their SHA-256 sum.

A sum without salt and stretching suffices for a secret that nobody chose: there is no dictionary to try.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field

_PATTERN = re.compile(r"sk-penstock-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")


@dataclass(frozen=True, slots=True)
class Secret:
    """Secret of one key. Its id is not secret: it names the key in lists and messages."""

    key_id: str
    text: str = field(repr=False)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def fits(self, digest: str) -> bool:
        return hmac.compare_digest(self.digest.encode(), digest.encode())


def new_secret() -> Secret:
    key_id = secrets.token_hex(6)
    return Secret(key_id, f"sk-penstock-{key_id}-{secrets.token_urlsafe(32)}")


def parse_secret(text: str) -> Secret | None:
    """Parses a secret; None: it does not have the form of our keys."""
    match = _PATTERN.fullmatch(text)
    return None if match is None else Secret(match[1], text)
