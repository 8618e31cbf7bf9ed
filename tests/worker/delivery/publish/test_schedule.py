"""When a request's news are due: at once, with the next flush, or not while earlier ones are on their way."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from penstock.engine.request import Output, ToolCallDelta
from penstock.worker.publish.schedule import FlushSchedule
from penstock.worker.run.requests import LiveRequest
from tests.worker.delivery.delivery_lab import make_live

NOW_S = 1000.0


@dataclass
class Pace:
    interval_s: float = 10.0
    is_stretched: bool = False


def generate(live: LiveRequest, text: str, *, ends: bool = False) -> LiveRequest:
    live.add(Output(live.id, 0, live.completion_tokens, (1,), text, finish_reason="stop" if ends else None))
    return live


def begun(flushed_at_s: float = NOW_S) -> LiveRequest:
    """A request whose first text is written."""
    live = make_live()
    live.reply.has_begun, live.reply.flushed_at_s = True, flushed_at_s
    return live


@pytest.fixture
def schedule() -> FlushSchedule:
    """A schedule that has just flushed."""
    schedule = FlushSchedule(Pace())
    schedule.take(NOW_S)
    return schedule


def test_a_first_text_is_due_at_once(schedule: FlushSchedule) -> None:
    live = generate(make_live(), "a")
    schedule.add(live)
    assert schedule.due_s() == 0.0
    assert schedule.news.is_set()
    assert schedule.take(NOW_S) == [live]
    assert schedule.is_empty
    assert schedule.due_s() is None


@pytest.mark.parametrize(
    "first",
    [
        Output("r", 0, 0, (1,), "", reasoning="a"),
        Output("r", 0, 0, (1,), "", tool_calls=(ToolCallDelta(0, "", "call_1", "f"),)),
    ],
)
def test_first_reasoning_and_a_first_tool_call_are_due_at_once_too(schedule: FlushSchedule, first: Output) -> None:
    live = make_live()
    live.add(Output("r", 0, 0, (7,), ""))
    schedule.add(live)
    assert schedule.is_empty
    live.add(first)
    schedule.add(live)
    assert schedule.due_s() == 0.0


def test_what_follows_waits_for_the_next_flush(schedule: FlushSchedule) -> None:
    live = generate(begun(), "a")
    schedule.add(live)
    assert schedule.due_s() == schedule.next_flush_s == NOW_S + 10
    assert schedule.take(NOW_S + 9.9) == []
    assert schedule.take(NOW_S + 10) == [live]


def test_a_flush_without_a_reply_does_not_put_its_next_one_off(schedule: FlushSchedule) -> None:
    """Removals go with such a flush; beside a stream of short requests they would double each gap of a long one."""
    live = begun()
    assert schedule.take(NOW_S + 9) == []
    schedule.add(generate(live, "a"))
    assert schedule.due_s() == NOW_S + 10
    assert schedule.take(NOW_S + 10) == [live]


def test_replies_are_flushed_together_when_the_first_of_them_is_due(schedule: FlushSchedule) -> None:
    early, late = begun(NOW_S - 3), begun()
    schedule.add(generate(late, "a"))
    schedule.news.clear()
    schedule.add(generate(early, "a"))
    assert schedule.news.is_set()
    assert schedule.due_s() == NOW_S + 7
    assert schedule.take(NOW_S + 7) == [late, early]
    schedule.add(generate(late, "b"))
    assert schedule.due_s() == NOW_S + 17


def test_what_follows_a_first_text_waits_from_then_on(schedule: FlushSchedule) -> None:
    live = generate(make_live(), "a")
    schedule.add(live)
    assert schedule.take(NOW_S + 4) == [live]
    live.reply.has_begun = True
    schedule.add(generate(live, "b"))
    assert schedule.due_s() == NOW_S + 14


def test_a_token_without_text_waits_for_one_that_has_some(schedule: FlushSchedule) -> None:
    live = generate(make_live(), "")
    schedule.add(live)
    assert schedule.is_empty
    schedule.note_output(generate(live, "a"), [live])
    assert schedule.due_s() == 0.0


@pytest.mark.parametrize("is_gone", [True, False])
def test_nothing_is_due_for_a_request_that_is_gone_or_whose_writes_are_under_way(
    schedule: FlushSchedule, is_gone: bool
) -> None:
    live = generate(begun(), "a")
    if is_gone:
        live.let_go()
    else:
        live.reply.num_unsettled = 1
    schedule.add(live)
    assert schedule.is_empty


def test_what_is_let_go_of_meanwhile_is_not_taken(schedule: FlushSchedule) -> None:
    live = generate(make_live(), "a")
    schedule.add(live)
    live.let_go()
    assert schedule.take(NOW_S) == []


@pytest.mark.parametrize(("is_stretched", "runs_another", "due_s"), [
    (False, True, 0.0), (True, True, NOW_S + 10), (True, False, 10.0),
])  # fmt: skip
def test_an_end_waits_only_while_processors_are_short_and_others_run(
    is_stretched: bool, runs_another: bool, due_s: float
) -> None:
    schedule = FlushSchedule(Pace(is_stretched=is_stretched))
    schedule.take(NOW_S)
    live = begun()
    others = [live, begun()] if runs_another else [live]
    schedule.note_output(generate(live, "a", ends=True), others)
    assert schedule.due_s() == due_s


def test_an_urgent_request_is_taken_once(schedule: FlushSchedule) -> None:
    live = generate(begun(), "a")
    schedule.add(live)
    live.reply.is_urgent = True
    schedule.add(live)
    assert schedule.take(NOW_S + 10) == [live]
    assert schedule.is_empty
