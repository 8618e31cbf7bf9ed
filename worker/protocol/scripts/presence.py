"""The steps on a worker's heartbeat, which holds its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.producer import keys
from penstock.producer.redis.lua import call, load
from penstock.producer.redis.pipeline import Command

_BEAT = load("penstock.worker.protocol", "beat")
_LEAVE = load("penstock.worker.protocol", "leave")
_RELEASE = load("penstock.worker.protocol", "release")
_RESERVE = load("penstock.worker.protocol", "reserve")


@dataclass(frozen=True, slots=True)
class Rival:
    """Another process in the key that holds this one's name."""

    instance: str
    expires_ms: int  # server time, later with each of its beats; -1: never
    server_ms: int  # the server's clock now

    @property
    def left_s(self) -> float:
        """Until the name is free, unless the rival beats again."""
        return max(1, self.expires_ms - self.server_ms) / 1000

    def is_seen_to_live(self, before: Rival | None) -> bool:
        """Whether it has renewed its key since it was seen `before`; a dead one's key just lapses."""
        if before is None or before.instance != self.instance:
            return self.expires_ms < 0
        return self.expires_ms < 0 or self.expires_ms > before.expires_ms


def beat(queue: str, *, worker: str, instance: str, ttl_ms: int, is_serving: bool) -> Command:
    """Renews the heartbeat of `instance`, or sets it where there is none. Read the answer with `parse_beat`.

    The same step tells clients whether the worker serves the queue (`keys.serving`).
    """
    key_names = (keys.heartbeat(queue, worker), keys.drain(queue, worker), keys.serving(queue))
    return call(_BEAT, key_names, (instance, ttl_ms, worker, int(is_serving)))


def parse_beat(answer: Any) -> Rival | str:
    """The process that holds the name instead; else the instance marked to drain, "" for none."""
    if len(answer) == 1:
        return str(answer[0], errors="replace")
    return Rival(str(answer[0], errors="replace"), *answer[1:])


def reserve(queue: str, *, worker: str, instance: str, ttl_ms: int) -> Command:
    """Takes the name for a process that does not serve yet, or renews that. Read the answer with `parse_beat`."""
    key_names = (keys.heartbeat(queue, worker), keys.starting(queue, worker))
    return call(_RESERVE, key_names, (instance, ttl_ms))


def release(queue: str, *, worker: str, instance: str) -> Command:
    """Undoes `reserve`: 1, or 0 if the name was not reserved for `instance`."""
    return call(_RELEASE, (keys.starting(queue, worker),), (instance,))


def leave(queue: str, *, worker: str, instance: str) -> Command:
    """Removes the heartbeat of `instance`, its drain mark, and its consumer if nothing is pending."""
    key_names = (keys.requests(queue), keys.heartbeat(queue, worker), keys.drain(queue, worker), keys.serving(queue))
    return call(_LEAVE, key_names, (keys.GROUP, worker, instance))
