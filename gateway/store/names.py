"""Every Redis key of the gateway's own, and nothing else.

The braces are Redis Cluster hash tags: a script touches keys of one tag only.
"""

from __future__ import annotations


def api_keys() -> str:
    """A hash of all API keys: id to record. Revoked keys stay: having no valid key is different from having no keys."""
    return "penstock:gateway:keys:{keys}:records"


def revocations() -> str:
    """A hash of the revoked API keys: id to when, in milliseconds."""
    return "penstock:gateway:keys:{keys}:revoked"


def revocation_notices() -> str:
    """A stream that tells gateways of revocations."""
    return "penstock:gateway:keys:{keys}:notices"


def key_requests(key_id: str) -> str:
    """A hash: second to the requests admitted with an API key. It and the next four share a slot."""
    return f"penstock:gateway:{{{key_id}}}:requests"


def key_running(key_id: str) -> str:
    """A sorted set of leases by when they lapse: an API key's requests that are being answered and have no tab yet."""
    return f"penstock:gateway:{{{key_id}}}:running"


def key_open(key_id: str) -> str:
    """A hash of an API key's open tabs: queue, space and request id to its use of the limits."""
    return f"penstock:gateway:{{{key_id}}}:open"


def key_tokens(key_id: str) -> str:
    """A hash: second to the tokens that an API key was charged."""
    return f"penstock:gateway:{{{key_id}}}:tokens"


def key_charges(key_id: str) -> str:
    """A sorted set of an API key's requests that are paid for (`paid:` and the id), by the second of their end."""
    return f"penstock:gateway:{{{key_id}}}:charges"


def unsettled() -> str:
    """A sorted set of all open tabs (key, queue and id), by when somebody is to check them."""
    return "penstock:gateway:{settling}:unsettled"


def record(kind: str, record_id: str) -> str:
    """A JSON document that clients may ask for later: a response, a batch, a file's description."""
    return f"penstock:gateway:{{{record_id}}}:{kind}"


def owned(kind: str, owner: str) -> str:
    """A sorted set of an API key's files or batches, by creation time in milliseconds; `-`: those without a key."""
    return f"penstock:gateway:{{{owner or '-'}}}:{kind}s"


def body(home: str, name: str) -> str:
    """A hash: number to the piece of a file's bytes. `home`: the upload or batch that made it."""
    return f"penstock:gateway:{{{home}}}:{name}"


def file_users(file_id: str) -> str:
    """A sorted set of the batches that read a file, by the latest time of their end, in milliseconds."""
    return f"penstock:gateway:{{{file_id}}}:users"


def batch_leases() -> str:
    """A sorted set of the batches that have not ended, by when their runner's lease lapses, in milliseconds."""
    return "penstock:gateway:{batches}:leases"


def batch_holders() -> str:
    """A hash: batch to its runner's fencing token; and the last token issued, as `last`."""
    return "penstock:gateway:{batches}:holders"


def batch_progress(batch_id: str) -> str:
    """A hash of a batch's progress. Its output and its errors, two bodies, share the slot."""
    return f"penstock:gateway:{{{batch_id}}}:progress"


def ledger_sizes() -> str:
    """A hash: name of each charge on the gateway's memory to its bytes, and their sum as `total`."""
    return "penstock:gateway:{ledger}:sizes"


def ledger_expiries() -> str:
    """A sorted set of the charges in `ledger_sizes`, by when they expire, in seconds of the server's clock."""
    return "penstock:gateway:{ledger}:expiries"


def fingerprint(request_id: str) -> str:
    """A digest of the request made under an Idempotency-Key, from which `request_id` is derived."""
    return f"penstock:gateway:{{{request_id}}}:fingerprint"


def readers() -> str:
    """A sorted set of the requests that clients wait for, by when they count as abandoned."""
    return "penstock:gateway:{abandonment}:readers"


def swept() -> str:
    """Exists while gateways look for abandoned requests."""
    return "penstock:gateway:{abandonment}:swept"


def probe(name: str) -> str:
    """Written for a moment, to see whether Redis takes writes."""
    return f"penstock:gateway:{{{name}}}:probe"
