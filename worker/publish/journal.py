"""Reads back what earlier claims published of a request: the reply stream is its journal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

from penstock.engine.request import FinishReason
from penstock.protocol.redis.connection import RedisClient
from penstock.worker.run.choices import ChoiceBuffer

PAGE = 1000  # entries per read

_REASONS: dict[bytes, FinishReason] = {reason.encode(): reason for reason in get_args(FinishReason)}


class JournalError(Exception):
    """Raised if the reply stream holds what workers do not write, so that nobody can tell where to continue."""


@dataclass(slots=True)
class Journal:
    """Tokens of each choice so far, and why ended ones ended."""

    token_ids: list[list[int]] = field(default_factory=list)
    finish_reasons: list[FinishReason | None] = field(default_factory=list)

    @classmethod
    def empty(cls, n: int) -> Journal:
        return cls([[] for _ in range(n)], [None] * n)

    @property
    def generated(self) -> tuple[tuple[int, ...], ...]:
        """Tokens as `penstock.engine.request.Request` takes them: empty if nothing was generated."""
        return tuple(map(tuple, self.token_ids)) if any(self.token_ids) else ()

    def choices(self) -> list[ChoiceBuffer]:
        return [
            ChoiceBuffer(index, num_published=len(tokens), finish_reason=reason, is_closed=reason is not None)
            for index, (tokens, reason) in enumerate(zip(self.token_ids, self.finish_reasons, strict=True))
        ]


async def read_journal(redis: RedisClient, reply_key: str, *, n: int) -> Journal:
    """Reads the whole reply stream. Only the claim's owner may rely on the result, as nobody else can append meanwhile.

    Raises:
        JournalError: an entry is malformed, or tokens are missing.
    """
    journal = Journal.empty(n)
    start = "-"
    while True:
        page: Any = await redis.xrange(reply_key, min=start, count=PAGE)
        for entry_id, fields in page:
            if fields.get(b"type") == b"chunk":
                _add_chunk(journal, entry_id.decode(), fields)
        if len(page) < PAGE:
            return journal
        start = f"({page[-1][0].decode()}"


def _add_chunk(journal: Journal, entry_id: str, fields: dict[bytes, bytes]) -> None:
    try:
        index, offset = int(fields[b"index"]), int(fields[b"offset"])
        tokens = [int(token) for token in fields[b"tokens"].split(b",") if token]
    except (KeyError, ValueError) as error:
        raise JournalError(f"reply entry {entry_id} is not a chunk: {error!r}") from error
    if not 0 <= index < len(journal.token_ids):
        raise JournalError(f"reply entry {entry_id} is of choice {index}, the request has {len(journal.token_ids)}")
    known = journal.token_ids[index]
    if not 0 <= offset <= len(known):
        raise JournalError(f"reply entry {entry_id} starts at token {offset}, but only {len(known)} came before it")
    # After a failover to a lagging replica, a chunk may repeat tokens that a later read of the stream brought back.
    known += tokens[len(known) - offset :]
    reason = fields.get(b"finish_reason")
    if reason is not None:
        if reason not in _REASONS:
            raise JournalError(f"reply entry {entry_id} has the finish reason {reason[:80]!r}")
        journal.finish_reasons[index] = _REASONS[reason]
