"""Sends a call, and removes the answers that were read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.protocol import keys, lua
from penstock.protocol.queue.enqueue import Execute
from penstock.protocol.wire import MAX_TIMEOUT_MS

_CALL = lua.load("penstock.protocol.queue", "call")


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """Outcome of sending a call."""

    is_full: bool  # it was not added: too many wait
    num_waiting: int
    is_served: bool


async def send_call(execute: Execute, queue: str, fields: Mapping[str, str], *, max_waiting: int) -> CallOutcome:
    """Appends a call to those of `queue`, if fewer than `max_waiting` wait. A call that is sent twice is answered
    twice.
    """
    flat = [part for pair in fields.items() for part in pair]
    key_names = (keys.calls(queue), keys.serving(queue))
    command = lua.call(_CALL, key_names, (max_waiting, MAX_TIMEOUT_MS, keys.GROUP, *flat))
    entry, num_waiting, is_served = await execute(*command)
    return CallOutcome(entry is None, int(num_waiting), bool(is_served))


async def drop_answers(execute: Execute, queue: str, mailbox: str, last_id: str) -> None:
    """Removes the answers up to the one with `last_id`."""
    ms, _, number = last_id.partition("-")
    await execute("XTRIM", keys.answers(queue, mailbox), "MINID", f"{ms}-{int(number) + 1}")
