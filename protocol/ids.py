"""Request ids: random ones that can't be guessed, and the Redis Cluster slot of their keys."""

from __future__ import annotations

import binascii
import itertools
import secrets
import string
from functools import cache

NUM_SLOTS = 16_384
_RANDOM_BYTES = 18  # 144 bits
_SUFFIX_CHARS = 3


def new_id(slot: int | None = None) -> str:
    """Returns a fresh id; with `slot`, one whose keys live in that slot of a Redis Cluster.

    One XREAD can only read streams of one slot, so a client that gives all its requests ids of one slot can follow all
    their replies over one connection.
    """
    text = "r" + secrets.token_urlsafe(_RANDOM_BYTES)
    return text if slot is None else id_in_slot(text, slot)


def id_in_slot(text: str, slot: int) -> str:
    """Returns an id that begins with `text` and whose keys live in `slot`, by appending three characters."""
    # The checksum is linear: that of text + suffix is that of text + zeros, xor that of the suffix alone.
    so_far = binascii.crc_hqx(text.encode() + bytes(_SUFFIX_CHARS), 0)
    return text + _suffixes()[(so_far ^ slot) % NUM_SLOTS]


def random_slot() -> int:
    return secrets.randbelow(NUM_SLOTS)


def slot_of(request_id: str) -> int:
    """Returns the slot of every key with `{request_id}` in it (CRC-16/XMODEM, per the Redis Cluster specification)."""
    return binascii.crc_hqx(request_id.encode(), 0) % NUM_SLOTS


@cache
def _suffixes() -> tuple[str, ...]:
    """Returns, for each checksum modulo the number of slots, three characters that have it."""
    found: dict[int, str] = {}
    for chars in itertools.product(string.ascii_letters + string.digits + "-_", repeat=_SUFFIX_CHARS):
        suffix = "".join(chars)
        found.setdefault(slot_of(suffix), suffix)
        if len(found) == NUM_SLOTS:
            break
    return tuple(found[slot] for slot in range(NUM_SLOTS))
