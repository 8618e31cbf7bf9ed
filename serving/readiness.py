"""Readiness of a worker, and the reasons against it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import get_args

import structlog

from penstock.protocol.redis.faults import Dropped, Trouble, is_refused, trouble_of, word_of
from penstock.serving.hints import hint_for, public_reason

_log = structlog.get_logger(__name__)

REMINDER_S = 60.0
SETTLED_S = 5.0
"""Trouble that returns sooner counts as the same: where one command is refused, others succeed in between."""


class Readiness:
    """A worker is ready while all of its parts are. Each part keeps its own reason for not being ready here.

    When Redis goes away or refuses, all parts notice, one after the other and again with each attempt. The log gets one
    line about it, one a minute while it lasts, and one when the last part has Redis again.

    Args:
        redis: its address, for the log.
        clock: returns seconds.

    Attributes:
        refused: set while Redis refuses some part permanently, and until nothing was refused for `SETTLED_S`.
        refusal: its last refusal.
    """

    def __init__(self, redis: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = redis
        self._clock = clock
        self._reasons: dict[str, str] = {}
        self._troubles: dict[str, Trouble] = {}  # by part, for those without Redis
        self._words: set[str] = set()  # kinds of trouble since it began
        self._is_said = False
        self._lost_s = self._logged_s = 0.0
        self._back_s = -SETTLED_S
        self._refused_s = self._refused_last_s = 0.0
        self.refused = asyncio.Event()
        self.refusal: Exception | None = None

    @property
    def is_ready(self) -> bool:
        return not self._reasons

    @property
    def reasons(self) -> Mapping[str, str]:
        """The reasons why the worker is not ready, by part."""
        return self._reasons

    @property
    def trouble(self) -> Trouble | None:
        """The worst trouble with Redis that any part has."""
        return max(self._troubles.values(), key=get_args(Trouble).index, default=None)

    @property
    def refused_for_s(self) -> float:
        """Seconds for which Redis has permanently refused what some part still asks of it; 0: it does not."""
        return self._clock() - self._refused_s if "refused" in self._troubles.values() else 0.0

    def not_ready(self, part: str, reason: str) -> None:
        self._reasons[part] = reason

    def ready(self, part: str) -> None:
        self._reasons.pop(part, None)
        now_s = self._clock()
        if self._troubles.pop(part, None) is not None and not self._troubles:
            self._back_s = now_s
            if self._is_said:
                self._is_said = False
                _log.info("redis_back", redis=self._redis, after_s=round(now_s - self._lost_s, 1))
        if self.refused.is_set() and not self.refused_for_s and now_s - self._refused_last_s >= SETTLED_S:
            self.refused.clear()

    def lost_redis(self, part: str, error: Exception) -> None:
        """Notes that a part got no answer from Redis, or one that it cannot go on with, and will try again."""
        if isinstance(error, Dropped):
            return
        self.not_ready(part, public_reason(error))
        now_s = self._clock()
        if is_refused(error):
            self._note_refusal(error, now_s)
        self._note_loss(error, now_s)
        self._troubles[part] = trouble_of(error)

    def _note_refusal(self, error: Exception, now_s: float) -> None:
        if not self.refused.is_set():
            self._refused_s = now_s
            self.refused.set()
        self._refused_last_s = now_s
        self.refusal = error

    def _note_loss(self, error: Exception, now_s: float) -> None:
        word = word_of(error)
        is_first = not self._troubles
        is_new = is_first and not (now_s - self._back_s < SETTLED_S and word in self._words)
        if is_first:
            self._lost_s = now_s
        if is_new:
            self._words = set()
        self._words.add(word)
        if is_new or (not self._is_said and now_s - self._lost_s >= SETTLED_S):
            self._say_lost(error, now_s)
        elif now_s - self._logged_s >= REMINDER_S:
            self._is_said, self._logged_s = True, now_s
            for_s = round(now_s - self._lost_s)
            _log.warning("redis_still_unavailable", redis=self._redis, error=str(error), for_s=for_s)

    def _say_lost(self, error: Exception, now_s: float) -> None:
        self._is_said, self._logged_s = True, now_s
        _log.warning("redis_unavailable", redis=self._redis, error=str(error), hint=hint_for(error))
