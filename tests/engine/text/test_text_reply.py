"""From token ids to the parts of a reply: real tokenizers, stop strings, and starts at any token."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from penstock.engine.errors import InvalidRequest
from penstock.engine.request import Request, ResponseSpec, SamplingParams, ToolCallDelta
from penstock.engine.text.reply import ReplyDecoder, ReplyStreams
from penstock.engine.text.response.call_ids import call_id
from penstock.engine.text.response.formats import FORMATS
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.text.reply_texts import TOOLS, Message
from tests.engine.tokenizers_for_tests import byte_level, llama2


def with_tags(make: Any, name: str, *, special: bool) -> Tokenizer:
    """Returns a tokenizer that has each delimiter of a format as one token."""
    tokenizer = make()
    tags = [AddedToken(tag, special=special, normalized=False) for tag in FORMATS[name].delimiters]
    tokenizer.add_tokens(tags, special_tokens=special)
    return Tokenizer(tokenizer)


def streams(name: str, make: Any = byte_level, *, special: bool = True) -> tuple[Tokenizer, ReplyStreams]:
    tokenizer = with_tags(make, name, special=special)
    return tokenizer, ReplyStreams(tokenizer)


def request(name: str, prefix: str = "", id_: str = "r", **sampling: Any) -> Request:
    return Request(id_, (1,), SamplingParams(**sampling), response=ResponseSpec(name, prefix, TOOLS))


def read(stream: ReplyDecoder, token_ids: tuple[int, ...]) -> tuple[Message, str | None]:
    message = Message()
    for token_id in token_ids:
        delta, stop = stream.push(token_id)
        message.take(delta)
        if stop:
            return message, stop
    message.take(stream.finish())
    return message, None


HERMES = '<think>hm</think>Let me see.\n<tool_call>\n{"name": "search", "arguments": {"q": "é"}}\n</tool_call>'
WHOLE = Message("Let me see.", "hm", [("search", '{"q": "é"}')])


@pytest.mark.parametrize("make", [byte_level, llama2])
@pytest.mark.parametrize("special", [False, True])
def test_a_reply_is_read_from_its_tokens(make: Any, special: bool) -> None:
    tokenizer, replies = streams("hermes", make, special=special)
    stream = replies.stream(request("hermes"), 0)
    assert read(stream, tokenizer.encode(HERMES)) == (WHOLE, None)
    assert stream.calls_tools


@pytest.mark.parametrize("prefix", ["", "<think>"])
def test_tokens_of_reasoning_are_counted_wherever_the_reply_is_taken_up(prefix: str) -> None:
    tokenizer, replies = streams("hermes")
    token_ids = tokenizer.encode(HERMES.removeprefix(prefix))
    num_reasoning = token_ids.index(tokenizer.special_token_ids["</think>"]) + 1
    for cut in range(len(token_ids) + 1):
        stream = replies.stream(request("hermes", prefix), 0)
        stream.replay(token_ids[:cut])
        assert stream.num_reasoning == min(cut, num_reasoning)
        stream.replay(token_ids[cut:])
        assert stream.num_reasoning == num_reasoning


def test_a_character_before_a_tag_is_not_lost() -> None:
    """Some detokenizers hold valid bytes back until other tokens follow."""
    tokenizer, replies = streams("hermes", llama2)
    call = tokenizer.encode('<tool_call>{"name": "search", "arguments": {}}</tool_call>')
    begin = call.index(tokenizer.special_token_ids["<tool_call>"])
    e_acute = tuple(3 + byte for byte in "é".encode())  # the byte tokens of that vocabulary
    message, _ = read(replies.stream(request("hermes"), 0), e_acute + call[begin:])
    assert message == Message("é", calls=[("search", "{}")])


def test_a_text_that_spells_a_special_token_is_text() -> None:
    tokenizer, replies = streams("hermes")
    spelled = tuple(itertools.chain.from_iterable(tokenizer.encode(character) for character in "<tool_call>{</think>"))
    assert read(replies.stream(request("hermes"), 0), spelled) == (Message("<tool_call>{</think>"), None)


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("me", Message("Let ", "hm")),
        ('"q"', Message("Let me see.", "hm", [("search", "{")])),
        ("hm", Message("", "")),
    ],
)
def test_a_stop_string_counts_in_all_that_the_model_writes(stop: str, message: Message) -> None:
    tokenizer, replies = streams("hermes")
    stream = replies.stream(request("hermes", stop=(stop,)), 0)
    found, stopped = read(stream, tokenizer.encode(HERMES))
    assert (found, stopped) == (message, stop)
    assert not stream.calls_tools


def test_a_stop_string_may_end_with_what_was_held_back() -> None:
    tokenizer, replies = streams("hermes", special=False)
    found, _ = read(replies.stream(request("hermes", stop=("STOP",)), 0), tokenizer.encode("a <tool_callSTOP"))
    assert found == Message("a <tool_call")


def test_a_tag_that_a_stop_string_comes_behind_is_no_text() -> None:
    tokenizer, replies = streams("hermes", special=False)
    found, _ = read(replies.stream(request("hermes", stop=("STOP",)), 0), tokenizer.encode("a <tool_call>STOP"))
    assert found == Message("a")


def test_special_tokens_are_shown_where_they_are_asked_for() -> None:
    tokenizer, replies = streams("mistral")
    ids = tokenizer.encode("a[ARGS]b<|end|>[TOOL_CALLS]search[ARGS]{}")
    hidden = replies.stream(request("mistral"), 0)
    assert read(hidden, ids)[0] == Message("ab", calls=[("search", "{}")])
    shown = replies.stream(request("mistral", skip_special_tokens=False), 0)
    assert read(shown, ids)[0] == Message("a[ARGS]b<|end|>", calls=[("search", "{}")])


def test_a_reply_without_a_format_is_its_text() -> None:
    tokenizer, replies = streams("hermes", special=False)
    stream = replies.stream(Request("r", (1,)), 0)
    assert read(stream, tokenizer.encode(HERMES)) == (Message(HERMES), None)
    assert not stream.calls_tools


def test_an_unknown_format_is_refused() -> None:
    _, replies = streams("hermes")
    with pytest.raises(InvalidRequest, match=r"must be one of .*hermes.*, not 'hermse'"):
        replies.stream(request("hermse"), 0)


def test_ids_of_calls_follow_from_request_choice_and_place() -> None:
    tokenizer, replies = streams("mistral")
    ids = tokenizer.encode("[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}")
    found = set()
    for id_, choice in itertools.product(("r", "s"), (0, 1)):
        stream = replies.stream(request("mistral", id_=id_), choice)
        deltas = [stream.push(token_id)[0] for token_id in ids]
        calls = [call.id for delta in deltas for call in delta.tool_calls if call.id]
        assert calls == [call_id(id_, choice, 0), call_id(id_, choice, 1)]
        found |= set(calls)
    assert len(found) == 8


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30)
@given(data=st.data())
def test_replaying_leads_to_the_same_state(name: str, data: st.DataObject) -> None:
    """From any token on, in any format, nothing comes twice, and nothing is missing."""
    tokenizer, replies = _remembered(name)
    tags = [tokenizer.special_token_ids[tag] for tag in FORMATS[name].delimiters]
    pieces: list[tuple[int, ...]] = [(tag,) for tag in tags]
    syntax = (FORMATS[name].calls.begin, FORMATS[name].calls.after_name, '{"name": "search", "arguments": {', "search")
    pieces += [tokenizer.encode(piece) for piece in (*syntax, '"a": 1', "{", "}", "(", "é", " ", "[", ":", "x", '"')]
    ids = tuple(itertools.chain.from_iterable(data.draw(st.lists(st.sampled_from(pieces), max_size=20))))
    cut = data.draw(st.integers(0, len(ids)))
    params = {"stop": ("é}",), "prefix": data.draw(st.sampled_from(["", "<think>\n"]))}
    first, resumed = (replies.stream(request(name, **params), 0) for _ in range(2))  # type: ignore[arg-type]
    already = [first.push(id_) for id_ in ids[:cut]]
    assert resumed.replay(ids[:cut]) == (already[-1][1] if already else None)
    assert [resumed.push(id_) for id_ in ids[cut:]] == [first.push(id_) for id_ in ids[cut:]]
    if not any(stop for _, stop in already):
        assert resumed.finish() == first.finish()
    assert resumed.calls_tools == first.calls_tools


_made: dict[str, tuple[Tokenizer, ReplyStreams]] = {}


def _remembered(name: str) -> tuple[Tokenizer, ReplyStreams]:
    if name not in _made:
        _made[name] = streams(name)
    return _made[name]


def test_one_token_releases_one_delta_of_a_call() -> None:
    tokenizer, replies = streams("mistral_list")
    stream = replies.stream(request("mistral_list"), 0)
    for token_id in tokenizer.encode('[TOOL_CALLS] [{"arguments": {"a": 1}, "name": "f"'):
        assert stream.push(token_id)[0].tool_calls == ()
    (close,) = tokenizer.encode("}")
    assert stream.push(close)[0].tool_calls == (ToolCallDelta(0, '{"a": 1}', call_id("r", 0, 0), "f"),)
