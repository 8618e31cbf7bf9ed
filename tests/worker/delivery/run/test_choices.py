"""Pending output of a choice."""

from __future__ import annotations

import pytest

from penstock.engine.request import FinishReason, Output, TokenLogprob, ToolCallDelta
from penstock.worker.run.choices import ChoiceBuffer, Pending, merged, outcome_of

LOGPROB = TokenLogprob(7, "x", b"x", -0.5, ())
BEGIN = ToolCallDelta(0, "{", "call_1", "f")
RICH = Output("r", 0, 0, (7,), "a", (LOGPROB,), reasoning="b", tool_calls=(BEGIN,), prompt_logprobs=(None, LOGPROB))


def test_what_is_put_back_comes_before_what_came_since() -> None:
    choice = ChoiceBuffer(0)
    choice.add(RICH)
    taken = choice.take()
    assert choice.pending == Pending()
    choice.add(Output("r", 0, 1, (8,), "c", (LOGPROB,), reasoning="d", tool_calls=(ToolCallDelta(0, "}"),)))
    assert taken.then(choice.pending) == Pending(
        [7, 8], ["a", "c"], ["b", "d"], [BEGIN, ToolCallDelta(0, "}")], [LOGPROB, LOGPROB], (None, LOGPROB)
    )


@pytest.mark.parametrize(
    ("output", "is_readable"),
    [
        (Output("r", 0, 0, (7,), "a"), True),
        (Output("r", 0, 0, (7,), "", reasoning="a"), True),
        (Output("r", 0, 0, (7,), "", tool_calls=(BEGIN,)), True),
        (Output("r", 0, 0, (7,), "", (LOGPROB,), prompt_logprobs=(None,)), False),
    ],
)
def test_what_a_reader_can_show(output: Output, is_readable: bool) -> None:
    choice = ChoiceBuffer(0)
    assert not choice.pending.is_readable
    choice.add(output)
    assert choice.pending.is_readable == is_readable


def test_a_choice_whose_last_chunk_is_published_takes_no_more() -> None:
    choice = ChoiceBuffer(0, num_published=2, finish_reason="stop", is_closed=True)
    choice.add(Output("r", 0, 2, (3,), "c", finish_reason="cancelled", reasoning="d", tool_calls=(BEGIN,)))
    assert choice.pending == Pending()


def test_neighbours_of_one_call_are_joined_and_no_others() -> None:
    second = ToolCallDelta(1, "", "call_2", "g")
    deltas = [BEGIN, ToolCallDelta(0, '"a"'), ToolCallDelta(0, "}"), second, ToolCallDelta(1, "{}")]
    assert merged(deltas) == [ToolCallDelta(0, '{"a"}', "call_1", "f"), ToolCallDelta(1, "{}", "call_2", "g")]
    assert merged([ToolCallDelta(0, "}"), second]) == [ToolCallDelta(0, "}"), second]
    assert merged([]) == []


@pytest.mark.parametrize(
    ("reasons", "whole"),
    [
        (["stop", None], None),
        (["stop", "stop"], "stop"),
        (["stop", "tool_calls"], "tool_calls"),
        (["tool_calls", "length"], "length"),
        (["length", "cancelled"], "cancelled"),
        (["error", "cancelled"], "error"),
    ],
)
def test_the_gravest_reason_is_that_of_the_whole(
    reasons: list[FinishReason | None], whole: FinishReason | None
) -> None:
    assert outcome_of(ChoiceBuffer(at, finish_reason=reason) for at, reason in enumerate(reasons)) == whole
