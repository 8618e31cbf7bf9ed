"""Entries of a reply stream: ids and fields."""

from __future__ import annotations

from typing import TypeAlias

from penstock.protocol.errors import ReplyCorrupt
from penstock.protocol.redis.connection import Fields
from penstock.protocol.wire import ReplyEntry, WireError, decode_reply

Position: TypeAlias = tuple[int, int]
"""A stream entry id, `<epoch>-<n>` in a reply, as numbers that compare in the same order."""


def position(text: str) -> Position:
    """Reads `<epoch>-<n>`.

    Raises:
        ValueError: the text is not an entry id.
    """
    epoch, separator, number = text.partition("-")
    if not (separator and epoch.isascii() and epoch.isdigit() and number.isascii() and number.isdigit()):
        raise ValueError(f"{text!r} is not an entry id such as 1-5")
    return int(epoch), int(number)


def entry_id(where: Position) -> str:
    return f"{where[0]}-{where[1]}"


def decode_fields(request_id: str, fields: Fields) -> ReplyEntry:
    """Reads the fields of a reply entry.

    Raises:
        ReplyCorrupt: they do not follow the schema.
    """
    try:
        return decode_reply({name.decode(): value.decode() for name, value in fields.items()})
    except (WireError, UnicodeDecodeError) as error:
        raise ReplyCorrupt(request_id, str(error)) from error
