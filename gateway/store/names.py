"""Every Redis key of the gateway's own, and nothing else.

The braces are Redis Cluster hash tags: a script touches keys of one tag only.
"""

from __future__ import annotations


def api_keys() -> str:
    """A hash of all API keys: id to record. Those that were revoked stay: to have none in use is not to have none."""
    return "penstock:gateway:{keys}:records"


def revocations() -> str:
    """A hash of the API keys that were revoked: id to when, in milliseconds."""
    return "penstock:gateway:{keys}:revoked"


def revocation_notices() -> str:
    """A stream that tells gateways of revocations."""
    return "penstock:gateway:{keys}:notices"
