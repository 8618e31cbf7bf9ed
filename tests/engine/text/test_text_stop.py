from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.errors import InvalidRequest
from penstock.engine.text.stop import StopMatcher

STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=5)
CHUNKS = st.lists(st.text("abc", max_size=5), max_size=12)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(stops=STOPS, chunks=CHUNKS, include=st.booleans())
def test_equals_a_naive_search_of_the_whole_text(stops: list[str], chunks: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include=include)
    pushed = [matcher.push(chunk) for chunk in chunks]
    released = "".join(text for text, _ in pushed)
    stop = pushed[-1][1] if pushed else None
    assert (released + matcher.flush(), stop) == naive("".join(chunks), stops, include)


@given(stops=STOPS, chunks=CHUNKS)
def test_nothing_is_held_back_of_stop_strings_that_are_included(stops: list[str], chunks: list[str]) -> None:
    matcher = StopMatcher(stops, include=True)
    for chunk in chunks:
        text, stop = matcher.push(chunk)
        if stop:
            break
        assert text == chunk


@given(stops=STOPS, chunks=CHUNKS)
def test_holds_back_only_the_beginning_of_a_stop_string(stops: list[str], chunks: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = released = ""
    for chunk in chunks:
        text, stop = matcher.push(chunk)
        if stop:
            break
        seen, released = seen + chunk, released + text
        starts = {stop[:length] for stop in stops for length in range(len(stop))}
        assert len(seen) - len(released) == max(len(start) for start in starts if seen.endswith(start))
        assert seen.startswith(released)


def test_nothing_follows_a_stop() -> None:
    matcher = StopMatcher(["\n\n", "END"])
    assert matcher.push("one\n") == ("one", None)
    assert matcher.push("two E") == ("\ntwo ", None)
    assert matcher.push("ND three") == ("", "END")
    assert matcher.push("four") == ("", "END")
    assert matcher.flush() == ""


def test_of_stops_that_end_together_the_longest_is_cut() -> None:
    assert StopMatcher(["c", "abc", "bc"]).push("xabcd") == ("x", "abc")


def test_a_stop_inside_a_longer_one_ends_first() -> None:
    assert StopMatcher(["abcd", "b"]).push("abcd") == ("a", "b")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        StopMatcher(["a", ""])
