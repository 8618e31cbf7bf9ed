"""Treatment of fields as in `gateway/common/fields.py`, at any place of a body. docs/gateway.md lists them."""

from __future__ import annotations

from penstock.gateway.common.fields import BodyT, Policy, read_fields
from penstock.gateway.errors import ApiError


def read_at(place: str, policy: Policy, kind: type[BodyT], value: object) -> BodyT:
    """Reads the object at a place such as `messages[0]`.

    Raises:
        ApiError: it is not an object, or as `read_fields`; the place is named.
    """
    if not isinstance(value, dict):
        raise wrong(place, "must be an object", "invalid_type")
    return read_fields(policy, kind, value, place)


def wrong(place: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, f"{place}: {message}", param=place, code=code)
