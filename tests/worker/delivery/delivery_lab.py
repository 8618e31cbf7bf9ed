"""Shared by the tests of delivery: requests as if claimed, clocks, and a server made of lists."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
from redis import exceptions

from penstock.engine.request import Output, ToolCallDelta
from penstock.protocol.scripts import Claim
from penstock.protocol.wire import GenerateRequest, WireError
from penstock.worker.config import WorkerConfig
from penstock.worker.publish.outbox import Bury, Drop, Fence, Finished, Outbox, Verdict, WriteRefused
from penstock.worker.publish.writes import (
    AsideWrite,
    Burial,
    ChunkWrite,
    EndCheck,
    FinishWrite,
    ProbeWrite,
    RefreshWrite,
    Write,
)
from penstock.worker.run.choices import ChoiceBuffer
from penstock.worker.run.entries import QueueEntry
from penstock.worker.run.requests import LiveRequest, RequestTable

ENQUEUED_MS = 1_700_000_000_000
INTERVAL_S = 0.03
NOW_S = 1000.0
STALE = exceptions.ResponseError("The ID specified in XADD is equal or smaller than the target stream top item")
LOST = exceptions.ConnectionError("the answer is lost")
FULL = exceptions.OutOfMemoryError("OOM command not allowed")
WRONG_TYPE = exceptions.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")


def make_claim(epoch: int = 5, **changes: Any) -> Claim:
    """Makes a first claim, 500 ms after the enqueue."""
    claim = Claim(
        epoch,
        "i",
        has_journal=False,
        is_cancelled=False,
        server_ms=ENQUEUED_MS + 500,
        first_server_ms=ENQUEUED_MS + 500,
        attempts=1,
        crashes=0,
        strikes=0,
        handbacks=0,
    )
    return replace(claim, **changes)


def make_live(
    request_id: str = "r",
    n: int = 1,
    *,
    entry_id: str = f"{ENQUEUED_MS}-0",
    asked: GenerateRequest | WireError | None = None,
    epoch: int = 5,
    is_restored: bool = True,
    **claim: Any,
) -> LiveRequest:
    """Makes a request that was claimed at `NOW_S` on the monotonic clock; nothing of it was published.

    Unless it `is_restored`, its journal is still to be read.
    """
    entry = QueueEntry(entry_id, {b"prompt": b"x"}, 7)
    asked = asked or GenerateRequest(id=request_id, prompt="x", n=n)
    live = LiveRequest("q", request_id, entry, make_claim(epoch, **claim), NOW_S, asked, structlog.get_logger())
    if is_restored:
        live.resume([ChoiceBuffer(index) for index in range(n)])
    return live


class FixedClock:
    """Stands in for the module `time`, and stands still unless told otherwise."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def monotonic(self) -> float:
        return self.now_s


@dataclass
class Pace:
    interval_s: float = INTERVAL_S
    is_stretched: bool = False


@dataclass(frozen=True)
class Said:
    """Text, reasoning, and the arguments of the only tool call."""

    text: str = ""
    reasoning: str = ""
    arguments: str = ""


def said_by(token: int) -> Output:
    """Returns what a token says: its own number, as text, as reasoning or as an argument."""
    match token % 3:
        case 0:
            return Output("", 0, 0, (token,), f" {token}")
        case 1:
            return Output("", 0, 0, (token,), "", reasoning=f" {token}")
        case _:
            return Output("", 0, 0, (token,), "", tool_calls=(ToolCallDelta(0, f" {token}"),))


def said_by_all(tokens: list[str]) -> Said:
    outputs = [said_by(int(token)) for token in tokens]
    return Said(
        "".join(output.text for output in outputs),
        "".join(output.reasoning for output in outputs),
        "".join(delta.arguments for output in outputs for delta in output.tool_calls),
    )


@dataclass
class Reply:
    """Keys of a request on the server."""

    epoch: int
    instance: str = "i"
    entries: list[tuple[tuple[int, int], dict[str, str]]] = field(default_factory=list)
    exists: bool = True
    status: str = "running"

    def append(self, entry_id: str, parts: tuple[Any, ...]) -> Any:
        if not self.exists:
            return None
        epoch, number = map(int, entry_id.split("-"))
        if self.entries and (epoch, number) <= self.entries[-1][0]:
            return STALE
        fields = dict(zip(map(str, parts[::2]), map(str, parts[1::2]), strict=True))
        self.entries.append(((epoch, number), fields))
        return entry_id.encode()

    def claim(self, epoch: int, instance: str) -> None:
        self.epoch, self.instance = epoch, instance
        self.append(f"{epoch}-0", ("type", "own"))

    def find(self, entry_id: str) -> list[Any]:
        at = tuple(map(int, entry_id.split("-")))
        found = next(((id_, fields) for id_, fields in self.entries if id_ >= at), None)
        owner = [str(self.epoch).encode(), self.instance.encode()]
        if found is None or not self.exists:
            return owner
        parts = [str(part).encode() for item in found[1].items() for part in item]
        return [*owner, f"{found[0][0]}-{found[0][1]}".encode(), parts]

    def finish(self, command: tuple[Any, ...]) -> bytes:
        epoch, instance, last, status, _ttl, *rest = command[6:]
        if (epoch, instance) != (self.epoch, self.instance):
            return b"fenced"
        if self.status != "running":
            return b"already"
        if not self.exists or not self.entries or self.entries[-1][0] != (epoch, last):
            return b"lost"
        while rest:
            number, count = rest[:2]
            self.append(f"{epoch}-{number}", tuple(rest[2 : 2 + count]))
            rest = rest[2 + count :]
        self.status = status
        return b"ok"

    def tokens(self, index: int) -> list[str]:
        """Joins a choice's tokens as readers do."""
        found: list[str] = []
        for _, fields in self.entries:
            if fields["type"] == "chunk" and int(fields["index"]) == index:
                assert int(fields["offset"]) == len(found), "a gap, or a token twice"
                found += fields["tokens"].split(",") if fields["tokens"] else []
        return found

    def said(self, index: int) -> Said:
        """Joins what a choice says as readers do."""
        chunks = [fields for _, fields in self.entries if fields["type"] == "chunk" and int(fields["index"]) == index]
        deltas = [delta for fields in chunks for delta in json.loads(fields.get("tool_calls", "[]"))]
        return Said(
            "".join(fields["text"] for fields in chunks),
            "".join(fields.get("reasoning", "") for fields in chunks),
            "".join(delta["arguments"] for delta in deltas),
        )

    @property
    def num_ends(self) -> int:
        return sum(fields["type"] == "end" for _, fields in self.entries)


class Server:
    """Executes writes. `pending` are the queue's entries that this worker has."""

    def __init__(self) -> None:
        self.replies: dict[str, Reply] = {}
        self.pending: set[str] = set()
        self.letters: list[Burial] = []

    def execute(self, write: Write) -> Any:
        match write:
            case ChunkWrite(live=live, command=command):
                return self.replies[live.id].append(str(command[3]), command[4:])
            case ProbeWrite(chunk=chunk):
                return self.replies[chunk.live.id].find(chunk.entry_id)
            case FinishWrite(live=live, command=command):
                return self.replies[live.id].finish(command)
            case EndCheck(command=command):
                reply = next(each for name, each in self.replies.items() if f"{{{name}}}" in str(command[1]))
                *_, (_, fields) = reply.entries
                return [[b"1-1", [part.encode() for item in fields.items() for part in item]]]
            case Burial():
                self.letters += [write] * (write.entry_id in self.pending)
                return self.remove(write.entry_ids)
            case AsideWrite():
                return self.remove(write.entry_ids)
            case RefreshWrite():
                return 1

    def remove(self, entry_ids: tuple[str, ...]) -> int:
        before = len(self.pending)
        self.pending -= set(entry_ids)
        return before - len(self.pending)


class Bench:
    """An outbox, its server and its clock."""

    def __init__(self, *, has_nodes: bool = False, **config: Any) -> None:
        self.aborted: list[str] = []
        self.requests = RequestTable(self.aborted.append)
        self.pace = Pace()
        self.config = WorkerConfig(queue="q", name="w", **config)
        self.outbox = Outbox(self.config, self.requests, self.pace, has_nodes=has_nodes)
        self.server = Server()
        self.now_s = NOW_S
        self.verdicts: list[Verdict] = []

    def claim(self, request_id: str, n: int = 1, epoch: int = 5) -> LiveRequest:
        live = make_live(request_id, n, entry_id=f"{ENQUEUED_MS}-{len(self.server.replies)}", epoch=epoch)
        self.requests.add(live)
        self.server.replies[request_id] = Reply(epoch)
        self.server.replies[request_id].claim(epoch, "i")
        self.server.pending.add(live.entry_id)
        return live

    def push(self, live: LiveRequest, token: int, *, index: int = 0, reason: Any = None) -> None:
        buffer = live.choices[index]
        offset = buffer.num_published + len(buffer.pending.token_ids)
        self.outbox.push(
            live, replace(said_by(token), request_id=live.id, index=index, offset=offset, finish_reason=reason)
        )

    def collect(self) -> list[Write]:
        return self.outbox.collect(self.now_s)

    def settle(self, write: Write, answer: Any) -> Verdict | None:
        verdict = self.outbox.settle(write, answer, self.now_s)
        if verdict is not None:
            self.verdicts.append(verdict)
            self.act(verdict)
        return verdict

    def act(self, verdict: Verdict) -> None:
        """Acts on a verdict as the publisher does."""
        match verdict:
            case Finished(live=live):
                self.requests.remove(live)
            case Bury(live=live, error=error):
                self.outbox.bury(live, "reply_unwritable", str(error))
                self.requests.let_go(live)
            case Drop(live=live) | Fence(live=live):
                self.requests.let_go(live)
            case WriteRefused():
                pass

    def flush(self, execute: Callable[[Write], Any] | None = None) -> list[Write]:
        batch = self.collect()
        for write in batch:
            self.settle(write, (execute or self.server.execute)(write))
        return batch

    def drain(self) -> None:
        for _ in range(1000):
            if (due_s := self.outbox.due_s()) is None:
                break
            self.now_s = max(self.now_s, due_s)
            self.flush()
        assert self.outbox.is_empty
