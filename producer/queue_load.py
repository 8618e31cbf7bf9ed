"""How much waits in a queue, how fast it goes, and how many workers that takes: one read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from penstock.producer import keys
from penstock.producer.redis.enqueue import Execute
from penstock.producer.redis.streams import pairs


@dataclass(frozen=True, slots=True)
class BandLoad:
    """What waits with one priority."""

    priority: int
    num_requests: int
    tokens: int
    oldest_s: float  # how long the one that came first has waited, to the second


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """As of `at_ms`, the server's clock; no more than some two seconds old while a worker lives. docs/scaling.md."""

    at_ms: int = 0
    num_waiting: int = 0
    tokens: int = 0  # of prompts and replies that wait, estimated
    oldest_s: float = 0.0
    bands: tuple[BandLoad, ...] = ()  # the highest priority first
    num_running: int = 0
    num_given_back: int = 0  # of those that wait: they are set aside for a model
    num_workers: int = 0
    slots: float = 0.0  # requests that these run at once
    tokens_per_s: float = 0.0  # of the fleet; 0: not known
    wanted_workers: int = 0

    @classmethod
    def of(cls, fields: Mapping[bytes, bytes]) -> Self:
        """What the hash says.

        Raises:
            ValueError: something else is there.
        """
        try:
            return cls(
                at_ms=int(fields[b"at_ms"]),
                num_waiting=int(fields[b"waiting"]),
                tokens=int(fields[b"waiting_tokens"]),
                oldest_s=int(fields[b"oldest_ms"]) / 1000,
                bands=tuple(_band(text) for text in fields[b"bands"].decode().split()),
                num_running=int(fields[b"running"]),
                num_given_back=int(fields.get(b"given_back", 0)),  # one of an earlier version does not say it
                num_workers=int(fields[b"workers"]),
                slots=float(fields[b"slots"]),
                tokens_per_s=float(fields[b"rate"]),
                wanted_workers=int(fields[b"wanted_workers"]),
            )
        except KeyError as error:
            raise ValueError(f"it has no field {error}") from error


_PRIORITY = re.compile(rb"-?[0-9]{1,9}")


def priorities(members: Iterable[bytes]) -> list[int]:
    """Those in `keys.bands`, without what somebody else wrote there."""
    return [int(member) for member in members if _PRIORITY.fullmatch(member)]


def _band(text: str) -> BandLoad:
    priority, num_requests, tokens, oldest_ms = map(int, text.split(":"))
    return BandLoad(priority, num_requests, tokens, oldest_ms / 1000)


async def query_load(execute: Execute, queue: str) -> QueueLoad | None:
    """The last numbers; None: there are none, as no worker has been there for an hour.

    Raises:
        RedisError, OSError: the server can't be reached, or refuses.
        ValueError: something else is there.
    """
    answer = await execute("HGETALL", keys.load(queue))
    fields = answer if isinstance(answer, Mapping) else pairs(answer)  # as one command and as one of a pipeline
    return QueueLoad.of(fields) if fields else None
