"""Phases, clocks and buffers of a request, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from penstock.engine.request import FinishReason, Output, TokenLogprob
from penstock.worker.run.choices import ChoiceBuffer
from penstock.worker.run.entries import QueueEntry
from penstock.worker.run.requests import LiveRequest, Over, Parked, Phase, RequestTable, ServerClock
from tests.worker.delivery.delivery_lab import ENQUEUED_MS, NOW_S, FixedClock, make_live


@pytest.fixture
def table() -> RequestTable:
    return RequestTable(lambda _: None)


def bring_to(live: LiveRequest, phase: Phase) -> LiveRequest:
    match phase:
        case Phase.RESTORED:
            live.resume([ChoiceBuffer(0)])
        case Phase.ADMITTED:
            live.admit(1)
        case Phase.RUNNING:
            live.start()
        case Phase.ENDED:
            live.end("stop")
        case Phase.GONE:
            live.let_go()
    return live


@pytest.mark.parametrize("phase", [Phase.ADMITTED, Phase.RUNNING, Phase.ENDED, Phase.GONE])
def test_a_request_never_goes_back(phase: Phase) -> None:
    live = bring_to(make_live(), phase)
    steps: tuple[tuple[Callable[[], object], Phase], ...] = (
        (lambda: live.admit(1), Phase.ADMITTED),
        (live.start, Phase.RUNNING),
    )
    for step, before in steps:
        if phase >= before:
            with pytest.raises(ValueError, match=f"'r' is {phase.name} and can't become {before.name}"):
                step()
    assert live.phase is phase


def test_what_a_request_says_of_its_phase() -> None:
    live = make_live(is_restored=False)
    seen = []
    for phase in Phase:
        bring_to(live, phase)
        seen.append((live.phase, live.is_running, live.has_ended, live.is_gone))
    assert seen == [(phase, phase is Phase.RUNNING, phase is Phase.ENDED, phase is Phase.GONE) for phase in Phase]


def test_the_first_end_is_kept() -> None:
    live = make_live()
    live.end("cancelled")
    live.end("expired")
    live.fail("internal_error", "too late", is_dead=True)
    assert (live.finish_reason, live.error, live.is_dead) == ("cancelled", None, False)


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_failure_is_an_end_with_a_code(is_dead: bool) -> None:
    live = make_live()
    live.fail("too_large", "9 bytes", is_dead=is_dead)
    live.end("stop")
    assert (live.finish_reason, live.error, live.is_dead) == ("error", ("too_large", "9 bytes"), is_dead)


def test_what_was_let_go_of_does_not_end_any_more() -> None:
    live = bring_to(make_live(), Phase.GONE)
    live.end("stop")
    live.fail("internal_error", "")
    assert (live.phase, live.finish_reason, live.error) == (Phase.GONE, None, None)


def test_the_server_s_clock_goes_on_with_this_process_s(clock: FixedClock) -> None:
    server = ServerClock(10_000, clock.now_s)
    assert server.now_ms() == 10_000
    clock.now_s += 1.5
    assert server.now_ms() == 11_500
    assert server.monotonic_at(12_000) == NOW_S + 2.0


def test_a_deadline_counts_from_the_enqueue_and_is_met_once() -> None:
    live = make_live()  # claimed 0.5 s after its enqueue
    live.resume([ChoiceBuffer(0)], timeout_s=2.0)
    assert live.deadline_s == NOW_S + 1.5
    assert not live.is_overdue(NOW_S + 1.4)
    assert live.is_overdue(NOW_S + 1.5)
    assert not live.is_overdue(NOW_S + 9)  # its end is under way


def test_without_a_deadline_nothing_is_overdue() -> None:
    assert not make_live().is_overdue(float("inf"))


def test_an_entry_id_of_the_future_does_not_put_the_deadline_off() -> None:
    """Whoever enqueues may choose the id."""
    live = make_live(entry_id=f"{ENQUEUED_MS + 10**9}-0")
    assert live.enqueued_ms == ENQUEUED_MS + 500
    live.resume([ChoiceBuffer(0)], timeout_s=2.0)
    assert live.deadline_s == NOW_S + 2.0


@pytest.mark.parametrize("num_published", [0, 3])
def test_a_first_text_is_not_held_back_and_its_token_timed_unless_an_earlier_claim_gave_it(
    clock: FixedClock, num_published: int
) -> None:
    live = make_live()
    live.resume([ChoiceBuffer(0, num_published)])
    assert live.is_resumed == live.reply.has_begun == bool(num_published)
    clock.now_s += 0.25
    live.add(Output("r", 0, num_published, (1,), "a"))
    clock.now_s += 1
    live.add(Output("r", 0, num_published + 1, (2,), "b"))
    assert live.first_token_ms == (None if num_published else ENQUEUED_MS + 750)
    assert live.completion_tokens == num_published + 2


def test_outputs_wait_in_order_each_with_its_choice() -> None:
    live = make_live(n=2)
    logprobs = (TokenLogprob(7, "x", b"x", -0.5, ()),)
    live.add(Output("r", 1, 0, (7,), "x", logprobs, num_prompt_tokens=4, num_cached_tokens=2))
    live.add(Output("r", 0, 0, (1, 2), "ab"))
    live.add(Output("r", 0, 2, (3,), ""))  # a token may have no text yet
    first, second = live.choices
    assert (first.pending.token_ids, first.pending.text) == ([1, 2, 3], ["ab"])
    assert (second.pending.token_ids, second.pending.text, second.pending.logprobs) == ([7], ["x"], list(logprobs))
    assert (live.prompt_tokens, live.cached_tokens) == (4, 2)


@pytest.mark.parametrize(
    ("reasons", "whole"),
    [
        (("stop", "length", "stop"), "length"),
        (("stop", "stop", "stop"), "stop"),
        (("stop", "cancelled", "expired"), "cancelled"),
        (("length", "expired", "stop"), "expired"),
        (("cancelled", "stop", "error"), "error"),
    ],
)
def test_the_whole_ends_with_its_last_choice_for_the_gravest_reason(
    reasons: tuple[FinishReason, ...], whole: FinishReason
) -> None:
    live = make_live(n=3)
    for index, reason in enumerate(reasons):
        assert not live.has_ended
        assert live.outcome is None
        live.add(Output("r", index, 0, (1,), "a", finish_reason=reason))
    assert live.has_ended
    assert live.finish_reason == whole


def test_an_error_of_the_engine_is_told_and_its_cause_logged() -> None:
    live = make_live()
    with capture_logs() as logs:
        live.add(Output("r", 0, 0, (), "", finish_reason="error", error="out of pages", cause=ValueError("7")))
    assert (live.finish_reason, live.error) == ("error", ("engine_error", "out of pages"))
    ((event, cause),) = [(log["event"], log["exc_info"]) for log in logs]
    assert event == "engine_error"
    assert str(cause) == "7"


def test_the_table_knows_entries_before_they_are_claimed(table: RequestTable) -> None:
    table.taking.add("1-1")
    table.park(Parked("q", "p", QueueEntry("2-2", {}, 0), 0, None, 0.0))
    live = make_live(entry_id="3-3")
    table.add(live)
    assert table.entry_ids == {"1-1", "2-2", "3-3"}
    assert (len(table), list(table), table.get("r"), table.get("s")) == (1, [live], live, None)


@pytest.mark.parametrize(
    ("phase", "is_busy"),
    [(Phase.RESTORED, False), (Phase.ADMITTED, False), (Phase.RUNNING, True), (Phase.ENDED, True)],
)
def test_only_what_runs_or_has_yet_to_end_keeps_suspects_waiting(
    table: RequestTable, phase: Phase, is_busy: bool
) -> None:
    assert not table.is_busy
    table.add(bring_to(make_live(), phase))
    assert table.is_busy == is_busy
    table.taking.add("9-9")
    assert table.is_busy


def test_what_is_removed_is_gone_and_its_successor_stays(table: RequestTable) -> None:
    """The same request may have been claimed again meanwhile."""
    first, second = make_live(epoch=5), make_live(epoch=6)
    table.add(first)
    table.add(second)
    table.remove(first)
    assert first.is_gone
    assert table.get("r") is second
    table.remove(second)
    assert not len(table)


def test_what_is_let_go_of_is_aborted_and_pending_entries_are_looked_for() -> None:
    aborted: list[str] = []
    table = RequestTable(aborted.append)
    live = make_live()
    table.add(live)
    table.must_recover = False
    table.let_go(live)
    assert (aborted, table.must_recover, live.is_gone, len(table)) == (["r"], True, True, 0)


async def test_whoever_waits_for_the_table_wakes_at_each_change(table: RequestTable) -> None:
    live = make_live()
    changes: list[Callable[[], object]] = [lambda: table.add(live), lambda: table.remove(live), table.recover]
    for change in changes:
        waiter = asyncio.ensure_future(table.changed.wait())
        await asyncio.sleep(0)
        assert not waiter.done()
        change()
        await waiter


@pytest.mark.parametrize("phase", [Phase.ENDED, Phase.GONE])
@pytest.mark.parametrize("comes_first", [False, True])
async def test_what_is_made_for_a_request_is_given_up_once_it_is_over(phase: Phase, comes_first: bool) -> None:
    live, work = make_live(), asyncio.get_running_loop().create_future()
    if comes_first:
        bring_to(live, phase)
    waiting = asyncio.ensure_future(live.unless_over(work))
    await asyncio.sleep(0)
    bring_to(live, phase)
    with pytest.raises(Over):
        await waiting
    assert work.cancelled()


async def test_what_is_made_for_a_request_is_what_it_gets() -> None:
    live, work = make_live(), asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(live.unless_over(work))
    await asyncio.sleep(0)
    bring_to(live, Phase.ADMITTED)
    work.set_result("made")
    assert await waiting == "made"
