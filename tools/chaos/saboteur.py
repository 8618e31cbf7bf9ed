"""Triggers each fault at its moment: when the planned command of the planned request passes by."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hiredis import ReplyError

from penstock.protocol import scripts
from penstock.protocol.redis.faults import Meaning, meaning_of
from penstock.protocol.redis.pipeline import script_hash
from penstock.protocol.scripts import Claim
from penstock.tools.chaos.fleet import Fleet, Slot
from penstock.tools.chaos.history import ChaosEvent, History, Wire
from penstock.tools.chaos.plan import Fault, FaultPlan, RequestPlan, Side, Stage
from penstock.tools.chaos.proxy import Action, Command
from penstock.tools.chaos.site import Site

_NOBODY = Claim(0, "", False, False, 0, 0, 0, 0, 0, 0)
_CLAIM = script_hash(str(scripts.claim("", "", entry_id="", worker="", instance="", ttl_ms=1)[1]))
_FINISH = script_hash(str(scripts.finish("", "", claim=_NOBODY, last_number=0, status="done", ttl_ms=1, entries=())[1]))
_ACK = script_hash(str(scripts.ack("", worker="", bills=())[1]))
_LIMITS: dict[str, Any] = {"worker": "", "count": 1, "max_body_bytes": 1, "max_bytes": 1}
_READS = frozenset({script_hash(str(scripts.pending("", **_LIMITS, after="")[1]))})
_LANE_READS = frozenset(
    script_hash(str(command[1])) for command in (scripts.take("", **_LIMITS), scripts.sweep("", **_LIMITS))
)
_FIND = script_hash(str(scripts.find("", "", "")[1]))
_FOUND_ID_AT = 5  # EVAL or EVALSHA, script, 2, state, reply, entry id
_STAGES: dict[str, Stage] = {_CLAIM: "claim", _FINISH: "finish", _ACK: "ack"}
_FIELDS_AT = 4  # XADD, key, NOMKSTREAM, id, name, value, name, value ...
_KEYS_AT, _NOT_IDS, _BILL_PARTS = 3, 2, 3  # EVAL or EVALSHA, script, number of keys, keys, two others, bills


@dataclass(slots=True)
class _Armed:
    """A fault that waits for its moment."""

    request: RequestPlan
    fault: Fault
    times_left: int
    chunks_left: int
    last_worker: str = ""
    taken: asyncio.Event = field(default_factory=asyncio.Event)  # set only if the fault waits for it

    async def wait_over(self) -> None:
        """Returns when the frozen worker should wake up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.fault.length_s):
                await self.taken.wait()


class Saboteur:
    """Holds the faults of a plan. `watch` makes the watcher of one slot's traffic.

    Args:
        plan: its faults are armed.
        history: records what was done.
        site: the server, which some faults restart.
    """

    def __init__(self, plan: FaultPlan, history: History, site: Site) -> None:
        self._history = history
        self._wire = history.wire
        self._site = site
        self._armed: dict[str, _Armed] = {}
        self._arm(plan.requests)
        self._until_taken: dict[str, _Armed] = {}  # by request: faults that have struck for the last time
        self._request_of: dict[bytes, str] = {}  # queue entry to request, for armed ones
        self._restarts: list[asyncio.Task[None]] = []
        self.fleet: Fleet | None = None  # set before the first worker starts

    def watch(self, slot: Slot) -> _SlotWatcher:
        return _SlotWatcher(self, slot)

    async def wait_restarted(self) -> None:
        """Waits until no restart is under way."""
        await asyncio.gather(*self._restarts)

    def rearm(self, suffix: str) -> tuple[RequestPlan, ...]:
        """Arms faults that found no moment again; returns their requests under other ids."""
        again = []
        for armed in self._armed.values():
            fault = replace(armed.fault, times=armed.times_left)
            again.append(replace(armed.request, id=f"{armed.request.id}{suffix}", fault=fault))
        self._armed = {}
        self._arm(again)
        return tuple(again)

    def _arm(self, requests: Iterable[RequestPlan]) -> None:
        for request in requests:
            if (fault := request.fault) is not None:
                self._armed[request.id] = _Armed(request, fault, fault.times, fault.at_chunk)

    def look(self, slot: Slot, command: Command, side: Side, answer: Any = None) -> Action | None:
        """Returns the action that is due now, if any."""
        if side == "after":
            self._count(command, answer)
            self._see_taken(slot, command, answer)
        if not self._armed:
            return None
        for stage, request_id in self._moments(command, side, answer):
            armed = self._armed.get(request_id)
            if (
                armed is not None
                and armed.fault.stage == stage
                and armed.fault.side == side
                and self._is_due(armed, slot)
            ):
                return partial(self._strike, armed, slot)
        return None

    def _moments(self, command: Command, side: Side, answer: Any) -> list[tuple[Stage, str]]:
        name = command[0]
        if name == b"XADD":
            request_id = _request_id(command[1])
            stages: tuple[Stage, ...] = (
                ("chunk", "choice") if b"finish_reason" in command[_FIELDS_AT::2] else ("chunk",)
            )
            return [(stage, request_id) for stage in stages]
        if name == b"XREADGROUP" and side == "after":
            return [("read", request_id) for request_id in self._learn(_entries_read(answer))]
        script = _script(command)
        stage = _STAGES.get(script)
        if isinstance(answer, ReplyError) and meaning_of(answer) is Meaning.NO_SCRIPT:  # it comes again with the script
            return []
        if stage == "finish" and answer == b"fenced":  # no end was written: the next owner writes it
            return []
        if script in _READS | _LANE_READS and side == "after":
            found = [] if isinstance(answer, ReplyError) else answer[0] if script in _LANE_READS else answer
            entries = [(entry[0], entry[3]) for entry in found]
            return [("read", request_id) for request_id in self._learn(entries)]
        if stage == "ack":
            ids = command[_KEYS_AT + int(command[_KEYS_AT - 1]) + _NOT_IDS :: _BILL_PARTS]
            known = (self._request_of.get(entry_id) for entry_id in ids)
            return [("ack", request_id) for request_id in known if request_id is not None]
        return [] if stage is None else [(stage, _request_id(command[3]))]

    def _learn(self, entries: Iterable[tuple[bytes, list[bytes]]]) -> list[str]:
        """Returns the armed requests among queue entries that a worker was given: (id, [name, value, name, value,
        ...]).
        """
        found = []
        for entry_id, fields in entries:
            request_id = json.loads(fields[1])["id"] if fields and fields[0] == b"request" else ""
            if request_id in self._armed:
                self._request_of[entry_id] = request_id
                found.append(request_id)
        return found

    def _is_due(self, armed: _Armed, slot: Slot) -> bool:
        if not slot.is_up or armed.last_worker == slot.name:
            return False
        armed.chunks_left -= 1
        if armed.fault.stage == "chunk" and armed.chunks_left > 0:
            return False
        armed.times_left -= 1
        armed.chunks_left = armed.fault.at_chunk
        armed.last_worker = slot.name
        if not armed.times_left:
            del self._armed[armed.request.id]
            if armed.fault.until_taken:
                self._until_taken[armed.request.id] = armed
        return True

    async def _strike(self, armed: _Armed, slot: Slot) -> bool:
        if self.fleet is None:
            return True
        fault = armed.fault
        match fault.kind:
            case "kill":
                self.fleet.kill(slot)
                return False
            case "freeze":
                awake = self.fleet.freeze(slot, armed.wait_over)
                if fault.side == "before":  # the held-back command arrives when another worker has the request
                    with suppress(Exception):
                        await asyncio.shield(awake)
                return True
            case "restart":
                # In a task of its own, as this link ends with the server, and whatever waits in it as well.
                self._restarts.append(asyncio.create_task(self._restart(fault.length_s)))
                return fault.side == "before"
            case "drop":
                self._wire.dropped += 1
                return False
            case "cut":
                self._wire.cut += 1
                return False
            case "delay":
                self._wire.delayed += 1
                await asyncio.sleep(fault.length_s)
                return True

    async def _restart(self, away_s: float) -> None:
        await self._site.restart(away_s)
        self._history.events.append(ChaosEvent("restart", "", time.monotonic()))

    def _see_taken(self, slot: Slot, command: Command, answer: Any) -> None:
        if self._until_taken and _script(command) == _CLAIM and not isinstance(answer, ReplyError):
            armed = self._until_taken.get(_request_id(command[3]))
            if armed is not None and armed.last_worker != slot.name:
                armed.taken.set()

    def _count(self, command: Command, answer: Any) -> None:
        """Counts refused writes. After a refused XADD the worker looks up the entry in its place; a refused finish says
        so.
        """
        script = _script(command)
        if script == _FIND and isinstance(answer, list):
            epoch, _, found, *_ = *answer, None
            is_owner = epoch == command[_FOUND_ID_AT].split(b"-")[0]
            self._wire.absorbed += is_owner and found == command[_FOUND_ID_AT]
            self._wire.fenced += not is_owner
        elif script == _FINISH:
            self._wire.fenced += answer == b"fenced"
            self._wire.absorbed += answer == b"already"


def _entries_read(answer: Any) -> list[tuple[bytes, list[bytes]]]:
    """Returns the entries of an answer to XREADGROUP."""
    if not answer or isinstance(answer, ReplyError):
        return []
    streams = answer.items() if isinstance(answer, dict) else answer
    return [entry for _, entries in streams for entry in entries]


def _script(command: Command) -> str:
    """Returns the hash of the script that a command runs, or ""."""
    match command[0]:
        case b"EVAL":
            return script_hash(command[1].decode())
        case b"EVALSHA":
            return command[1].decode()
        case _:
            return ""


@dataclass(frozen=True, slots=True)
class _SlotWatcher:
    saboteur: Saboteur
    slot: Slot

    def before(self, command: Command) -> Action | None:
        return self.saboteur.look(self.slot, command, "before")

    def after(self, command: Command, answer: Any) -> Action | None:
        return self.saboteur.look(self.slot, command, "after", answer)


class ClientWatcher:
    """Drops answers to clients as planned.

    Args:
        plan: says whose answers are lost.
        wire: counts them.
    """

    def __init__(self, plan: FaultPlan, wire: Wire) -> None:
        self._enqueues = {request.id.encode() for request in plan.requests if request.loses_enqueue}
        self._reads = {request.id.encode() for request in plan.requests if request.loses_read}
        self._wire = wire

    def before(self, _command: Command) -> Action | None:
        return None

    def after(self, command: Command, answer: Any) -> Action | None:
        if command[0] in (b"EVAL", b"EVALSHA") and not isinstance(answer, ReplyError):
            return self._lose_once(self._enqueues, command[4].rpartition(b":")[2])
        if command[0] == b"XREAD" and answer:
            return self._lose_once(self._reads, _request_id(command[-2]).encode())
        return None

    def _lose_once(self, marked: set[bytes], name: bytes) -> Action | None:
        if name not in marked:
            return None
        marked.discard(name)
        self._wire.dropped += 1
        return _lose


async def _lose() -> bool:
    return False


def _request_id(key: bytes) -> str:
    """Returns the hash tag of a key."""
    return key[key.index(b"{") + 1 : key.index(b"}")].decode()
