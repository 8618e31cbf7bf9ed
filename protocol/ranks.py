"""Numbers by which a lane is sorted. The server's scripts have the same (`scripts/lua/shared/ranks.lua`)."""

from __future__ import annotations

LOWEST_PRIORITY, HIGHEST_PRIORITY = -1000, 1000

RANK_SPAN = 2**42
"""Milliseconds that the ranks of one priority span."""


def priority_of(rank: float) -> int:
    """Returns the priority of an entry from its rank, which must be finite."""
    return HIGHEST_PRIORITY - int(rank // RANK_SPAN)
