"""Adds API keys to Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from penstock.cli.shared.errors import USAGE, CommandFailed
from penstock.gateway.keys.records import ApiKey
from penstock.gateway.keys.secrets import Secret
from penstock.gateway.keys.store import KeyStore
from penstock.protocol.wire import explain


async def add_key(store: KeyStore, secret: Secret, wanted: Mapping[str, Any], ttl_s: float | None = None) -> ApiKey:
    """Adds the key of `secret`; its name is by default its id.

    Raises:
        CommandFailed: a property of it is out of range.
    """
    now_ms = (await store.find(secret.key_id)).now_ms
    properties = {
        **wanted,
        "id": secret.key_id,
        "name": wanted.get("name") or secret.key_id,
        "digest": secret.digest,
        "created_ms": now_ms,
        "expires_ms": None if ttl_s is None else now_ms + round(ttl_s * 1000),
    }
    try:
        key = ApiKey.model_validate(properties)
    except ValidationError as error:
        raise CommandFailed(explain(error), USAGE) from None
    await store.add(key)
    return key
