"""An entry leaves the queue only while its end is known to be on the reply stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.protocol.scripts import Bill
from penstock.worker.config import WorkerConfig
from penstock.worker.publish import removals
from penstock.worker.publish.removals import ENDS_SETTLE_S, Removals
from penstock.worker.publish.writes import AsideWrite, Burial, EndCheck, Write

END = [[b"5-2", [b"type", b"end"]]]
LETTER = Burial("r", "1-1", "code", False, ("EVAL", "letter"))


def make(*, has_nodes: bool = False, **config: Any) -> Removals:
    return Removals(WorkerConfig(queue="q", name="w", **config), has_nodes=has_nodes)


NOW_S = 1000.0


def live(entry_id: str = "1-1") -> Any:
    return SimpleNamespace(entry_id=entry_id, bill=bill(entry_id), reply=SimpleNamespace(key="penstock:q:{r}:reply"))


def bill(entry_id: str) -> Bill:
    return Bill(entry_id, "t", 7)


def entry_ids(found: list[Write]) -> list[tuple[str, ...]]:
    return [write.entry_ids for write in found if isinstance(write, AsideWrite | Burial)]


def test_on_one_server_an_entry_goes_with_the_next_flush() -> None:
    queue = make()
    assert queue.due_s(7.0) is None
    queue.add_ended(live("1-1"), None, NOW_S)
    queue.add_ended(live("2-2"), LETTER, NOW_S)
    queue.add(bill("3-3"))
    assert queue.due_s(7.0) == 7.0
    assert queue.entry_ids() == {"1-1", "2-2", "3-3"}
    letter, acknowledged = queue.collect(0.0)
    assert letter is LETTER
    assert entry_ids([acknowledged]) == [("1-1", "3-3")]
    assert queue.is_empty
    assert queue.due_s(7.0) is None


def test_where_reply_and_queue_are_apart_it_waits_and_looks() -> None:
    queue = make(has_nodes=True)
    queue.add_ended(live(), None, NOW_S)
    due_s = queue.due_s(0.0)
    assert due_s is not None
    assert due_s == NOW_S + ENDS_SETTLE_S
    assert queue.due_s(due_s + 1) == due_s + 1
    assert queue.collect(due_s - 0.001) == []
    assert queue.entry_ids() == {"1-1"}
    assert not queue.is_empty
    (check,) = queue.collect(due_s)
    assert isinstance(check, EndCheck)
    assert check.command == ("XREVRANGE", "penstock:q:{r}:reply", "+", "-", "COUNT", 1)
    assert queue.settle_check(check, END)
    assert entry_ids(queue.collect(due_s)) == [("1-1",)]


def test_it_waits_for_no_longer_than_the_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removals, "ENDS_SETTLE_S", 10.0**9)
    queue = make(has_nodes=True, reply_ttl_after_end_s=60)
    queue.add_ended(live(), None, NOW_S)
    assert queue.collect(NOW_S + 30)


@pytest.mark.parametrize(
    ("answer", "goes"),
    [
        (END, True),
        ([(b"5-2", {b"type": b"end"})], True),  # as a cluster client has it
        (Exception("the key holds a string"), True),
        ([], False),
        ([[b"5-1", [b"type", b"chunk", b"text", b"end"]]], False),
        ([(b"5-1", {b"type": b"chunk", b"text": b"end"})], False),
    ],
)
def test_an_entry_whose_end_is_gone_stays(answer: Any, goes: bool) -> None:
    queue = make(has_nodes=True)
    queue.add_ended(live(), None, NOW_S)
    (check,) = queue.collect(float("inf"))
    assert isinstance(check, EndCheck)
    assert queue.settle_check(check, answer) == goes
    assert queue.entry_ids() == ({"1-1"} if goes else set())
    assert entry_ids(queue.collect(float("inf"))) == [("1-1",)] * goes


@pytest.mark.parametrize("letter", [None, LETTER])
def test_after_a_change_of_servers_the_end_is_looked_for_first(letter: Burial | None) -> None:
    queue = make()
    queue.add_ended(live(), letter, NOW_S)
    (removal,) = queue.collect(0.0)
    assert isinstance(removal, AsideWrite | Burial)
    assert queue.doubt(removal)
    (check,) = queue.collect(NOW_S)
    assert isinstance(check, EndCheck)
    assert queue.settle_check(check, END)
    (again,) = queue.collect(0.0)
    assert again == removal


def test_of_an_entry_that_nobody_here_has_ended_there_is_nothing_to_look_for() -> None:
    queue = make()
    queue.add(bill("1-1"))
    queue.add_ended(live("2-2"), None, NOW_S)
    (removal,) = queue.collect(0.0)
    assert isinstance(removal, AsideWrite)
    assert not queue.doubt(removal)
    (check,) = queue.collect(0.0)
    assert isinstance(check, EndCheck)
    assert check.entry_id == "2-2"


def test_what_was_answered_is_forgotten() -> None:
    queue = make()
    queue.add_ended(live(), None, NOW_S)
    (removal,) = queue.collect(0.0)
    assert isinstance(removal, AsideWrite)
    assert queue.entry_ids() == {"1-1"}
    queue.settle(removal)
    assert queue.entry_ids() == set()
    assert queue.is_empty


def test_a_letter_that_cannot_be_kept_is_an_acknowledgement_that_knows_its_end() -> None:
    queue = make()
    queue.add_ended(live(), LETTER, NOW_S)
    queue.collect(0.0)
    queue.give_up(LETTER)
    (removal,) = queue.collect(0.0)
    assert isinstance(removal, AsideWrite)
    assert queue.doubt(removal)
    (check,) = queue.collect(0.0)
    assert isinstance(check, EndCheck)
    assert queue.settle_check(check, END)
    assert entry_ids(queue.collect(0.0)) == [("1-1",)]


def test_an_entry_may_be_told_twice() -> None:
    """The end of its request tells it, and so does a claim that found the end."""
    queue = make()
    queue.add_ended(live(), None, NOW_S)
    (first,) = queue.collect(0.0)
    queue.add(bill("1-1"))
    (second,) = queue.collect(0.0)
    assert isinstance(first, AsideWrite)
    assert isinstance(second, AsideWrite)
    queue.settle(first)
    assert not queue.doubt(second)
    assert queue.is_empty
