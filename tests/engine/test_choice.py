"""A token adds to a choice's reply, and may end it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.choice import ChoiceState, Ending, NewChoices, output_of
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.text.response.reading.delta import Delta
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.tokenizers_for_tests import byte_level

TOKENIZER = Tokenizer(byte_level())
EOS = 264


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text))


def choice_of(
    generated: str = "", max_model_len: int = 100, echo: str = "", **params: object
) -> tuple[Sequence, ChoiceState]:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    request = Request("r", ids("ab"), sampling, generated=(ids(generated),) if generated else (), echo=echo)
    sequence = Sequence(request, 0, 0)
    return sequence, NewChoices(TOKENIZER, (EOS,), max_model_len).of(sequence)


def push(sequence: Sequence, choice: ChoiceState, token_id: int) -> tuple[str, Ending | None]:
    sequence.token_ids.append(token_id)
    delta, ending = choice.push(token_id)
    assert not delta.reasoning
    assert not delta.tool_calls
    return delta.text, ending


def push_all(generated: tuple[int, ...], **params: object) -> tuple[str, Ending | None]:
    """Returns the text of new tokens up to the end of their choice."""
    sequence, choice = choice_of(**params)  # type: ignore[arg-type]
    whole = ""
    for token_id in generated:
        text, ending = push(sequence, choice, token_id)
        whole += text
        if ending:
            return whole, ending
    return whole, None


def test_a_stop_token_ends_a_choice_and_has_no_text() -> None:
    sequence, choice = choice_of(stop_token_ids=ids("x"))
    assert push(sequence, choice, ids("a")[0]) == ("a", None)
    assert push(sequence, choice, ids("x")[0]) == ("", Ending("stop", ids("x")[0]))
    sequence, choice = choice_of()
    assert push(sequence, choice, EOS) == ("", Ending("stop", EOS))


def test_a_stop_string_ends_a_choice_before_it() -> None:
    sequence, choice = choice_of(stop=("bc",))
    assert [push(sequence, choice, token_id) for token_id in ids("abc")] == [
        ("a", None),
        ("", None),
        ("", Ending("stop", "bc")),
    ]


def test_a_full_choice_gives_out_what_was_held_back() -> None:
    sequence, choice = choice_of(stop=("bc",), max_tokens=2)
    assert [push(sequence, choice, token_id) for token_id in ids("ab")] == [
        ("a", None),
        ("b", Ending("length")),
    ]
    sequence, choice = choice_of(max_model_len=3)
    assert push(sequence, choice, ids("a")[0]) == ("a", Ending("length"))


def test_a_choice_that_is_cut_short_gives_out_what_was_held_back() -> None:
    sequence, choice = choice_of(stop=("bc",))
    assert push(sequence, choice, ids("b")[0]) == ("", None)
    assert choice.finish() == Delta("b")


@pytest.mark.parametrize(
    ("generated", "params", "ending"),
    [
        ("", {}, None),
        ("abc", {}, None),
        ("abc", {"max_tokens": 3}, Ending("length")),
        ("abc", {"stop": ("bc",)}, Ending("stop", "bc")),
        ("abc", {"stop": ("b",)}, Ending("stop", "b")),  # it went on behind that one: an earlier worker knew none
        ("abc", {"stop_token_ids": ids("c")}, Ending("stop", ids("c")[0])),
        ("abc", {"stop_token_ids": ids("b")}, None),
        ("abc", {"stop": ("bc",), "stop_token_ids": ids("c")}, Ending("stop", ids("c")[0])),
    ],
)
def test_a_resumed_choice_knows_whether_it_had_ended(
    generated: str, params: dict[str, Any], ending: Ending | None
) -> None:
    assert choice_of(generated, **params)[1].replay() == ending


STOPS = {
    "a stop string": ((*ids("abcd"),), {"stop": ("bc",)}, "a", "abc", "bc"),
    "the longer of two": ((*ids("abcd"),), {"stop": ("c", "bc")}, "a", "abc", "bc"),
    "a stop token": ((*ids("abcd"),), {"stop_token_ids": ids("c")}, "ab", "abc", ids("c")[0]),
    "an end of sequence": ((*ids("ab"), EOS), {}, "ab", "ab", EOS),
    "a special token that is spelled": ((*ids("ab"), EOS), {"skip_special_tokens": False}, "ab", "ab<|end|>", EOS),
    "a stop token in the midst of a stop string": (
        (*ids("abcd"),),
        {"stop": ("bcd",), "stop_token_ids": ids("c")},
        "ab",
        "abc",
        ids("c")[0],
    ),
}


@pytest.mark.parametrize(("tokens", "params", "without", "included", "stop_reason"), STOPS.values(), ids=STOPS)
def test_what_stopped_a_choice_is_said_and_included_if_wanted(
    tokens: tuple[int, ...], params: dict[str, object], without: str, included: str, stop_reason: str | int
) -> None:
    ending = Ending("stop", stop_reason)
    assert push_all(tokens, **params) == (without, ending)
    assert push_all(tokens, include_stop_str_in_output=True, **params) == (included, ending)


def test_a_stop_token_that_is_text_may_complete_a_stop_string_where_both_are_included() -> None:
    params = {"stop": ("bc",), "stop_token_ids": ids("c")}
    assert push_all(ids("abc"), **params) == ("ab", Ending("stop", ids("c")[0]))
    assert push_all(ids("abc"), include_stop_str_in_output=True, **params) == ("abc", Ending("stop", "bc"))


def test_special_tokens_are_text_where_they_are_not_skipped() -> None:
    start = EOS - 1
    tokens = (start, *ids("a"), start)
    assert push_all(tokens) == ("a", None)
    assert push_all(tokens, skip_special_tokens=False) == ("<|start|>a<|start|>", None)
    assert push_all(tokens, skip_special_tokens=False, stop=("|>a",)) == ("<|start", Ending("stop", "|>a"))


def test_a_choice_begins_with_the_echo_and_a_resumed_one_does_not_repeat_it() -> None:
    sequence, choice = choice_of(echo="ab!")
    assert [push(sequence, choice, token_id) for token_id in ids("cd")] == [("ab!c", None), ("d", None)]
    sequence, choice = choice_of("c", echo="ab!")
    assert choice.replay() is None
    assert push(sequence, choice, ids("d")[0]) == ("d", None)


def test_a_choice_without_a_token_has_no_echo() -> None:
    assert choice_of(echo="ab!")[1].finish() == Delta("")


def test_the_echo_is_no_place_to_stop_in() -> None:
    assert push_all(ids("cd"), echo="ab", stop=("b", "bc")) == ("abcd", None)


def test_a_resumed_choice_goes_on_with_the_text_that_was_held_back() -> None:
    sequence, choice = choice_of("ab", stop=("bc",))
    assert choice.replay() is None
    assert push(sequence, choice, ids("d")[0]) == ("bd", None)


def test_an_output_says_where_its_tokens_stand() -> None:
    sequence, _ = choice_of("abc")
    sequence.num_cached = 1
    output = output_of(sequence, Delta("bc"), tuple(sequence.token_ids[-2:]), ending=Ending("length"))
    assert (output.offset, output.token_ids, output.num_prompt_tokens, output.num_cached_tokens) == (
        1,
        ids("bc"),
        2,
        1,
    )
    assert output_of(sequence, Delta("")).offset == 3
