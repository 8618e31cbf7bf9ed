"""Derives the fields of a request that follow from the tenant of its API key."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from penstock.producer import GenerateRequest


def tenancy(request: GenerateRequest, tenant: str | None, *, isolates: bool) -> dict[str, Any]:
    """Returns the fields that replace the request's own.

    Args:
        request: as the client asked for it.
        tenant: the key's. Keys without one, and callers without a key, are one tenant.
        isolates: whether its prefixes in workers' caches are shared with no other tenant. A salt of the client's own
            divides them further: it is hashed with the tenant, so that no salt leads to another tenant's.
    """
    if not isolates:
        return {"tenant": tenant}
    salt = sha256(repr((tenant, request.cache_salt)).encode()).hexdigest()
    return {"tenant": tenant, "cache_salt": salt}
