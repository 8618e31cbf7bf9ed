from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.text.stop import StopMatcher
from penstock.engine.text.stream import TextStream
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.tokenizers_for_tests import byte_level, llama2

TOKENIZERS = (Tokenizer(byte_level()), Tokenizer(llama2()))


def run(stream: TextStream, ids: list[int]) -> tuple[str, str | None]:
    released = ""
    for id_ in ids:
        text, stop = stream.push(id_)
        released += text
        if stop:
            return released, stop
    return released + stream.finish(), None


@given(data=st.data(), tokenizer=st.sampled_from(TOKENIZERS))
def test_text_is_the_decode_up_to_the_first_stop(data: st.DataObject, tokenizer: Tokenizer) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=25))
    stops = data.draw(st.lists(st.text("ab é\ufffd", min_size=1, max_size=3), max_size=3))
    matcher = StopMatcher(stops)
    text, stop = matcher.push(tokenizer.decode(ids))
    released, _ = run(TextStream(tokenizer, stops), ids)
    assert released == (text if stop else text + matcher.flush())


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte level", "llama2"])
def test_a_text_that_ends_within_a_stop_string_is_whole(tokenizer: Tokenizer) -> None:
    ids = list(tokenizer.encode("b a"))
    text = tokenizer.decode(ids)
    assert text.endswith("a")
    assert run(TextStream(tokenizer, ["ab"]), ids) == (text, None)


@given(data=st.data(), tokenizer=st.sampled_from(TOKENIZERS))
def test_with_its_stop_string_the_text_is_longer_by_that(data: st.DataObject, tokenizer: Tokenizer) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=25))
    stops = data.draw(st.lists(st.text("ab é\ufffd", min_size=1, max_size=3), max_size=3))
    without, stop = run(TextStream(tokenizer, stops), ids)
    text, same_stop = run(TextStream(tokenizer, stops, include_stop=True), ids)
    assert same_stop == stop
    assert text == without + (stop or "") or (stop is None and text in [without + one for one in stops])


@given(data=st.data(), tokenizer=st.sampled_from(TOKENIZERS))
def test_a_delimiter_stands_where_its_token_does(data: st.DataObject, tokenizer: Tokenizer) -> None:
    """A character or a run of bytes before it may be half complete."""
    before, after = (data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12)) for _ in range(2))
    delimiter = tokenizer.special_token_ids[data.draw(st.sampled_from(sorted(tokenizer.special_token_ids)))]
    stream = TextStream(tokenizer, delimiters={delimiter: "\ud800"})
    text, _ = run(stream, [*(id_ for id_ in before if id_ != delimiter), delimiter])
    assert text == run(TextStream(tokenizer), [id_ for id_ in before if id_ != delimiter])[0] + "\ud800"
    behind, _ = run(stream, [id_ for id_ in after if id_ != delimiter])
    assert "\ud800" not in behind
    assert behind == run(TextStream(tokenizer), [id_ for id_ in after if id_ != delimiter])[0]


def test_a_stop_over_token_borders_ends_the_stream() -> None:
    tokenizer = TOKENIZERS[0]
    stream = TextStream(tokenizer, ["\n\n"])
    pushed = [stream.push(id_) for id_ in tokenizer.encode("a\n\nb")]
    assert pushed == [("a", None), ("", None), ("", "\n\n"), ("", "\n\n")]
    assert stream.finish() == ""


def test_a_stop_completed_by_the_last_flush_is_left_out() -> None:
    tokenizer = TOKENIZERS[1]
    stream = TextStream(tokenizer, ["é"])
    released = [stream.push(3 + byte)[0] for byte in "xé".encode()]
    assert (released, stream.finish()) == (["", "", ""], "x")


def test_no_stop_string_ends_a_text_before_its_least_number_of_tokens() -> None:
    tokenizer = TOKENIZERS[0]
    ids = list(tokenizer.encode("ab ab ab"))
    for min_tokens, expected in ((0, ""), (2, ""), (3, "ab "), (5, "ab "), (6, "ab ab "), (len(ids) + 1, "ab ab ab")):
        assert run(TextStream(tokenizer, ["ab"], min_tokens=min_tokens), ids)[0] == expected, min_tokens


def test_a_stop_string_that_began_before_that_ends_the_text_behind_it() -> None:
    stream = TextStream(TOKENIZERS[0], ["a b"], min_tokens=3)
    assert run(stream, list(TOKENIZERS[0].encode("xa b a"))) == ("x", "a b")
