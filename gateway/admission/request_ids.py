"""Ids of requests that may be repeated. They depend only on the request, so that any gateway finds the same reply."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from hashlib import sha256

from starlette.requests import HTTPConnection

from penstock.gateway.context import caller_of, gateway_of
from penstock.protocol.ids import NUM_SLOTS, id_in_slot

KEY_HEADER = "Idempotency-Key"

_CLUSTER_SLOTS = 16
"""Number of hash slots for these ids: under Redis Cluster a gateway reads each slot's replies over its own
connection.
"""


def request_id_of(asked: HTTPConnection, key: str, number: int, *, is_cluster: bool) -> str:
    """Returns the id of the `number`th request to the queue made for the HTTP request with this key."""
    return _id_of(asked, caller_of(asked).key_id, key, number, is_cluster=is_cluster)


def joined_id(asked: HTTPConnection, key_id: str) -> str:
    """Returns the id of the first request to the queue, if the same request was made before; empty without an
    Idempotency-Key.

    Args:
        asked: the request, before its caller is set.
        key_id: the caller's API key.
    """
    key = asked.headers.get(KEY_HEADER)
    is_cluster = gateway_of(asked).store.address.kind == "cluster"
    return "" if key is None else _id_of(asked, key_id, key, 0, is_cluster=is_cluster)


def _id_of(asked: HTTPConnection, key_id: str | None, key: str, number: int, *, is_cluster: bool) -> str:
    return hashed_id("k", key_id, asked.url.path, key, number, is_cluster=is_cluster)


def hashed_id(prefix: str, *parts: str | int | None, is_cluster: bool) -> str:
    """Returns the id of the queue request that these values identify: the same on any gateway."""
    digest = sha256(json.dumps(parts).encode()).digest()
    text = prefix + urlsafe_b64encode(digest).decode().rstrip("=")
    return id_in_slot(text, digest[0] % _CLUSTER_SLOTS * (NUM_SLOTS // _CLUSTER_SLOTS)) if is_cluster else text
