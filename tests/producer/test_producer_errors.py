"""Each error is also one of Python's, and its message names its subject."""

from __future__ import annotations

import pytest

from penstock.protocol import errors
from penstock.protocol.reply import Choice, Reply, Timings, Usage

REPLY = Reply("r", "error", (Choice(0, "so far", (1, 2), None, "error"),), Usage(1, 0, 2), Timings(None, None, None))


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.BadAddress, ValueError),
        (errors.ConnectionLost, ConnectionError),
        (errors.ReplyTimeout, TimeoutError),
        (errors.UnknownRequest, LookupError),
    ],
)
def test_code_that_knows_only_python_s_errors_catches_ours(kind: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(kind, builtin)
    assert issubclass(kind, errors.PenstockError)


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (errors.QueueFull("q", 7, 5), ["'q'", "7", "5"]),
        (errors.NotDurable("r", "no fsync within 5 s"), ["r", "no fsync within 5 s"]),
        (errors.RequestRefused(None, "invalid_request", "top_p: 2"), ["(not sent)", "invalid_request", "top_p: 2"]),
        (errors.RequestRefused("r", "too_long", "9 tokens"), ["request r ", "too_long", "9 tokens"]),
        (errors.RequestFailed("r", "engine_error", "NaN", REPLY), ["request r ", "engine_error", "NaN"]),
        (errors.ReplyTimeout("r", 1.5), ["r", "1.5 s"]),
        (errors.UnknownRequest("q", "r"), ["'q'", "'r'"]),
        (errors.ReplyGone("r", "it expired"), ["r", "it expired"]),
        (errors.ReplyCorrupt("r", "a gap"), ["r", "a gap"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_messages_name_what_they_are_about(error: Exception, named: list[str]) -> None:
    assert all(part in str(error) for part in named)


def test_what_a_caller_acts_on_is_an_attribute() -> None:
    full = errors.QueueFull("q", 7, 5)
    assert (full.queue, full.length, full.limit) == ("q", 7, 5)
    failed = errors.RequestFailed("r", "engine_error", "NaN", REPLY)
    assert (failed.request_id, failed.code, failed.message, failed.reply.text) == ("r", "engine_error", "NaN", "so far")
    unknown = errors.UnknownRequest("q", "r")
    assert (unknown.queue, unknown.request_id) == ("q", "r")
