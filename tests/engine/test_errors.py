"""Errors have codes for clients, and shorten values from strangers' files."""

from __future__ import annotations

from penstock.engine import CheckpointError, ConfigError, EngineError, InvalidRequest, PromptTooLong, RequestError
from penstock.engine.errors import failure_message, shown


def test_all_are_one_family_and_only_requests_have_codes() -> None:
    assert all(issubclass(error, EngineError) for error in (CheckpointError, ConfigError, RequestError))
    assert (InvalidRequest.code, PromptTooLong.code) == ("invalid_request", "too_long")
    assert not hasattr(ConfigError, "code")


def test_a_failure_names_what_was_raised() -> None:
    assert failure_message(KeyError("x")) == "the engine failed at this request: KeyError: 'x'"


def test_a_value_from_a_file_is_shown_in_short_however_large_or_deep() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert len(shown(deep)) < 200
    assert len(shown("x" * 10**6)) < 200
    assert len(shown({str(i): i for i in range(10**4)})) < 400
    assert shown(1.5) == "1.5"
