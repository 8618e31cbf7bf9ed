"""Estimates a worker's capacity, and the averages of its requests, from its work. Scaling uses these numbers."""

from __future__ import annotations

from dataclasses import dataclass

HALF_LIFE_S = 10.0
"""Age at which a measurement counts half."""

LATEST = 256
"""Requests that a mean covers, roughly."""


@dataclass(frozen=True, slots=True)
class _Look:
    at_s: float
    num_tokens: int
    num_waiting: int


class Capacity:
    """Estimates slots and speed, only while requests wait: with capacity to spare, the worker would have taken them.

    Args:
        slots: first estimate of the requests at once.
    """

    def __init__(self, slots: int) -> None:
        self.slots = float(slots)
        self.tokens_per_s = 0.0  # 0: not known
        self._last: _Look | None = None

    def note(self, now_s: float, *, num_tokens: int, num_requests: int, num_waiting: int) -> None:
        """Takes a measurement.

        Args:
            now_s: monotonic.
            num_tokens: computed in total.
            num_requests: held here.
            num_waiting: requests in its queue.
        """
        before, self._last = self._last, _Look(now_s, num_tokens, num_waiting)
        if before is None or not (before.num_waiting and num_waiting) or now_s <= before.at_s:
            return
        elapsed_s = now_s - before.at_s
        share = 1 - 0.5 ** (elapsed_s / HALF_LIFE_S)
        rate = (num_tokens - before.num_tokens) / elapsed_s
        self.tokens_per_s += (share if self.tokens_per_s else 1.0) * (rate - self.tokens_per_s)
        self.slots += share * (max(1, num_requests) - self.slots)


class RecentMeans:
    """Means over the requests that ended recently."""

    def __init__(self) -> None:
        self._num = 0
        self._entry_bytes = self._prompt_tokens = self._reply_tokens = 0.0

    def add(self, *, entry_bytes: int, prompt_tokens: int, reply_tokens: int) -> None:
        self._num += 1
        share = 1 / min(self._num, LATEST)
        self._entry_bytes += share * (entry_bytes - self._entry_bytes)
        self._prompt_tokens += share * (prompt_tokens - self._prompt_tokens)
        self._reply_tokens += share * (reply_tokens - self._reply_tokens)

    @property
    def reply_tokens(self) -> float:
        """Mean length of a reply; 0 if unknown."""
        return self._reply_tokens

    @property
    def token_bytes(self) -> float:
        """Bytes of an entry per token of its prompt; 0 if unknown."""
        return self._entry_bytes / self._prompt_tokens if self._prompt_tokens else 0.0
