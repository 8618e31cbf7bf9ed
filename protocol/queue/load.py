"""Load of a queue in one read: how much waits, how fast it is served, and how many workers that takes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from penstock.protocol import keys
from penstock.protocol.queue.enqueue import Execute
from penstock.protocol.redis.streams import pairs


@dataclass(frozen=True, slots=True)
class BandLoad:
    """Requests that wait with one priority."""

    priority: int
    num_requests: int
    tokens: int
    oldest_s: float  # age of the request that came first, to the second


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """Load at `at_ms`, by the server's clock; at most about two seconds old while a worker lives. See
    docs/scaling.md.
    """

    at_ms: int = 0
    num_waiting: int = 0
    tokens: int = 0  # of waiting prompts and their replies, estimated
    oldest_s: float = 0.0
    bands: tuple[BandLoad, ...] = ()  # the highest priority first
    num_running: int = 0
    num_given_back: int = 0  # the waiting requests that are set aside for a model
    num_workers: int = 0
    slots: float = 0.0  # requests that these workers run at once
    tokens_per_s: float = 0.0  # of all workers; 0: not known
    wanted_workers: int = 0

    @classmethod
    def of(cls, fields: Mapping[bytes, bytes]) -> Self:
        """Reads the fields of the hash.

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
                num_given_back=int(fields.get(b"given_back", 0)),  # missing in earlier versions
                num_workers=int(fields[b"workers"]),
                slots=float(fields[b"slots"]),
                tokens_per_s=float(fields[b"rate"]),
                wanted_workers=int(fields[b"wanted_workers"]),
            )
        except KeyError as error:
            raise ValueError(f"it has no field {error}") from error


_PRIORITY = re.compile(rb"-?[0-9]{1,9}")


def priorities(members: Iterable[bytes]) -> list[int]:
    """Returns the priorities in `keys.bands`, without members that Penstock did not write."""
    return [int(member) for member in members if _PRIORITY.fullmatch(member)]


def _band(text: str) -> BandLoad:
    priority, num_requests, tokens, oldest_ms = map(int, text.split(":"))
    return BandLoad(priority, num_requests, tokens, oldest_ms / 1000)


async def query_load(execute: Execute, queue: str) -> QueueLoad | None:
    """Returns the last numbers; None: there are none, as no worker has been there for an hour.

    Raises:
        RedisError, OSError: the server can't be reached, or refuses.
        ValueError: something else is there.
    """
    answer = await execute("HGETALL", keys.load(queue))
    fields = answer if isinstance(answer, Mapping) else pairs(answer)  # as one command and as one of a pipeline
    return QueueLoad.of(fields) if fields else None
