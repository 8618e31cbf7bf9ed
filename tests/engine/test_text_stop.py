from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.errors import InvalidRequest
from penstock.engine.text.stop import StopMatcher

STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=5)
CHUNKS = st.lists(st.text("abc", max_size=5), max_size=12)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@given(stops=STOPS, chunks=CHUNKS)
def test_equals_a_naive_search_of_the_whole_text(stops: list[str], chunks: list[str]) -> None:
    matcher = StopMatcher(stops)
    pushed = [matcher.push(chunk) for chunk in chunks]
    released = "".join(text for text, _ in pushed)
    stopped = bool(pushed) and pushed[-1][1]
    assert (released + matcher.flush(), stopped) == naive("".join(chunks), stops)


@given(stops=STOPS, chunks=CHUNKS)
def test_holds_back_only_the_beginning_of_a_stop_string(stops: list[str], chunks: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = released = ""
    for chunk in chunks:
        text, stopped = matcher.push(chunk)
        if stopped:
            break
        seen, released = seen + chunk, released + text
        starts = {stop[:length] for stop in stops for length in range(len(stop))}
        assert len(seen) - len(released) == max(len(start) for start in starts if seen.endswith(start))
        assert seen.startswith(released)


def test_nothing_follows_a_stop() -> None:
    matcher = StopMatcher(["\n\n", "END"])
    assert matcher.push("one\n") == ("one", False)
    assert matcher.push("two E") == ("\ntwo ", False)
    assert matcher.push("ND three") == ("", True)
    assert matcher.push("four") == ("", True)
    assert matcher.flush() == ""


def test_of_stops_that_end_together_the_longest_is_cut() -> None:
    assert StopMatcher(["c", "abc", "bc"]).push("xabcd") == ("x", True)


def test_a_stop_inside_a_longer_one_ends_first() -> None:
    assert StopMatcher(["abcd", "b"]).push("abcd") == ("a", True)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        StopMatcher(["a", ""])
