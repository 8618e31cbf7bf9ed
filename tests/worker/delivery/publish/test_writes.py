"""Writes as commands: what is added to a reply stream, and how it is taken back."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.request import Output, ToolCallDelta
from penstock.protocol.scripts import Bill, ClaimState
from penstock.protocol.wire import decode_reply
from penstock.worker.publish import writes
from penstock.worker.publish.ending import end_entry
from penstock.worker.publish.writes import ChunkWrite, EndCheck, ProbeWrite
from tests.worker.delivery.delivery_lab import make_live

OWNER = ("5", "i")


def take_one(text: str = "a") -> ChunkWrite:
    live = make_live()
    live.add(Output("r", 0, 0, (1,), text))
    return writes.take_chunk(live, live.choices[0])


def test_a_chunk_is_appended_under_its_own_id() -> None:
    write = take_one()
    assert write.command[:4] == ("XADD", "penstock:q:{r}:reply", "NOMKSTREAM", "5-1")
    assert write.command[4:8] == ("type", "chunk", "index", "0")


def test_a_chunk_put_back_is_taken_again_in_order_under_a_new_id() -> None:
    live = make_live()
    live.add(Output("r", 0, 0, (1, 2), " a b"))
    first = writes.take_chunk(live, live.choices[0])
    live.add(Output("r", 0, 2, (3,), " c"))
    writes.put_back(first)
    second = writes.take_chunk(live, live.choices[0])
    assert (second.pending.token_ids, second.pending.text, second.entry_id) == ([1, 2, 3], [" a b", " c"], "5-2")
    assert not writes.has_news(live, live.choices[0])


@pytest.mark.parametrize(
    ("output", "n", "is_news"),
    [
        (Output("r", 0, 0, (1,), ""), 1, True),
        (Output("r", 0, 0, (), "a"), 1, True),
        (Output("r", 0, 0, (), "", reasoning="a"), 1, True),
        (Output("r", 0, 0, (), "", tool_calls=(ToolCallDelta(0, "}"),)), 1, True),
        (Output("r", 0, 0, (), ""), 1, False),
        (Output("r", 0, 0, (), "", finish_reason="stop"), 1, False),  # the end says it
        (Output("r", 0, 0, (), "", finish_reason="stop"), 2, True),
    ],
)
def test_what_readers_are_to_be_told(output: Output, n: int, is_news: bool) -> None:
    live = make_live(n=n)
    assert not writes.has_any_news(live)
    live.add(output)
    assert writes.has_news(live, live.choices[0]) == writes.has_any_news(live) == is_news


def test_that_a_choice_has_ended_is_no_news_once_it_is_published() -> None:
    live = make_live(n=2)
    live.add(Output("r", 0, 0, (), "", finish_reason="stop"))
    live.choices[0].is_closed = True
    assert not writes.has_any_news(live)


def test_chunks_are_numbered_and_counted_as_unsettled() -> None:
    live = make_live(n=2)
    for index in (0, 1):
        live.add(Output("r", index, 0, (index,), "a"))
    chunks = [writes.take_chunk(live, choice) for choice in live.choices]
    assert [(chunk.entry_id, chunk.number) for chunk in chunks] == [("5-1", 1), ("5-2", 2)]
    assert (live.reply.next_number, live.reply.num_unsettled) == (3, 2)


@pytest.mark.parametrize(
    ("entry_id", "text", "is_in"), [("5-1", b"a", True), ("5-1", b"b", False), ("5-2", b"a", False)]
)
def test_a_chunk_is_known_by_its_id_and_all_its_fields(entry_id: str, text: bytes, is_in: bool) -> None:
    found = (b"type", b"chunk", b"index", b"0", b"offset", b"0", b"text", text, b"tokens", b"1")
    assert take_one().is_in(ClaimState(OWNER, entry_id, found)) == is_in


def test_a_chunk_of_any_text_knows_itself() -> None:
    chunk = take_one("ä日\n")
    fields = tuple(str(part).encode() for part in chunk.command[4:])
    assert chunk.is_in(ClaimState(OWNER, "5-1", fields))


def test_a_probe_asks_for_the_chunk_that_was_refused() -> None:
    chunk = take_one()
    probe = ProbeWrite.of(chunk)
    assert probe.chunk is chunk
    assert probe.command[-1] == "5-1"


@pytest.mark.parametrize(("is_dead", "status"), [(False, "done"), (True, "dead")])
def test_an_end_takes_everything_that_is_pending_with_it(is_dead: bool, status: str) -> None:
    live = make_live(n=2)
    live.add(Output("r", 1, 0, (7,), "x"))
    live.fail("internal_error", "why", is_dead=is_dead)
    write = writes.take_end(live, end_entry(live), ttl_ms=60_000)
    command: tuple[Any, ...] = write.command[3:4] + write.command[6:]
    state, epoch, instance, last, found, ttl_ms, *entries = command
    assert state == "penstock:q:{r}:state"
    assert (epoch, instance, last, found, ttl_ms) == (5, "i", 0, status, 60_000)
    number, size = entries[:2]
    chunk, end = entries[2 : 2 + size], entries[2 + size :]
    assert (number, chunk[:2], chunk[-2:]) == (1, ["type", "chunk"], ["tokens", "7"])
    assert end[0] == 2
    assert decode_reply(dict(zip(end[2::2], end[3::2], strict=True))) == write.end
    assert (live.reply.next_number, live.reply.num_unsettled) == (3, 1)


def test_a_reply_and_its_state_are_refreshed_together() -> None:
    assert [write.command for write in writes.refresh(make_live(), 5000)] == [
        ("PEXPIRE", "penstock:q:{r}:reply", 5000),
        ("PEXPIRE", "penstock:q:{r}:state", 5000),
    ]


def test_an_acknowledgement_knows_its_entries() -> None:
    write = writes.acknowledge("q", "w", [Bill("1-1", "t", 7), Bill("2-2", "", None)])
    assert write.entry_ids == ("1-1", "2-2")
    assert write.command[-6:] == ("1-1", "t", 7, "2-2", "", "")


@pytest.mark.parametrize(
    ("answer", "is_there"),
    [
        ([[b"5-2", [b"type", b"end"]]], True),
        ([(b"5-2", {b"type": b"end"})], True),  # as a cluster client has it
        ([[b"5-1", [b"type", b"chunk"]]], False),
        ([], False),
    ],
)
def test_an_end_is_looked_for_at_the_end_of_the_reply(answer: Any, is_there: bool) -> None:
    removal = Bill("1-1", "", None)
    check = EndCheck.of(make_live(entry_id="1-1"), removal)
    assert (check.entry_id, check.removal) == ("1-1", removal)
    assert check.command == ("XREVRANGE", "penstock:q:{r}:reply", "+", "-", "COUNT", 1)
    assert EndCheck.is_there(answer) == is_there
