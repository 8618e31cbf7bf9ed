"""Each chunk becomes output, whatever it holds together."""

from __future__ import annotations

import json
from typing import Any

from penstock.gateway.responses.output.answer import ResponseOutput
from penstock.producer import Chunk, TokenLogprob, ToolCallDelta, TopLogprob


def chunk(text: str = "", *, num_tokens: int = 1, **more: Any) -> Chunk:
    values = {"tokens": tuple(range(num_tokens)), "index": 0, "offset": 0, "logprobs": None, "entry_id": "1-1"}
    return Chunk(text=text, **{**values, **more})


def logprob(token: str) -> TokenLogprob:
    other = TopLogprob(id=1, token="o", bytes=b"o", logprob=-1.0)
    return TokenLogprob(id=0, token=token, bytes=token.encode(), logprob=-0.5, top=(other,))


def written(output: ResponseOutput, *chunks: Chunk) -> list[dict[str, Any]]:
    parts = [part for each in chunks for part in output.chunk(each)] + list(output.close("completed"))
    return [{"type": part.type, **json.loads("{" + part.fields + "}")} for part in parts]


def test_one_chunk_may_end_the_reasoning_begin_the_text_and_call() -> None:
    output = ResponseOutput("r")
    call = ToolCallDelta(index=0, id="call_1", name="noon", arguments="{}")
    events = written(output, chunk("text", num_tokens=12, reasoning="so", tool_calls=(call,)))
    assert [item["type"] for item in output.items] == ["reasoning", "message", "function_call"]
    assert [item["status"] for item in output.items] == ["completed"] * 3
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 3
    assert [item["id"] for item in added] == ["rs_r_0", "msg_r_1", "fc_r_2"]


def test_reasoning_behind_text_is_an_item_of_its_own() -> None:
    output = ResponseOutput("r")
    written(output, chunk(reasoning="a"), chunk("b"), chunk(reasoning="c"), chunk("d"), chunk("e"))
    assert [(item["type"], item["content"][0]["text"]) for item in output.items] == [
        ("reasoning", "a"), ("message", "b"), ("reasoning", "c"), ("message", "de"),
    ]  # fmt: skip


def test_logprobs_of_tokens_without_text_come_with_the_next_text() -> None:
    output = ResponseOutput("r", has_logprobs=True)
    events = written(
        output,
        chunk(logprobs=(logprob("x"),)),
        chunk("xy", logprobs=(logprob("y"),)),
        chunk("z", logprobs=(logprob("z"),)),
    )
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [[each["token"] for each in delta] for delta in deltas] == [["x", "y"], ["z"]]
    shown = output.items[0]["content"][0]["logprobs"]
    assert [each["token"] for each in shown] == ["x", "y", "z"]
    assert shown[0]["top_logprobs"] == [{"token": "o", "bytes": [111], "logprob": -1.0}]


def test_what_nobody_asked_for_is_not_shown() -> None:
    output = ResponseOutput("r")
    (delta,) = [event for event in written(output, chunk("a", logprobs=(logprob("a"),))) if "delta" in event]
    assert delta["logprobs"] == []


def test_a_chunk_without_anything_to_read_is_no_event() -> None:
    assert written(ResponseOutput("r"), chunk()) == []


def test_an_event_is_one_line_whatever_the_text() -> None:
    output = ResponseOutput("r")
    (delta,) = [part for part in output.chunk(chunk('"\u2028\n\r\x85é')) if part.type.endswith("delta")]
    assert delta.fields.isascii()
    assert delta.fields.isprintable()
