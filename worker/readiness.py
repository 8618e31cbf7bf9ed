"""Whether the worker can serve, and if not, why."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import structlog

from penstock.worker.hints import hint_for, public_reason

_log = structlog.get_logger(__name__)

REMINDER_S = 60.0


class Readiness:
    """A worker is ready while no part of it is not. Each part of the service keeps its own reason here.

    When Redis goes away, all parts notice, one after the other and again with each try. The log has one line about it,
    one a minute while it lasts, and one when the last part has Redis again.

    Args:
        redis: where it is, for the log.
        clock: seconds.
    """

    def __init__(self, redis: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = redis
        self._clock = clock
        self._reasons: dict[str, str] = {}
        self._without_redis: set[str] = set()
        self._lost_s = self._logged_s = 0.0

    @property
    def is_ready(self) -> bool:
        return not self._reasons

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why the worker is not ready, by part."""
        return self._reasons

    def not_ready(self, part: str, reason: str) -> None:
        self._reasons[part] = reason

    def ready(self, part: str) -> None:
        self._reasons.pop(part, None)
        if part in self._without_redis:
            self._without_redis.remove(part)
            if not self._without_redis:
                _log.info("redis_back", redis=self._redis, after_s=round(self._clock() - self._lost_s, 1))

    def lost_redis(self, part: str, error: Exception) -> None:
        """A part has no answer from Redis, or one that it cannot go on with, and will try again."""
        self.not_ready(part, public_reason(error))
        now_s = self._clock()
        if not self._without_redis:
            self._lost_s = self._logged_s = now_s
            _log.warning("redis_unavailable", redis=self._redis, error=str(error), hint=hint_for(error))
        elif now_s - self._logged_s >= REMINDER_S:
            self._logged_s = now_s
            for_s = round(now_s - self._lost_s)
            _log.warning("redis_still_unavailable", redis=self._redis, error=str(error), for_s=for_s)
        self._without_redis.add(part)
