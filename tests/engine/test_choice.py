"""What a token means for one choice: text, and perhaps its end."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers_for_tests import byte_level

from penstock.engine.choice import Choice, logprob_of, output_of
from penstock.engine.execution.sampling import Logprobs
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.text.stream import TextStream
from penstock.engine.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_level())
EOS = 264


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text))


def choice_of(generated: str = "", max_model_len: int = 100, **params: object) -> tuple[Sequence, Choice]:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    request = Request("r", ids("ab"), sampling, generated=(ids(generated),) if generated else ())
    sequence = Sequence(request, 0, 0)
    stream = TextStream(TOKENIZER, sampling.stop)
    return sequence, Choice(sequence, stream, frozenset(sampling.stop_ids((EOS,))), max_model_len)


def push(sequence: Sequence, choice: Choice, token_id: int) -> tuple[str, str | None]:
    sequence.token_ids.append(token_id)
    return choice.push(token_id)


def test_a_stop_token_ends_a_choice_and_has_no_text() -> None:
    sequence, choice = choice_of(stop_token_ids=ids("x"))
    assert push(sequence, choice, ids("a")[0]) == ("a", None)
    assert push(sequence, choice, ids("x")[0]) == ("", "stop")
    sequence, choice = choice_of()
    assert push(sequence, choice, EOS) == ("", "stop")


def test_a_stop_string_ends_a_choice_before_it() -> None:
    sequence, choice = choice_of(stop=("bc",))
    assert [push(sequence, choice, token_id) for token_id in ids("abc")] == [("a", None), ("", None), ("", "stop")]


def test_a_full_choice_gives_out_what_was_held_back() -> None:
    sequence, choice = choice_of(stop=("bc",), max_tokens=2)
    assert [push(sequence, choice, token_id) for token_id in ids("ab")] == [("a", None), ("b", "length")]
    sequence, choice = choice_of(max_model_len=3)
    assert push(sequence, choice, ids("a")[0]) == ("a", "length")


def test_a_choice_that_is_cut_short_gives_out_what_was_held_back() -> None:
    sequence, choice = choice_of(stop=("bc",))
    assert push(sequence, choice, ids("b")[0]) == ("", None)
    assert choice.finish() == "b"


@pytest.mark.parametrize(
    ("generated", "params", "reason"),
    [
        ("", {}, None),
        ("abc", {}, None),
        ("abc", {"max_tokens": 3}, "length"),
        ("abc", {"stop": ("bc",)}, "stop"),
        ("abc", {"stop_token_ids": ids("c")}, "stop"),
        ("abc", {"stop_token_ids": ids("b")}, None),  # it went on behind that one: an earlier worker knew no stop there
    ],
)
def test_a_resumed_choice_knows_whether_it_had_ended(generated: str, params: dict[str, object], reason: str) -> None:
    assert choice_of(generated, **params)[1].replay() == reason


def test_a_resumed_choice_goes_on_with_the_text_that_was_held_back() -> None:
    sequence, choice = choice_of("ab", stop=("bc",))
    assert choice.replay() is None
    assert push(sequence, choice, ids("d")[0]) == ("bd", None)


def test_an_output_says_where_its_tokens_stand() -> None:
    sequence, _ = choice_of("abc")
    sequence.num_cached = 1
    output = output_of(sequence, "bc", sequence.token_ids[-2:], finish_reason="length")  # type: ignore[arg-type]
    assert (output.offset, output.token_ids, output.num_prompt_tokens, output.num_cached_tokens) == (
        1,
        [*ids("bc")],
        2,
        1,
    )
    assert output_of(sequence, "").offset == 3


def test_log_probabilities_are_those_of_the_row_and_as_many_as_asked_for() -> None:
    found = Logprobs(
        sampled=np.array([-1.0, -2.0], np.float32),
        top_ids=np.array([[5, 6, 7], [8, 9, 3]], np.int32),
        top=np.array([[-0.5, -1.0, -3.0], [-0.25, -2.0, -4.0]], np.float32),
    )  # type: ignore[arg-type]
    sequence, _ = choice_of("a", logprobs=2)
    found_one = logprob_of(sequence, found, 1)
    assert found_one is not None
    assert found_one.logprob == -2.0
    assert [(top.token_id, top.logprob) for top in found_one.top] == [(8, -0.25), (9, -2.0)]
    assert logprob_of(sequence, None, 0) is None
    assert logprob_of(choice_of()[0], found, 0) is None
