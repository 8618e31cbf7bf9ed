from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers_for_tests import byte_level, llama2

from penstock.engine.text.stop import StopMatcher
from penstock.engine.text.stream import TextStream
from penstock.engine.text.tokenizer import Tokenizer

TOKENIZERS = (Tokenizer(byte_level()), Tokenizer(llama2()))


def run(stream: TextStream, ids: list[int]) -> tuple[str, bool]:
    released = ""
    for id_ in ids:
        text, stopped = stream.push(id_)
        released += text
        if stopped:
            return released, True
    return released + stream.finish(), False


@given(data=st.data(), tokenizer=st.sampled_from(TOKENIZERS))
def test_text_is_the_decode_up_to_the_first_stop(data: st.DataObject, tokenizer: Tokenizer) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=25))
    stops = data.draw(st.lists(st.text("ab é\ufffd", min_size=1, max_size=3), max_size=3))
    matcher = StopMatcher(stops)
    text, stopped = matcher.push(tokenizer.decode(ids))
    released, _ = run(TextStream(tokenizer, stops), ids)
    assert released == (text if stopped else text + matcher.flush())


@given(data=st.data(), tokenizer=st.sampled_from(TOKENIZERS))
def test_replaying_leads_to_the_same_state(data: st.DataObject, tokenizer: Tokenizer) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=25))
    cut = data.draw(st.integers(0, len(ids)))
    first, resumed = TextStream(tokenizer, ["ab", "é"]), TextStream(tokenizer, ["ab", "é"])
    already = [first.push(id_) for id_ in ids[:cut]]
    assert resumed.replay(ids[:cut]) == (bool(already) and already[-1][1])
    assert [resumed.push(id_) for id_ in ids[cut:]] == [first.push(id_) for id_ in ids[cut:]]
    assert resumed.finish() == first.finish()


def test_a_stop_over_token_borders_ends_the_stream() -> None:
    tokenizer = TOKENIZERS[0]
    stream = TextStream(tokenizer, ["\n\n"])
    pushed = [stream.push(id_) for id_ in tokenizer.encode("a\n\nb")]
    assert pushed == [("a", False), ("", False), ("", True), ("", True)]
    assert stream.finish() == ""


def test_a_stop_completed_by_the_last_flush_is_left_out() -> None:
    tokenizer = TOKENIZERS[1]
    stream = TextStream(tokenizer, ["é"])
    released = [stream.push(3 + byte)[0] for byte in "xé".encode()]
    assert (released, stream.finish()) == (["", "", ""], "x")
