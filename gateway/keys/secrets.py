"""What a client sends to say who it is: 256 random bits, of which Redis has the SHA-256 sum alone.

A sum without salt and stretching is right for a secret that nobody chose: there is no dictionary to try.
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
    """One key's. The id in it is no secret: it names the key in lists and messages."""

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
    """None: no key of ours looks like this."""
    match = _PATTERN.fullmatch(text)
    return None if match is None else Secret(match[1], text)
