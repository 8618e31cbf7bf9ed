"""The writes of a worker about its requests: chunks, the end, the acknowledgement. Each is one command, made once.

A write that may or may not have reached the server is sent again unchanged. Chunks carry explicit ids, and the scripts
recognize their own work, so the second sending changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from penstock.engine.request import Prefill
from penstock.protocol import keys, scripts
from penstock.protocol.redis.pipeline import Command
from penstock.protocol.redis.streams import pairs
from penstock.protocol.scripts import Bill, ClaimState
from penstock.protocol.wire import EndEntry, encode_reply
from penstock.worker.publish.chunks import chunk_fields, prefill_entry
from penstock.worker.run.choices import ChoiceBuffer, Pending
from penstock.worker.run.requests import LiveRequest

MAX_SILENT_TOKENS = 16  # tokens without text that are held back together at the beginning of a reply


@dataclass(slots=True)  # one per chunk: a frozen one would take three times as long to make
class ChunkWrite:
    """New tokens of one choice, or the prompt's progress. Treat it as immutable; it is not frozen only for speed."""

    live: LiveRequest
    choice: ChoiceBuffer
    entry_id: str
    pending: Pending  # the output that it holds
    is_last: bool  # whether it is a choice's last chunk, where there are several choices
    command: Command

    @property
    def number(self) -> int:
        """Number n in the entry's id, `<epoch>-<n>`."""
        return int(self.entry_id.partition("-")[2])

    def is_in(self, found: ClaimState) -> bool:
        """Checks whether the entry that was found is this chunk: the id alone does not tell."""
        sent = tuple(str(part).encode() for part in self.command[_FIRST_FIELD:])
        return found.entry_id == self.entry_id and found.fields == sent


@dataclass(frozen=True, slots=True)
class ProbeWrite:
    """Looks for a chunk that was refused: is it there already, is another owner, or did it never arrive?"""

    chunk: ChunkWrite
    command: Command

    @classmethod
    def of(cls, chunk: ChunkWrite) -> ProbeWrite:
        return cls(chunk, scripts.find(chunk.live.queue, chunk.live.id, chunk.entry_id))


@dataclass(frozen=True, slots=True)
class FinishWrite:
    """The last chunks and the end of a reply."""

    live: LiveRequest
    end: EndEntry
    num_tokens: int  # in the last chunks
    command: Command


@dataclass(frozen=True, slots=True)
class AsideWrite:
    """A write that nobody waits for: an acknowledgement, a corrected count."""

    command: Command
    entry_ids: tuple[str, ...] = ()  # that it removes from the queue


@dataclass(frozen=True, slots=True)
class Burial:
    """Moves the entry of a request that was given up from its queue to the dead letters."""

    request_id: str
    entry_id: str
    code: str
    is_malformed: bool
    command: Command

    @property
    def entry_ids(self) -> tuple[str, ...]:
        """Entries that it removes from the queue."""
        return (self.entry_id,)


@dataclass(frozen=True, slots=True)
class EndCheck:
    """Checks whether an end that was written is still there; only then may the queue entry go."""

    entry_id: str
    removal: Bill | Burial  # acknowledges the entry, or makes it a dead letter
    command: Command

    @classmethod
    def of(cls, live: LiveRequest, removal: Bill | Burial) -> EndCheck:
        return cls(live.entry_id, removal, ("XREVRANGE", live.reply.key, "+", "-", "COUNT", 1))

    @staticmethod
    def is_there(answer: Any) -> bool:
        if not answer:
            return False
        fields = answer[0][1]  # a cluster client returns a mapping
        return bool((fields if isinstance(fields, dict) else pairs(fields)).get(b"type") == b"end")


@dataclass(frozen=True, slots=True)
class RefreshWrite:
    """Renews the time to live of a reply or its state."""

    command: Command


_FIRST_FIELD = 4  # in a chunk's command: XADD, key, NOMKSTREAM, id, fields

Write: TypeAlias = ChunkWrite | ProbeWrite | FinishWrite | EndCheck | Burial | AsideWrite | RefreshWrite


def has_news(live: LiveRequest, choice: ChoiceBuffer) -> bool:
    """Checks whether readers still have to get tokens, text, or the end of one of several choices."""
    if choice.pending.token_ids or choice.pending.is_readable:
        return True
    return choice.finish_reason is not None and len(live.choices) > 1 and not choice.is_closed


def is_published(live: LiveRequest) -> bool:
    """Checks whether all output is on the reply stream, and for a request that has ended also its end."""
    if live.is_gone:
        return True
    return not (live.has_ended or live.reply.num_unsettled or any(has_news(live, each) for each in live.choices))


def can_begin(live: LiveRequest) -> bool:
    """Checks whether a reply that has not begun has something for readers: text, reasoning, a call, an end, or many
    tokens.

    A first token often has no text: it is a special token, or a part of a character. It goes with those that follow it,
    so that readers can show the first chunk.
    """
    return any(
        choice.pending.is_readable
        or len(choice.pending.token_ids) >= MAX_SILENT_TOKENS
        or (choice.finish_reason is not None and not choice.is_closed)
        for choice in live.choices
    )


def has_any_news(live: LiveRequest) -> bool:
    """Checks `has_news` for any choice. A plain loop: it runs several times for every chunk."""
    for choice in live.choices:  # noqa: SIM110
        if has_news(live, choice):
            return True
    return False


def take_chunk(live: LiveRequest, choice: ChoiceBuffer) -> ChunkWrite:
    """Turns the pending output of a choice into a write, which holds it until Redis has confirmed it."""
    pending = choice.take()
    fields = chunk_fields(choice, pending, num_choices=len(live.choices))
    is_last = choice.finish_reason is not None and len(live.choices) > 1
    return _chunk_write(live, choice, pending, fields, is_last=is_last)


def take_prefill(live: LiveRequest, prefill: Prefill) -> ChunkWrite:
    """Makes the write that reports the prompt's progress."""
    live.reply.prefilled = prefill.num_computed
    first = live.choices[0]
    fields = [part for item in encode_reply(prefill_entry(first, prefill)).items() for part in item]
    return _chunk_write(live, first, Pending(), fields, is_last=False)


def _chunk_write(
    live: LiveRequest, choice: ChoiceBuffer, pending: Pending, fields: Sequence[str], *, is_last: bool
) -> ChunkWrite:
    entry_id = f"{live.claim.epoch}-{live.reply.next_number}"
    live.reply.next_number += 1
    live.reply.num_unsettled += 1
    return ChunkWrite(
        live, choice, entry_id, pending, is_last, ("XADD", live.reply.key, "NOMKSTREAM", entry_id, *fields)
    )


def put_back(write: ChunkWrite) -> None:
    """Undoes `take_chunk` for a chunk that is known not to be on the reply stream; it is taken again under a new id."""
    write.choice.pending = write.pending.then(write.choice.pending)


def take_end(live: LiveRequest, end: EndEntry, *, ttl_ms: int) -> FinishWrite:
    """Takes everything that is pending of a request, and its end."""
    entries, num_tokens = [], 0
    for choice in live.choices:
        if has_news(live, choice):
            num_tokens += len(choice.pending.token_ids)
            entries.append(chunk_fields(choice, choice.pending, num_choices=len(live.choices)))
    entries.append([part for item in encode_reply(end).items() for part in item])
    numbered = list(enumerate(entries, start=live.reply.next_number))
    live.reply.next_number += len(entries)
    live.reply.num_unsettled += 1
    status: Literal["done", "dead"] = "dead" if live.is_dead else "done"
    command = scripts.finish(
        live.queue,
        live.id,
        claim=live.claim,
        last_number=live.reply.last_number,
        status=status,
        ttl_ms=ttl_ms,
        entries=numbered,
    )
    return FinishWrite(live, end, num_tokens, command)


def acknowledge(queue: str, worker: str, bills: Sequence[Bill]) -> AsideWrite:
    return AsideWrite(scripts.ack(queue, worker=worker, bills=bills), tuple(bill.entry_id for bill in bills))


def refresh(live: LiveRequest, ttl_ms: int) -> list[RefreshWrite]:
    return [RefreshWrite(("PEXPIRE", key, ttl_ms)) for key in (live.reply.key, keys.state(live.queue, live.id))]
