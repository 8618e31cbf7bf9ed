"""Treatment of tools and blocks by their kind, which their `type` names: an unknown one is left out and reported."""

from __future__ import annotations

from collections.abc import Collection

from penstock.gateway.common.near import nearest
from penstock.gateway.errors import ApiError
from penstock.gateway.http.passed_over import is_strict, pass_over
from penstock.protocol.wire.values import spelled


def leave_out_tool(place: str, kind: object, known: Collection[str]) -> None:
    """Notes that a tool is left out: one that a server would run, or of an unknown kind.

    Raises:
        ApiError: fields are strict, or its kind is none, or nearly one of those that are known.
    """
    meant = nearest(kind, set(known) - {kind}) if isinstance(kind, str) else None
    if is_strict() or meant is not None or not isinstance(kind, str):
        hint = f", did you mean {meant}?" if meant else f", only {', '.join(known)}"
        message = f"{place}: a tool of type {spelled(kind)} is not there{hint}"
        raise ApiError(400, message, param=f"{place}.type", code="unsupported_value")
    pass_over(f"{place}.{kind}")
