"""JSON schemas of the functions that the gateway makes from other kinds of tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.gateway.common.documents import Document


def closed_object(properties: Mapping[str, Document], required: Iterable[str]) -> Document:
    """Returns the schema of an object with these properties and no others."""
    return {
        "type": "object", "properties": dict(properties), "required": list(required), "additionalProperties": False,
    }  # fmt: skip


def described(kind: str, description: str) -> Document:
    """Returns the schema of a value of a plain type, with its description for the model."""
    return {"type": kind, "description": description}
