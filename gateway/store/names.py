"""Every Redis key of the gateway's own, and nothing else.

The braces are Redis Cluster hash tags: a script touches keys of one tag only.
"""

from __future__ import annotations


def record(kind: str, record_id: str) -> str:
    """One JSON document that clients may ask for later: a response, a batch, a file's description."""
    return f"penstock:gateway:{{{record_id}}}:{kind}"


def ledger_sizes() -> str:
    """A hash: what takes part in the bound on the gateway's memory to its bytes, and their sum as `total`."""
    return "penstock:gateway:{ledger}:sizes"


def ledger_expiries() -> str:
    """A sorted set of what is in `ledger_sizes`, by when it expires, in seconds of the server's clock."""
    return "penstock:gateway:{ledger}:expiries"


def fingerprint(request_id: str) -> str:
    """A digest of what was asked for under an Idempotency-Key, of which `request_id` is made."""
    return f"penstock:gateway:{{{request_id}}}:fingerprint"


def readers() -> str:
    """A sorted set of the requests that clients wait for, by when they count as abandoned."""
    return "penstock:gateway:{abandonment}:readers"


def swept() -> str:
    """Exists while gateways look for what is abandoned."""
    return "penstock:gateway:{abandonment}:swept"
