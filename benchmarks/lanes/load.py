"""Sends requests at given times with a bare XADD, and reads their outcomes from the ends of their replies.

Times are from the ends, by the server's clock and the workers', so that reading costs the fleet nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from random import Random
from typing import Any

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.pipeline import Command, execute
from penstock.protocol.redis.streams import pairs
from penstock.protocol.wire import ChunkEntry, EndEntry, OwnEntry, ReplyEntry, decode_reply

TICK_S = 0.002  # requests due within one are sent together
PAGE = 500


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to be sent."""

    at_s: float  # from the start
    group: str  # in the figures
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Sent:
    """A request in the queue; its entry's id is also its own."""

    id: str
    arrival: Arrival


@dataclass(slots=True)
class Outcome:
    """The outcome of a request; `end` is None if it got none."""

    sent: Sent
    end: EndEntry | None


@dataclass(slots=True)
class Sending:
    queue: str
    sent: list[Sent] = field(default_factory=list)


def poisson(rate: float, seconds: float, random: Random) -> list[float]:
    times, now = [], random.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += random.expovariate(rate)
    return times


def text(num_tokens: int) -> str:
    """Returns the token ids of a prompt, all the same."""
    return f"[{','.join(['5'] * num_tokens)}]"


def body(num_prompt: int, num_output: int, **fields: object) -> dict[str, str]:
    """Fills a request that generates `num_output` tokens."""
    return {
        "prompt_token_ids": text(num_prompt), "max_tokens": str(num_output), "ignore_eos": "true",
        **{name: str(value) for name, value in fields.items()},
    }  # fmt: skip


async def send_all(redis: RedisClient, sending: Sending, arrivals: Sequence[Arrival]) -> None:
    """Sends each request at its time."""
    begun_s = time.monotonic()
    for tick, group in groupby(sorted(arrivals, key=lambda each: each.at_s), lambda each: int(each.at_s / TICK_S)):
        page = list(group)
        await asyncio.sleep(max(0.0, begun_s + (tick + 1) * TICK_S - time.monotonic()))
        commands = [("XADD", keys.requests(sending.queue), "*", *_flat(each.fields)) for each in page]
        for each, answer in zip(page, await _pages(redis, commands), strict=True):
            sending.sent.append(Sent(answer.decode(), each))


async def until_ended(redis: RedisClient, sending: Sending, timeout_s: float) -> None:
    """Waits until all have ended, or the time is over."""
    deadline_s = time.monotonic() + timeout_s
    while any(each.end is None for each in await outcomes(redis, sending)):
        if time.monotonic() > deadline_s:
            return
        await asyncio.sleep(0.1)


async def until_empty(redis: RedisClient, queue: str, timeout_s: float) -> bool:
    """Waits until the queue is empty; False: it took too long."""
    deadline_s = time.monotonic() + timeout_s
    while await redis.xlen(keys.requests(queue)):
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(0.05)
    return True


async def cancel_rest(redis: RedisClient, sending: Sending) -> None:
    """Cancels unended requests, as a client does, and waits for their ends."""
    commands: list[Command] = []
    for sent in sending.sent:
        commands.append(("SET", keys.cancel(sending.queue, sent.id), "1", "EX", "60"))
        commands.append(("SADD", keys.cancelled(sending.queue), sent.id))
    await _pages(redis, commands)
    if not await until_empty(redis, sending.queue, 20.0):
        raise TimeoutError("what was cancelled is still in the queue")
    await redis.delete(keys.cancelled(sending.queue))


async def drop_all(redis: RedisClient, sending: Sending) -> None:
    """Deletes what is in the queue, without regard to readers. Workers end what they run."""
    await _pages(redis, [("XDEL", keys.requests(sending.queue), sent.id) for sent in sending.sent])


async def outcomes(redis: RedisClient, sending: Sending) -> list[Outcome]:
    found = []
    for sent, entry in zip(sending.sent, await _newest(redis, sending), strict=True):
        found.append(Outcome(sent, entry if isinstance(entry, EndEntry) else None))
    return found


async def num_generated(redis: RedisClient, sending: Sending) -> int:
    """Counts the tokens on all replies so far."""
    total = 0
    for entry in await _newest(redis, sending):
        if isinstance(entry, EndEntry):
            total += entry.completion_tokens
        elif isinstance(entry, ChunkEntry):
            total += entry.offset + len(entry.tokens)
    return total


async def num_handed_back(redis: RedisClient, sending: Sending) -> int:
    """Counts how often requests were given back."""
    commands = [("HGET", keys.state(sending.queue, sent.id), "handbacks") for sent in sending.sent]
    return sum(int(answer or 0) for answer in await _pages(redis, commands))


async def _newest(redis: RedisClient, sending: Sending) -> list[ReplyEntry | None]:
    """Returns the last chunk of each reply, or its end. After the chunks there may be claims of takeovers."""
    commands = [("XREVRANGE", keys.reply(sending.queue, sent.id), "+", "-", "COUNT", 4) for sent in sending.sent]
    return [_readable(answer) for answer in await _pages(redis, commands)]


def _readable(entries: Any) -> ReplyEntry | None:
    decoded = (
        decode_reply({name.decode(): value.decode() for name, value in pairs(fields).items()}) for _, fields in entries
    )
    return next((entry for entry in decoded if not isinstance(entry, OwnEntry)), None)


async def _pages(redis: RedisClient, commands: Sequence[Command]) -> list[Any]:
    answers: list[Any] = []
    for start in range(0, len(commands), PAGE):
        answers += await execute(redis, commands[start : start + PAGE])
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def _flat(fields: Mapping[str, str]) -> Iterator[str]:
    for name, value in fields.items():
        yield name
        yield value
