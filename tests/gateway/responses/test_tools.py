"""Tools as Codex sends them, their calls, and what comes back of both."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.gateway.common.documents import Document
from penstock.gateway.errors import ApiError
from penstock.gateway.http.passed_over import reading_fields
from penstock.gateway.responses.items import read_items, shown_items, to_messages
from penstock.gateway.responses.output import ResponseOutput
from penstock.gateway.responses.request import read_response
from penstock.gateway.responses.tools import offered
from penstock.producer import ToolCallDelta
from penstock.protocol.redis.connection import RedisClient
from tests.gateway.responses.responses_harness import asking
from tests.gateway.responses.test_output import chunk, written
from tests.support.programs.gateway_harness import CARD

SCHEMA: Document = {"type": "object"}
ADD: Document = {"type": "function", "name": "add", "description": "Adds", "parameters": SCHEMA, "strict": False}
AGENTS: Document = {"type": "namespace", "name": "agents", "description": "d", "tools": [ADD]}
SEARCH: Document = {"type": "web_search", "external_web_access": True}
LARK: Document = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
REGEX: Document = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
PATCH: Document = {"type": "custom", "name": "apply_patch", "description": "Patches", "format": LARK}
DIGITS: Document = {"type": "custom", "name": "digits", "format": REGEX}
TOOLS = [ADD, AGENTS, SEARCH, PATCH, DIGITS]
BODY: Document = {"model": "tiny", "input": "hi", "tools": TOOLS}
SAYS: list[Document] = [{"role": "user", "content": "hi"}]


def test_tools_become_functions_and_what_a_server_would_run_is_left_out_and_said() -> None:
    with reading_fields(is_strict=False) as notes:
        request = read_response(BODY).request(SAYS, CARD)
    functions = {tool["function"]["name"]: tool["function"] for tool in request.tools}
    assert [*functions] == ["add", "agents__add", "apply_patch", "digits"]
    assert functions["agents__add"]["parameters"] == SCHEMA
    assert "start: /a+/" in functions["apply_patch"]["description"]
    assert functions["digits"]["strict"] is True
    assert functions["digits"]["parameters"]["properties"] == {"input": {"type": "string", "pattern": "^(?:[0-9]+)$"}}
    assert notes.said == "tools.web_search, tools.format"


def test_a_server_tool_that_has_to_be_called_is_refused_and_so_is_any_where_fields_are_strict() -> None:
    with pytest.raises(ApiError, match="tool_choice"):
        read_response({**BODY, "tool_choice": {"type": "web_search"}}).request(SAYS, CARD)
    with reading_fields(is_strict=True), pytest.raises(ApiError, match="'web_search' is not there"):
        read_response(BODY)


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "function", "name": "add"}, "add"),
        ({"type": "function", "name": "add", "namespace": "agents"}, "agents__add"),
        ({"type": "custom", "name": "digits"}, "digits"),
    ],
)
def test_any_kind_of_tool_can_be_required(choice: Document, name: str) -> None:
    request = read_response({**BODY, "tool_choice": choice}).request(SAYS, CARD)
    assert request.chosen_tools() == (name,)


TEXT = '*** Begin\n+"\u00e9" \\ \U0001f600\n'


def call(name: str, pieces: list[str]) -> list[ToolCallDelta]:
    first, *rest = pieces
    return [
        ToolCallDelta(index=0, id="call_1", name=name, arguments=first),
        *(ToolCallDelta(index=0, arguments=each) for each in rest),
    ]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_text_of_a_custom_tool_is_streamed_as_it_is_written(size: int) -> None:
    arguments = json.dumps({"input": TEXT})
    pieces = [arguments[at : at + size] for at in range(0, len(arguments), size)]
    output = ResponseOutput("r", tools=offered(read_response(BODY).tools))
    events = written(output, *(chunk(tool_calls=(each,)) for each in call("apply_patch", pieces)))
    deltas = [each["delta"] for each in events if each["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == TEXT
    assert "" not in deltas
    (done,) = [each for each in events if each["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == TEXT
    (item,) = output.items
    shown = {"call_id": "call_1", "name": "apply_patch", "input": TEXT, "status": "completed"}
    assert item == {"id": "ctc_r_0", "type": "custom_tool_call", **shown}


@pytest.mark.parametrize(
    ("wrote", "text"), [("a patch", "a patch"), ('{"patch": 1}', '{"patch": 1}'), ('{"input": 5}', "")]
)
def test_what_is_no_such_object_is_not_lost(wrote: str, text: str) -> None:
    output = ResponseOutput("r", tools=offered(read_response(BODY).tools))
    written(output, *(chunk(tool_calls=(each,)) for each in call("apply_patch", [wrote])))
    assert output.items[0]["input"] == text


def test_a_call_in_a_namespace_has_the_names_of_its_client() -> None:
    output = ResponseOutput("r", tools=offered(read_response(BODY).tools))
    written(output, chunk(tool_calls=(call("agents__add", ["{}"])[0],)))
    (item,) = output.items
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "add", "agents")


def test_calls_and_their_outputs_come_back() -> None:
    items = [
        {"type": "custom_tool_call", "call_id": "a", "name": "apply_patch", "input": TEXT, "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "done"},
        {"type": "function_call", "call_id": "b", "name": "add", "namespace": "agents", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "5"}]},
        {"type": "reasoning", "id": "rs_x", "summary": [], "encrypted_content": "gAAA", "content": None},
    ]
    read = read_items(items)
    messages = to_messages(read)
    calls = [message["tool_calls"][0]["function"] for message in messages if "tool_calls" in message]
    assert [each["name"] for each in calls] == ["apply_patch", "agents__add"]
    assert json.loads(calls[0]["arguments"]) == {"input": TEXT}
    assert [message["content"] for message in messages if message["role"] == "tool"] == ["done", "5"]
    assert to_messages(read_items(shown_items(read, "r"))) == messages


async def test_a_reference_is_to_an_item_of_the_callers_own(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url) as asked:
        thought, said = (await asked.create("think hello")).output
        more = {"role": "user", "content": "say it"}
        references = [{"type": "item_reference", "id": item.id} for item in (thought, said)]
        answer = await asked.post([*references, more])
        assert answer.status_code == 200, answer.text
        assert "x-penstock-ignored" not in answer.headers
        messages: Any = asked.requests[-1].model_dump(mode="json", exclude_unset=True)["messages"]
        assert messages[0] == {"role": "assistant", "content": "hello", "reasoning": "hm, yes"}
        for item_id in ("msg_of_another", "msg_nobody_0", f"{said.id}9", "x"):
            refused = await asked.post([{"type": "item_reference", "id": item_id}, more])
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found"), item_id


async def test_a_whole_answer_with_such_tools(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url) as asked:
        answer = await asked.post("call agents__add", tools=TOOLS)
        document = answer.json()
        assert answer.headers["x-penstock-ignored"] == "tools.web_search, tools.format"
        assert [tool["type"] for tool in document["tools"]] == ["function", "namespace", "custom", "custom"]
        _, first, _ = document["output"]
        assert (first["name"], first["namespace"], first["arguments"]) == ("add", "agents", '{"city": "Oslo"}')
        again = (await asked.http.get(f"/v1/responses/{document['id']}")).json()
        assert again == document
