"""The reply stream is read back as a journal."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.worker.publish import journal as journals
from penstock.worker.publish.journal import Journal, JournalError, read_journal
from tests.support.redis_servers.streams import add_entry

pytestmark = pytest.mark.every_server

REPLY = keys.reply("q", "r")


async def write(raw: RedisClient, index: Any, offset: Any, tokens: str, reason: str | None = None) -> None:
    fields = {"type": "chunk", "index": index, "offset": offset, "tokens": tokens, "text": ""}
    await add_entry(raw, REPLY, {**fields, **({"finish_reason": reason} if reason else {})})


def test_an_empty_journal_has_every_choice() -> None:
    journal = Journal.empty(2)
    assert journal.generated == ()
    assert [(choice.index, choice.num_published, choice.is_closed) for choice in journal.choices()] == [
        (0, 0, False),
        (1, 0, False),
    ]


def test_choices_continue_where_the_journal_ends() -> None:
    first, second = Journal([[1, 2], [9]], ["stop", None]).choices()
    assert (first.num_published, first.finish_reason, first.is_closed) == (2, "stop", True)
    assert (second.num_published, second.finish_reason, second.is_closed) == (1, None, False)
    assert first.pending.token_ids == second.pending.token_ids == []  # nothing is published twice


@pytest.mark.parametrize(
    ("chunks", "generated", "reasons"),
    [
        ([], (), [None, None]),
        ([(0, 0, "1,2"), (1, 0, "9"), (0, 2, "3")], ((1, 2, 3), (9,)), [None, None]),
        ([(0, 0, "1,2"), (0, 1, "2,3"), (0, 0, "1")], ((1, 2, 3), ()), [None, None]),
        ([(1, 0, "1"), (1, 1, "", "stop")], ((), (1,)), [None, "stop"]),
    ],
)
async def test_journal(raw: RedisClient, chunks: list[Any], generated: Any, reasons: list[str | None]) -> None:
    await raw.xadd(REPLY, {"type": "own", "worker": "w", "epoch": 1})
    for chunk in chunks:
        await write(raw, *chunk)
    journal = await read_journal(raw, REPLY, n=2)
    assert journal.generated == generated
    assert journal.finish_reasons == reasons


@pytest.mark.parametrize("page", [1, 2, 3, 5, 6])
async def test_a_long_journal_is_read_in_pages(raw: RedisClient, monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    monkeypatch.setattr(journals, "PAGE", page)
    for token in range(5):
        await write(raw, 0, token, str(token))
    assert (await read_journal(raw, REPLY, n=1)).generated == ((0, 1, 2, 3, 4),)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index": 0, "offset": 1, "tokens": "1"}, "1-1 starts at token 1, but only 0"),
        ({"index": 0, "offset": -1, "tokens": "1"}, "1-1 starts at token -1"),
        ({"index": 2, "offset": 0, "tokens": "1"}, "1-1 is of choice 2, the request has 2"),
        ({"index": -1, "offset": 0, "tokens": "1"}, "1-1 is of choice -1"),
        ({"index": 0, "offset": 0, "tokens": "x"}, "1-1 is not a chunk"),
        ({"index": 0, "offset": 0}, "1-1 is not a chunk"),
        ({"index": 0, "offset": 0, "tokens": "", "finish_reason": "bored"}, "1-1 has the finish reason b'bored'"),
    ],
)
async def test_unreadable_journal(raw: RedisClient, fields: dict[str, Any], message: str) -> None:
    await add_entry(raw, REPLY, {"type": "chunk", **fields}, entry_id="1-1")
    with pytest.raises(JournalError, match=message):
        await read_journal(raw, REPLY, n=2)
