"""How many requests one client may have open at once, so that none fills a gateway alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.gateway.errors import unavailable


class Shares:
    """One process's connections, shared out among those who have requests open.

    A client may have as many as are still free: one alone gets a half, of two that take all they can each gets a
    third, and one is left for a client that has none (dynamic thresholds: Choudhury and Hahne, 1998).

    Args:
        num_connections: how many may have requests open.
    """

    def __init__(self, num_connections: int) -> None:
        self._num_connections = num_connections
        self._num_free = num_connections
        self._held: Counter[str] = Counter()

    @contextmanager
    def taken(self, client: str) -> Iterator[None]:
        """One of them, while the block lasts.

        Args:
            client: whom it counts for, in whatever words tell it from others.

        Raises:
            ApiError: the client has its share (503).
        """
        num_held = self._held[client]
        if num_held >= max(1, self._num_free):
            raise unavailable(
                f"{num_held} of the gateway's {self._num_connections} connections have requests of yours, which is as "
                "many as you may have now: end some, or try again"
            )
        self._held[client] += 1
        self._num_free -= 1
        try:
            yield
        finally:
            self._num_free += 1
            self._held[client] -= 1
            if not self._held[client]:
                del self._held[client]
