"""The checker notices each way in which a promise can be broken."""

from __future__ import annotations

import pytest

from penstock.tools.chaos.checker import check
from penstock.tools.chaos.history import ChaosEvent, EventKind, History, RequestRecord, Seen
from penstock.tools.chaos.plan import RequestPlan
from penstock.tools.chaos.reading import Truth

TRUTH = Truth((5, 6, 7, 8), "abcd")
OWN = Seen("1-0", {"type": "own", "worker": "w1", "epoch": "1"}, 1.0)


def chunk(entry_id: str, offset: int, tokens: str, text: str, index: int = 0) -> Seen:
    fields = {"type": "chunk", "index": str(index), "offset": str(offset), "tokens": tokens, "text": text}
    return Seen(entry_id, fields, 1.0)


def end(entry_id: str, count: int = 4, reason: str = "length") -> Seen:
    return Seen(entry_id, {"type": "end", "finish_reason": reason, "completion_tokens": str(count)}, 1.0)


def own(epoch: int, at_s: float = 1.0, worker: str = "w2") -> Seen:
    return Seen(f"{epoch}-0", {"type": "own", "worker": worker, "epoch": str(epoch)}, at_s)


GOOD = [OWN, chunk("1-1", 0, "5,6", "ab"), own(2), chunk("2-1", 2, "7,8", "cd"), end("2-2")]


def faults(seen: list[Seen], request: RequestPlan | None = None, **more: object) -> list[str]:
    record = RequestRecord(request or RequestPlan("r", "x", 4), entry_ids=["1-1"], seen=seen)
    for name, value in more.items():
        setattr(record, name, value)
    history = History(records={"r": record})
    return [problem.fault for problem in check(history, {"r": (TRUTH,)}, recovery_limit_s=1.0).problems]


def test_a_reply_that_moved_to_another_worker_is_right() -> None:
    assert faults(GOOD, stored=GOOD) == []


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([OWN, chunk("1-1", 0, "5,6", "ab")], "lost"),  # no end
        ([], "lost"),
        ([OWN, chunk("1-1", 0, "5", "a"), chunk("1-2", 2, "7,8", "cd"), end("1-3")], "lost"),  # a gap
        ([OWN, chunk("1-1", 0, "5,6", "ab"), end("1-2", 2)], "lost"),  # too short
        ([*GOOD[:2], own(2), chunk("2-1", 1, "6,7,8", "bcd"), end("2-2", 5)], "doubled"),  # an overlap
        ([*GOOD[:2], GOOD[1], *GOOD[2:]], "doubled"),  # an entry twice
        ([*GOOD, end("2-3")], "doubled"),  # two ends
        ([*GOOD, chunk("2-3", 4, "9", "e")], "doubled"),  # more after the end
        ([OWN, chunk("1-1", 0, "5,6,7,8,9", "abcde"), end("1-2", 5)], "doubled"),  # more than there should be
        ([*GOOD[:3], chunk("1-2", 2, "7,8", "cd"), end("2-2")], "out of order"),  # a zombie's write
        ([OWN, chunk("1-2", 0, "5,6", "ab"), chunk("1-1", 2, "7,8", "cd"), end("1-3")], "out of order"),
        ([OWN, chunk("1-1", 0, "5,6", "ab"), chunk("1-2", 0, "7,8", "cd"), end("1-3")], "out of order"),
        ([OWN, chunk("1-1", 0, "5,6,9,8", "abcd"), end("1-2")], "wrong"),  # a token
        ([OWN, chunk("1-1", 0, "5,6,7,8", "abxd"), end("1-2")], "wrong"),  # the text
        ([OWN, chunk("1-1", 0, "5,6,7,8", "abcd"), end("1-2", 3)], "wrong"),  # the count
        ([OWN, end("1-1", 0, "error")], "wrong"),
        ([OWN, chunk("1-1", 0, "5,6,7,8", "abcd"), end("1-2", reason="stop")], "wrong"),  # it came to its length
        ([OWN, chunk("1-1", 0, "5", "a"), end("1-2", 1, "cancelled")], "wrong"),  # nobody asked for it
        ([OWN, chunk("1-1", 0, "5,6,7,8", "abcd", index=1), end("1-2")], "wrong"),  # a choice that is none
    ],
)
def test_what_is_not_right_is_noticed(seen: list[Seen], expected: str) -> None:
    assert expected in faults(seen)


CALLS = Truth((5, 6, 7, 8), "a", reasoning="bc", calls='c0 f {"x": 1}\nc1 g {}')


def said(entry_id: str, offset: int, tokens: str, text: str = "", reasoning: str = "", calls: str = "") -> Seen:
    told = chunk(entry_id, offset, tokens, text)
    more = {"reasoning": reasoning, "tool_calls": calls}
    return Seen(entry_id, {**told.fields, **{name: value for name, value in more.items() if value}}, 1.0)


BEGIN = '[{"index":0,"id":"c0","name":"f","arguments":"{\\"x\\""}]'
REST = '[{"index":0,"arguments":": 1}"},{"index":1,"id":"c1","name":"g","arguments":"{}"}]'
CALLING = [OWN, said("1-1", 0, "5", "a", "b"), said("1-2", 1, "6", "", "c", BEGIN), own(2)]


def call_faults(*rest: Seen, request: RequestPlan | None = None) -> list[str]:
    record = RequestRecord(request or RequestPlan("r", "x", 4), entry_ids=["1-1"], seen=[*CALLING, *rest])
    verdict = check(History(records={"r": record}), {"r": (CALLS,)}, recovery_limit_s=1.0)
    return [problem.fault for problem in verdict.problems]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (REST, []),
        (REST.replace(": 1}", " 1}"), ["wrong"]),  # a byte is lost
        (REST.replace(": 1}", ":: 1}"), ["wrong"]),  # a byte comes twice
        (REST.replace(": 1}", ":1 }"), ["wrong"]),  # two change places
        (REST.replace("c1", "c2"), ["wrong"]),  # an id
        (REST.replace('"g"', '"h"'), ["wrong"]),  # a name
        (REST.replace('{"index":0', '{"index":1', 1), ["out of order"]),  # goes on with a call that has not begun
        (BEGIN, ["out of order", "wrong"]),  # the call begins again
        ("", ["wrong"]),
    ],
)
def test_a_call_that_is_not_right_is_noticed(calls: str, expected: list[str]) -> None:
    assert call_faults(said("2-1", 2, "7,8", calls=calls), end("2-2")) == expected


def test_reasoning_that_is_not_right_is_noticed() -> None:
    assert call_faults(said("2-1", 2, "7,8", reasoning="c", calls=REST), end("2-2")) == ["wrong"]


def test_of_a_cancelled_call_the_beginning_must_be_right() -> None:
    cancelled = RequestPlan("r", "x", 4, cancel_after=1)
    assert call_faults(end("2-1", 2, "cancelled"), request=cancelled) == []
    wrong = said("2-1", 2, "7", calls='[{"index":0,"arguments":":: "}]')
    assert call_faults(wrong, end("2-2", 3, "cancelled"), request=cancelled) == ["wrong"]


def test_what_stopped_a_reply_must_be_the_same() -> None:
    stopped = Seen("2-2", {**end("2-2").fields, "stop_string": "END"}, 1.0)
    assert faults([*GOOD[:-1], stopped]) == ["wrong"]


def test_a_cancelled_reply_may_stop_anywhere_but_not_differ() -> None:
    cancelled = RequestPlan("r", "x", 4, cancel_after=1)
    assert faults([OWN, chunk("1-1", 0, "5,6", "ab"), end("1-2", 2, "cancelled")], cancelled) == []
    assert faults([OWN, chunk("1-1", 0, "5,9", "ab"), end("1-2", 2, "cancelled")], cancelled) == ["wrong"]
    assert faults([OWN, chunk("1-1", 0, "5,6", "ax"), end("1-2", 2, "cancelled")], cancelled) == ["wrong"]


def test_what_the_stream_holds_must_be_what_was_seen() -> None:
    assert faults(GOOD, stored=[*GOOD, end("2-3")]) == ["doubled"]  # came after the reader had left
    assert faults(GOOD, stored=GOOD[1:]) == ["lost"]


def test_two_queue_entries_for_one_request() -> None:
    assert faults(GOOD, entry_ids=["1-1", "1-1"]) == []
    assert faults(GOOD, entry_ids=["1-1", "0-0"]) == []
    assert faults(GOOD, entry_ids=["1-1", "2-1"]) == ["doubled"]


def late(*events: tuple[EventKind, str, float]) -> list[str]:
    seen = [OWN, chunk("1-1", 0, "5,6", "ab"), own(2, at_s=5.0), chunk("2-1", 2, "7,8", "cd"), end("2-2")]
    history = History(
        {"r": RequestRecord(RequestPlan("r", "x", 4), seen=seen)}, [ChaosEvent(*event) for event in events]
    )
    return [problem.fault for problem in check(history, {"r": (TRUTH,)}, recovery_limit_s=1.0).problems]


def test_a_late_heir_is_noticed() -> None:
    assert late(("kill", "w1", 1.5)) == ["late"]
    assert late(("kill", "w1", 4.5)) == []
    assert late(("kill", "w1", 1.5), ("restart", "", 4.5)) == []  # nobody could have claimed it before
    assert late(("freeze", "w1", 1.5)) == ["late"]
    assert late(("kill", "w3", 1.5)) == []  # it had something else


def test_troubles_of_the_run_as_a_whole() -> None:
    history = History(left_in_queue=2, dead_letters=1, troubles=["worker w1 ended by itself with status 1"])
    problems = check(history, {}, recovery_limit_s=1.0).problems
    assert [problem.fault for problem in problems] == ["lost", "wrong", "wrong"]
