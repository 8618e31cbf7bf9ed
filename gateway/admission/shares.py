"""Limits how many requests one client may have open at once, so that none fills a gateway alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.gateway.errors import unavailable


class Shares:
    """Shares one process's connections among the clients that have requests open.

    A client may have as many as are still free: a single client gets half, two greedy clients get a third each, and one
    connection is left for a client that has none (dynamic thresholds: Choudhury and Hahne, 1998).

    Args:
        num_connections: number of connections that may have requests open.
    """

    def __init__(self, num_connections: int) -> None:
        self._num_connections = num_connections
        self._num_free = num_connections
        self._held: Counter[str] = Counter()

    @contextmanager
    def taken(self, client: str) -> Iterator[None]:
        """Takes a connection during the block.

        Args:
            client: any text that identifies the client.

        Raises:
            ApiError: the client has used up its share (503).
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
