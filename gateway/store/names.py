"""Every Redis key of the gateway's own, and nothing else.

The braces are Redis Cluster hash tags: a script touches keys of one tag only.
"""

from __future__ import annotations


def fingerprint(request_id: str) -> str:
    """A digest of what was asked for under an Idempotency-Key, of which `request_id` is made."""
    return f"penstock:gateway:{{{request_id}}}:fingerprint"


def readers() -> str:
    """A sorted set of the requests that clients wait for, by when they count as abandoned."""
    return "penstock:gateway:{abandonment}:readers"


def swept() -> str:
    """Exists while gateways look for what is abandoned."""
    return "penstock:gateway:{abandonment}:swept"
