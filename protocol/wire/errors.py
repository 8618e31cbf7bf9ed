"""Errors about an entry that does not follow the schema."""

from __future__ import annotations

REFUSED_CODES = frozenset({"invalid_request", "too_large", "too_long"})
"""Codes of an `error` end that say the request was refused before anything was generated."""


class WireError(ValueError):
    """An entry that does not follow the schema. `request_id` names the reply that can carry the error."""

    def __init__(self, code: str, message: str, *, request_id: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.request_id = request_id
