"""Pending output of a choice becomes the same chunk on the wire and in this process."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.request import Output, TokenLogprob, ToolCallDelta, TopLogprob
from penstock.protocol.wire import ChunkEntry, decode_reply, encode_reply
from penstock.protocol.wire import TokenLogprob as WireLogprob
from penstock.protocol.wire import ToolCallDelta as WireDelta
from penstock.protocol.wire import TopLogprob as WireTop
from penstock.worker.publish.chunks import MIN_LOGPROB, chunk_entry, chunk_fields
from penstock.worker.run.choices import ChoiceBuffer

text = st.text(st.characters(exclude_categories=["Cs"]))
values = st.floats(-100, 0.0) | st.just(-math.inf)
tops = st.builds(TopLogprob, st.integers(0, 9), text, st.binary(max_size=3), values)
logprobs = st.builds(
    TokenLogprob, st.integers(0, 9), text, st.binary(max_size=3), values, st.lists(tops, max_size=2).map(tuple)
)
outputs = st.builds(
    Output,
    st.just("r"),
    st.just(0),
    st.just(0),
    st.lists(st.integers(0, 10**6), max_size=5).map(tuple),
    text,
    logprobs=st.none() | st.lists(logprobs, max_size=2).map(tuple),
    finish_reason=st.sampled_from([None, "stop", "tool_calls", "length"]),
    reasoning=text,
    tool_calls=st.lists(
        st.builds(ToolCallDelta, st.integers(0, 2), text)
        | st.builds(ToolCallDelta, st.integers(0, 2), text, text, text),
        max_size=3,
    ).map(tuple),
    stop_reason=st.none() | text | st.integers(0, 9),
    prompt_logprobs=st.none() | st.lists(st.none() | logprobs, max_size=2).map(tuple),
)


def expected(offset: int, given: list[Output], *, several: bool) -> ChunkEntry:
    """Returns the chunk of these outputs, made of the schema's own parts."""
    calls: list[dict[str, Any]] = []
    for delta in (delta for output in given for delta in output.tool_calls):
        if delta.id is None and calls and calls[-1]["index"] == delta.index:
            calls[-1]["arguments"] += delta.arguments
        else:
            calls.append({"index": delta.index, "id": delta.id, "name": delta.name, "arguments": delta.arguments})
    last = given[-1]
    prompts = [output.prompt_logprobs for output in given if output.prompt_logprobs is not None]
    told = several and last.finish_reason is not None
    return ChunkEntry(
        index=0,
        offset=offset,
        text="".join(output.text for output in given),
        tokens=tuple(token for output in given for token in output.token_ids),
        reasoning="".join(output.reasoning for output in given),
        tool_calls=tuple(WireDelta(**call) for call in calls),
        logprobs=tuple(map(on_wire, (each for output in given for each in output.logprobs or ()))) or None,
        prompt_logprobs=tuple(each and on_wire(each) for each in prompts[-1]) if prompts else None,
        finish_reason=last.finish_reason if told else None,
        stop_string=last.stop_reason if told and isinstance(last.stop_reason, str) else None,
        stop_token_id=last.stop_reason if told and isinstance(last.stop_reason, int) else None,
    )


def on_wire(logprob: TokenLogprob) -> WireLogprob:
    top = tuple(
        WireTop(id=each.token_id, token=each.token, bytes=each.bytes, logprob=max(each.logprob, -9999.0))
        for each in logprob.top
    )
    value = max(logprob.logprob, -9999.0)
    return WireLogprob(id=logprob.token_id, token=logprob.token, bytes=logprob.bytes, logprob=value, top=top)


@given(given=st.lists(outputs, min_size=1, max_size=3), offset=st.integers(0, 10**6), several=st.booleans())
def test_chunks_are_written_as_the_schema_would_write_them(given: list[Output], offset: int, several: bool) -> None:
    choice = ChoiceBuffer(0, num_published=offset)
    for output in given:
        choice.add(output)
    pending = choice.take()
    fields = chunk_fields(choice, pending, num_choices=1 + several)
    written = dict(zip(fields[::2], fields[1::2], strict=True))
    entry = expected(offset, given, several=several)
    assert decode_reply(written) == entry == chunk_entry(choice, pending, num_choices=1 + several)
    assert written == encode_reply(entry)


def test_a_chunk_of_plain_text_has_no_more_fields_than_it_needs() -> None:
    choice = ChoiceBuffer(0)
    choice.add(Output("r", 0, 0, (7, 8), "ab", finish_reason="stop", stop_reason="c"))  # the end says it
    assert chunk_fields(choice, choice.take(), num_choices=1) == [
        *("type", "chunk", "index", "0", "offset", "0", "text", "ab", "tokens", "7,8")
    ]


def test_a_person_can_read_a_tool_call() -> None:
    choice = ChoiceBuffer(0)
    choice.add(Output("r", 0, 0, (7,), "", tool_calls=(ToolCallDelta(0, '{"city":', "call_1", "météo"),)))
    choice.add(Output("r", 0, 1, (8,), "", tool_calls=(ToolCallDelta(0, ' "東京"}'),), reasoning="so"))
    fields = chunk_fields(choice, choice.take(), num_choices=1)
    assert fields[-4:-2] == ["reasoning", "so"]
    assert fields[-1] == r'[{"index":0,"id":"call_1","name":"météo","arguments":"{\"city\": \"東京\"}"}]'


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_what_cannot_be_sampled_has_a_number_that_json_knows(value: float) -> None:
    choice = ChoiceBuffer(0)
    choice.add(Output("r", 0, 0, (7,), "a", (TokenLogprob(7, "a", b"a", value, ()),)))
    [logprob] = json.loads(chunk_fields(choice, choice.take(), num_choices=1)[-1], parse_constant=None)
    assert logprob == {"id": 7, "token": "a", "bytes": [97], "logprob": MIN_LOGPROB, "top": []}
