"""An end as its reader sees it, in logs and metrics, and among the dead letters."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.engine.request import Output
from penstock.protocol import keys
from penstock.protocol.scripts import Bill
from penstock.protocol.wire import MAX_FIELDS, EndEntry, GenerateRequest, WireError, decode_reply
from penstock.worker.config import WorkerConfig
from penstock.worker.metrics import WorkerMetrics
from penstock.worker.publish import ending
from penstock.worker.publish.ending import dead_letter, dead_letter_of, end_entry, kept_ms, printable, unclaimed_end
from penstock.worker.publish.writes import Burial, acknowledge, refresh
from penstock.worker.run.choices import ChoiceBuffer
from penstock.worker.run.requests import Asked, LiveRequest
from tests.worker.delivery.delivery_lab import FixedClock, make_live

CONFIG = WorkerConfig(queue="q", name="w")
BODY = {b"id": b"r", b"prompt": b"x"}


def finished(clock: FixedClock) -> LiveRequest:
    """A request enqueued at 0 ms, claimed at 500, with its first token at 750 and its end at 1750."""
    live = make_live(n=3)
    for index, (reason, after_s) in enumerate((("stop", 0.25), ("length", 1.0), ("stop", 0.0))):
        clock.now_s += after_s
        live.add(Output("r", index, 0, (1,), "a", finish_reason=reason, num_prompt_tokens=7))  # type: ignore[arg-type]
    return live


def letter_fields(letter: Burial) -> dict[bytes, bytes]:
    """Returns the fields of the letter, without those that the script needs to keep it."""
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in letter.command]
    start = parts.index(b"id")
    return dict(zip(parts[start::2], parts[start + 1 :: 2], strict=True))


def test_an_end_says_when_what_happened(clock: FixedClock) -> None:
    end = end_entry(finished(clock))
    assert (end.finish_reason, end.finish_reasons) == ("length", ("stop", "length", "stop"))
    assert (end.queued_ms, end.ttft_ms, end.total_ms) == (500, 750, 1750)
    assert (end.prompt_tokens, end.completion_tokens) == (7, 3)


@pytest.mark.parametrize("stop", ["END", 7, None])
def test_an_end_says_what_stopped_the_only_choice(clock: FixedClock, stop: str | int | None) -> None:
    live, several = make_live(), make_live(n=2)
    live.add(Output("r", 0, 0, (1,), "a", finish_reason="stop", stop_reason=stop))
    end = end_entry(live)
    assert end.stop_reason == stop
    assert (end.stop_string, end.stop_token_id) == (("END", None) if stop == "END" else (None, stop))
    for index in range(2):
        several.add(Output("r", index, 0, (1,), "a", finish_reason="stop", stop_reason=stop))
    assert end_entry(several).stop_reason is None  # the last chunk of each says it


def test_tokens_of_reasoning_are_those_of_all_choices(clock: FixedClock) -> None:
    live = finished(clock)
    assert end_entry(live).reasoning_tokens is None  # nothing is known of any
    live.choices[0].num_reasoning = 2
    assert end_entry(live).reasoning_tokens == 2


def test_of_what_was_resumed_nobody_knows_when_the_first_token_came(clock: FixedClock) -> None:
    live = make_live()
    live.resume([ChoiceBuffer(0, num_published=4)])
    live.add(Output("r", 0, 4, (1,), "a", finish_reason="stop"))
    end = end_entry(live)
    assert (end.ttft_ms, end.completion_tokens, end.finish_reasons) == (None, 5, None)


def test_choices_that_had_not_ended_end_as_the_whole_does(clock: FixedClock) -> None:
    live = make_live(n=2)
    live.add(Output("r", 0, 0, (1,), "a", finish_reason="stop"))
    live.end("cancelled")
    assert end_entry(live).finish_reasons == ("stop", "cancelled")


def test_an_error_has_a_code_and_a_message_that_redis_takes(clock: FixedClock) -> None:
    live = make_live()
    live.fail("invalid_request", "a\ud800" + "x" * 10**4)
    end = end_entry(live)
    assert (end.finish_reason, end.code) == ("error", "invalid_request")
    assert end.message == printable("a\ud800" + "x" * 10**4)


def test_messages_become_printable_and_short() -> None:
    assert printable("a\ud800b") == "a\\ud800b"
    assert printable("x" * 10**6) == "x" * ending.MAX_MESSAGE_CHARS


def test_a_request_that_cannot_be_claimed_is_told_so() -> None:
    asked = GenerateRequest(prompt="x")
    command = unclaimed_end("r", asked, "a\ud800", WorkerConfig(queue="q", reply_ttl_after_end_s=60))
    assert command[3] == keys.reply("q", "r")
    fields = [str(part) for part in command[command.index("type") :]]
    end = decode_reply(dict(zip(fields[::2], fields[1::2], strict=True)))
    assert isinstance(end, EndEntry)
    assert (end.finish_reason, end.code, end.message) == ("error", "reply_unwritable", "a\\ud800")
    assert 60_000 in command


@pytest.mark.parametrize(
    ("asked", "kept_s"),
    [
        (GenerateRequest(prompt="x"), 100),
        (GenerateRequest(prompt="x", keep_s=60), 60),
        (GenerateRequest(prompt="x", keep_s=500), 500),
        (GenerateRequest(prompt="x", keep_s=500.5), 100),  # it is refused
        (WireError("invalid_request", "no", request_id="r"), 100),
    ],
)
def test_a_reply_is_kept_as_its_request_says(asked: Asked, kept_s: int) -> None:
    config = WorkerConfig(queue="q", reply_ttl_after_end_s=100, max_keep_s=500)
    assert kept_ms(asked, config) == kept_s * 1000
    assert kept_s * 1000 in unclaimed_end("r", asked, "why", config)


def test_an_end_is_counted_and_logged_without_its_message(clock: FixedClock) -> None:
    metrics, live = WorkerMetrics(), finished(clock)
    live.error = ("engine_error", "quotes the prompt")
    with capture_logs() as logs:
        ending.observe_end(metrics, live, end_entry(live))
    assert metrics.requests.labels(finish_reason="length")._value.get() == 1
    assert metrics.queue_seconds.labels(band="usual")._sum.get() == 0.5
    assert metrics.first_token_seconds._sum.get() == 0.75
    assert metrics.errors.labels(code="engine_error")._value.get() == 1
    assert (metrics.prompt_tokens._value.get(), metrics.generation_tokens._value.get()) == (7, 3)
    assert (metrics.prompt_lengths._sum.get(), metrics.reply_lengths._sum.get()) == (7, 3)
    assert metrics.request_seconds._sum.get() == 1.75
    assert metrics.token_seconds._sum.get() == 0.5  # a second between three tokens
    (log,) = logs
    assert (log["event"], log["epoch"], log["code"], log["total_ms"]) == ("request_ended", 5, "engine_error", 1750)
    assert "quotes the prompt" not in str(log)


def test_one_token_has_no_pace(clock: FixedClock) -> None:
    metrics, live = WorkerMetrics(), make_live()
    live.add(Output("r", 0, 0, (1,), "a", finish_reason="stop"))
    ending.observe_end(metrics, live, end_entry(live))
    (count,) = [sample.value for metric in metrics.token_seconds.collect() for sample in metric.samples
                if sample.name.endswith("_count")]  # fmt: skip
    assert count == 0


def test_a_loss_is_counted_by_its_reason() -> None:
    metrics = WorkerMetrics()
    with capture_logs() as logs:
        ending.observe_loss(metrics, make_live(), "fenced")
    assert metrics.dropped.labels(reason="fenced")._value.get() == 1
    assert [(log["event"], log["reason"], log["epoch"]) for log in logs] == [("request_dropped", "fenced", 5)]


def test_what_is_lost_at_once_is_one_line_for_each_reason() -> None:
    lost = [(make_live(), "fenced") for _ in range(64)]
    with capture_logs() as logs:
        ending.log_losses([*lost, (make_live(), "gone")])
    assert [(log["reason"], log.get("count"), len(log.get("others", ()))) for log in logs] == [
        ("fenced", 64, 7), ("gone", None, 0),
    ]  # fmt: skip


def test_a_letter_that_is_lost_is_counted_and_named() -> None:
    metrics, letter = WorkerMetrics(), dead_letter(make_live(), "too_many_crashes", "why", CONFIG)
    with capture_logs() as logs:
        ending.observe_refusal(metrics, letter, ValueError("refused"))
    assert metrics.lost_dead_letters._value.get() == 1
    (log,) = logs
    assert (log["event"], log["request_id"], log["code"]) == ("dead_letter_lost", "r", "too_many_crashes")
    assert (log["entry"], log["error"]) == (make_live().entry_id, "refused")


@pytest.mark.parametrize("write", [acknowledge("q", "w", [Bill("1-1", "", None)]), refresh(make_live(), 1)[0]])
def test_another_write_that_redis_refuses_is_logged(write: Any) -> None:
    metrics = WorkerMetrics()
    with capture_logs() as logs:
        ending.observe_refusal(metrics, write, ValueError("refused"))
    assert [(log["event"], log["command"]) for log in logs] == [("write_refused", write.command[0])]
    assert metrics.lost_dead_letters._value.get() == 0


def test_a_letter_tells_the_request_s_history_and_keeps_its_fields() -> None:
    live = make_live(attempts=4, crashes=3, strikes=2, handbacks=1)
    letter = dead_letter(live, "too_many_crashes", "three", CONFIG)
    assert (letter.request_id, letter.entry_ids, letter.is_malformed) == ("r", (live.entry_id,), False)
    assert keys.dead("q") in letter.command
    assert letter_fields(letter) == {
        b"id": b"r", b"entry": live.entry_id.encode(), b"code": b"too_many_crashes", b"message": b"three",
        b"worker": b"w", b"attempts": b"4", b"crashes": b"3", b"strikes": b"2", b"handbacks": b"1",
        b"field:prompt": b"x",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("code", "fields", "is_malformed"),
    [
        ("too_many_crashes", BODY, False),
        ("given_up", {b"strange": b"x"}, True),  # no request
        ("invalid_request", BODY, True),
        ("too_large", {}, True),
    ],
)
def test_what_never_was_a_request_goes_among_the_malformed_whose_share_is_a_tenth(
    code: str, fields: dict[bytes, bytes], is_malformed: bool
) -> None:
    config = WorkerConfig(queue="q", name="w", max_dead_entries=70, max_dead_bytes=5000, dead_ttl_s=3)
    letter = dead_letter_of("r", "1-1", fields, code, "", config)
    assert letter.is_malformed == is_malformed
    assert (keys.malformed if is_malformed else keys.dead)("q") in letter.command
    share = 10 if is_malformed else 1
    at = letter.command.index("id")
    assert letter.command[at - 3 : at] == (70 // share, 5000 // share, 3000)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({"max_body_bytes": 5}, BODY),
        ({"max_dead_bytes": 5}, BODY),
        ({}, {str(number).encode(): b"" for number in range(MAX_FIELDS + 1)}),
    ],
)
def test_fields_over_a_limit_are_left_out(config: dict[str, Any], fields: dict[bytes, bytes]) -> None:
    letter = dead_letter_of("r", "1-1", fields, "given_up", "why", WorkerConfig(queue="q", name="w", **config))
    assert letter_fields(letter).keys() == {b"id", b"entry", b"code", b"message", b"worker"}


def test_letters_are_counted_by_their_kind() -> None:
    metrics = WorkerMetrics()
    for code in ("given_up", "too_large", "given_up"):
        ending.observe_letter(metrics, dead_letter_of("r", "1-1", BODY, code, "", CONFIG))
    counts = [metrics.dead_letters.labels(kind=kind)._value.get() for kind in ("request", "malformed")]
    assert counts == [2, 1]
