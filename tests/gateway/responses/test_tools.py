"""Tools as Codex sends them, their calls, and what comes back of both."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher
from openai.types.responses import ResponseOutputItem
from pydantic import BaseModel, TypeAdapter

from penstock.engine.request import ResponseSpec, Tool
from penstock.engine.text.response.formats import FORMATS
from penstock.engine.text.response.grammar.reply_grammar import reply_grammar
from penstock.engine.text.response.grammar.rules import CallRule
from penstock.gateway.common.documents import Document
from penstock.gateway.errors import ApiError
from penstock.gateway.http.passed_over import reading_fields
from penstock.gateway.responses.builtin_tools import BUILTIN_TOOLS
from penstock.gateway.responses.input.items import read_items, shown_items, to_messages
from penstock.gateway.responses.output.answer import ResponseOutput
from penstock.gateway.responses.request import read_response
from penstock.gateway.responses.tools import offered
from penstock.producer import ToolCallDelta
from penstock.protocol.redis.connection import RedisClient
from tests.gateway.responses.responses_harness import EVENT, asking
from tests.gateway.responses.test_output import chunk, written
from tests.support.programs.gateway_harness import CARD

SCHEMA: Document = {"type": "object"}
ADD: Document = {"type": "function", "name": "add", "description": "Adds", "parameters": SCHEMA, "strict": False}
AGENTS: Document = {"type": "namespace", "name": "agents", "description": "d", "tools": [ADD]}
SEARCH: Document = {"type": "web_search", "external_web_access": True}
LARK: Document = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start ")" | /a+/'}
REGEX: Document = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
LF_LARK: Document = {**LARK, "definition": 'start: ("+" /.*/ LF)+\n%import common.LF'}
PATCH: Document = {"type": "custom", "name": "apply_patch", "description": "Patches", "format": LARK}
DIGITS: Document = {"type": "custom", "name": "digits", "format": REGEX}
SHELL: Document = {"type": "local_shell"}
TOOLS = [ADD, AGENTS, SEARCH, PATCH, DIGITS, SHELL]
BODY: Document = {"model": "tiny", "input": "hi", "tools": TOOLS}
SAYS: list[Document] = [{"role": "user", "content": "hi"}]


def test_tools_become_functions_and_what_a_server_would_run_is_left_out_and_said() -> None:
    with reading_fields(is_strict=False) as notes:
        request = read_response(BODY).request(SAYS, CARD)
    functions = {tool["function"]["name"]: tool["function"] for tool in request.tools}
    assert [*functions] == ["add", "agents__add", "apply_patch", "digits", "local_shell"]
    assert functions["agents__add"]["parameters"] == SCHEMA
    assert '"(" start ")"' in functions["apply_patch"]["description"]
    assert functions["apply_patch"]["strict"] is False
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
        ({"type": "local_shell"}, "local_shell"),
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
    ("wrote", "text"),
    [
        ("a patch", "a patch"),
        ('{"patch": 1}', '{"patch": 1}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"why": "so", "input": "a patch"}', "a patch"),
        ('{"inp', ""),
        ('{"input": "so \\u00', "so "),
        ('{"input": "\\ud83d!"}', "\ufffd!"),
    ],
)
def test_what_is_no_such_object_is_not_lost(wrote: str, text: str) -> None:
    output = ResponseOutput("r", tools=offered(read_response(BODY).tools))
    written(output, *(chunk(tool_calls=(each,)) for each in call("apply_patch", [wrote])))
    assert output.items[0]["input"] == text


BUILTINS: dict[str, tuple[Document, Document]] = {
    "local_shell": (
        {"command": ["bash", "-lc", "ls"], "timeout_ms": 5},
        {"action": {"type": "exec", "command": ["bash", "-lc", "ls"], "env": {}, "timeout_ms": 5}},
    ),
    "shell": (
        {"commands": ["ls", "pwd"]},
        {"action": {"commands": ["ls", "pwd"], "timeout_ms": None, "max_output_length": None}},
    ),
    "apply_patch": (
        {"type": "delete_file", "path": "a", "diff": ""},
        {"operation": {"type": "delete_file", "path": "a"}},
    ),
}


@pytest.mark.parametrize("name", BUILTIN_TOOLS)
def test_a_call_of_a_built_in_tool_is_an_item_of_its_own_kind_and_comes_back(name: str) -> None:
    arguments, held = BUILTINS[name]
    text = json.dumps(arguments)
    body = read_response({**BODY, "tools": [{"type": name}]})
    output = ResponseOutput("r", tools=offered(body.tools))
    events = written(output, *(chunk(tool_calls=(each,)) for each in call(name, [text[:5], text[5:]])))
    assert [events[0]["type"], events[-1]["type"]] == ["response.output_item.added", "response.output_item.done"]
    (item,) = output.items
    assert item == {"id": "btc_r_0", "type": f"{name}_call", "call_id": "call_1", **held, "status": "completed"}
    assert isinstance(TypeAdapter(ResponseOutputItem).validate_python(item), BaseModel)

    came = {"type": f"{name}_call_output", "call_id": "call_1", "output": "so", "status": "failed"}
    read = read_items([item, came])
    (function, result) = to_messages(read)
    assert json.loads(function["tool_calls"][0]["function"]["arguments"]) == arguments
    assert (result["tool_call_id"], result["content"]) == ("call_1", "failed\nso")
    assert to_messages(read_items(shown_items(read, "r"))) == [function, result]


@pytest.mark.parametrize("name", BUILTIN_TOOLS)
def test_a_call_of_a_built_in_tool_may_be_cut_off_anywhere(name: str) -> None:
    arguments, held = BUILTINS[name]
    text = json.dumps(arguments)
    tools = offered(read_response({**BODY, "tools": [{"type": name}]}).tools)
    for end in range(len(text)):
        output = ResponseOutput("r", tools=tools)
        list(output.chunk(chunk(tool_calls=(call(name, [text[:end]])[0],))))
        list(output.close("incomplete"))
        (item,) = output.items
        assert item["status"] != "completed"
        assert item[next(iter(held))].keys() >= held[next(iter(held))].keys() - {"timeout_ms"}
        assert to_messages(read_items([item]))


COMMANDS = ["ls", "", 'echo "\u00e9\U0001f600" \\']
PATCHED = {"type": "update_file", "path": "a/\u00e9", "diff": TEXT}


def shell_events(events: list[Document]) -> list[tuple[str, int, str]]:
    found = [event for event in events if event["type"].startswith("response.shell_call_command.")]
    for event in found:
        assert isinstance(EVENT.validate_python({**event, "sequence_number": 1}, strict=True), BaseModel)
    kinds = [event["type"].rpartition(".")[2] for event in found]
    texts = [event["delta" if kind == "delta" else "command"] for kind, event in zip(kinds, found, strict=True)]
    return [(kind, event["command_index"], text) for kind, event, text in zip(kinds, found, texts, strict=True)]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("is_ascii", [True, False])
def test_commands_of_a_shell_are_streamed_as_they_are_written_wherever_they_are_cut(size: int, is_ascii: bool) -> None:
    arguments = json.dumps({"commands": COMMANDS, "timeout_ms": 5}, ensure_ascii=is_ascii)
    tools = offered(read_response({**BODY, "tools": [{"type": "shell"}]}).tools)
    for end in range(1, len(arguments) + 1):
        pieces = [arguments[at : min(at + size, end)] for at in range(0, end, size)]
        output = ResponseOutput("r", tools=tools)
        events = shell_events(written(output, *(chunk(tool_calls=(each,)) for each in call("shell", pieces))))
        (item,) = output.items
        commands = item["action"]["commands"]
        assert [text for kind, _, text in events if kind == "done"] == commands
        for number, command in enumerate(commands):
            own = [(kind, text) for kind, index, text in events if index == number]
            assert (own[0], own[-1]) == (("added", ""), ("done", command))
            assert "".join(text for kind, text in own if kind == "delta") == command
        assert all(whole.startswith(command) for whole, command in zip(COMMANDS, commands, strict=False))
    assert commands == COMMANDS


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("kind", ["create_file", "update_file", "delete_file"])
def test_a_diff_is_streamed_as_it_is_written_once_its_file_is_known(size: int, kind: str) -> None:
    """Clients begin their own call by the type and path of the first event."""
    arguments = json.dumps({**PATCHED, "type": kind})
    tools = offered(read_response({**BODY, "tools": [{"type": "apply_patch"}]}).tools)
    for end in range(1, len(arguments) + 1):
        pieces = [arguments[at : min(at + size, end)] for at in range(0, end, size)]
        output = ResponseOutput("r", tools=tools)
        first, *events = written(output, *(chunk(tool_calls=(each,)) for each in call("apply_patch", pieces)))
        (item,) = output.items
        shown = item["operation"]
        assert first["type"] == "response.output_item.added"
        assert first["item"]["operation"] == {**shown, **({"diff": ""} if "diff" in shown else {})}
        texts = [event["delta"] for event in events if event["type"].endswith("_diff.delta")]
        assert ("".join(texts), "" in texts) == (shown.get("diff", ""), False)
        done = [event["diff"] for event in events if event["type"].endswith("_diff.done")]
        assert done == [shown[name] for name in shown if name == "diff"]
    assert shown == BUILTIN_TOOLS["apply_patch"].held({**PATCHED, "type": kind})


@pytest.mark.parametrize(
    ("name", "wrote", "count"),
    [
        ("shell", '{"timeout_ms": 5, "commands": ["ls", "pwd"]}', 6),
        ("shell", '{"commands": ["\\ud83d!"]}', 3),
        ("shell", '{"commands": [5, ["ls"]]}', 0),
        ("shell", "ls", 0),
        ("apply_patch", '{"diff": "+a", "path": "b", "type": "create_file"}', 2),
        ("apply_patch", '{"path": "b", "type": "create_file"}', 1),
        ("apply_patch", "+a", 1),
    ],
)
def test_arguments_in_another_order_or_of_another_kind_are_sent_at_the_end(name: str, wrote: str, count: int) -> None:
    output = ResponseOutput("r", tools=offered(read_response({**BODY, "tools": [{"type": name}]}).tools))
    pieces = [wrote[at : at + 2] for at in range(0, len(wrote), 2)]
    events = written(output, *(chunk(tool_calls=(each,)) for each in call(name, pieces)))
    shown = json.dumps(output.items[0])
    texts = [event["delta"] for event in events if event["type"].endswith(".delta")]
    assert all(json.dumps(text)[1:-1] in shown for text in texts)
    assert len([event for event in events if "output_item" not in event["type"]]) == count


@pytest.mark.parametrize("format_name", FORMATS)
def test_calls_of_built_in_tools_and_texts_of_custom_ones_follow_a_grammar_in_every_format(format_name: str) -> None:
    tools = [{"type": name} for name in ("local_shell", "shell", "apply_patch")]
    asked = read_response({**BODY, "tools": [*tools, {**DIGITS, "format": LF_LARK}]})
    for tool in asked.request(SAYS, CARD).tools:
        function = tool["function"]
        assert function["strict"]
        shown = Tool(function["name"], json.dumps(function["parameters"]), strict=True)
        source = reply_grammar(ResponseSpec(format=format_name, tools=(shown,)), calls=CallRule(required=True))
        assert source is not None
        assert LLMatcher.validate_grammar(source) == ""


def test_what_a_server_has_run_is_left_out_of_the_history_and_said() -> None:
    items: list[Document] = [
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "mcp_list_tools", "server_label": "a", "tools": []},
        {"type": "next_months_call", "id": "n"},
        {"role": "user", "content": "hi"},
    ]
    with reading_fields(is_strict=False) as notes:
        assert to_messages(read_items(items)) == SAYS
    assert notes.said == "input.web_search_call, input.mcp_list_tools, input.next_months_call"
    for kind in ("compaction", "functon_call"):
        with pytest.raises(ApiError, match=kind):
            read_items([{"type": kind}])


async def test_tools_that_items_add_are_offered_and_their_calls_known(redis: RedisClient, redis_url: str) -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [AGENTS, {**SHELL, "type": "shell"}]}
    async with asking(redis, redis_url) as asked:
        answer = (await asked.post([added, {"role": "user", "content": "call agents__add"}], tools=[ADD])).json()
        assert [tool["type"] for tool in answer["tools"]] == ["function", "namespace", "shell"]
        assert [each["namespace"] for each in answer["output"] if each["type"] == "function_call"] == ["agents"] * 2
        items = (await asked.http.get(f"/v1/responses/{answer['id']}/input_items?order=asc")).json()["data"]
        assert items[0]["type"] == "additional_tools"
        wrong = await asked.post([{**added, "tools": [{"type": "functon"}]}, *SAYS])
        assert wrong.json()["error"]["param"] == "input[0].tools[0].type"


CONTAINER = {"type": "shell", "environment": {"type": "container_auto"}}


def test_a_shell_in_a_container_is_no_tool_of_the_clients() -> None:
    with reading_fields(is_strict=False) as notes:
        assert read_response({**BODY, "tools": [CONTAINER]}).tools == []
    assert notes.said == "tools.shell"


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
        assert [tool["type"] for tool in document["tools"]] == [
            "function",
            "namespace",
            "custom",
            "custom",
            "local_shell",
        ]
        _, first, _ = document["output"]
        assert (first["name"], first["namespace"], first["arguments"]) == ("add", "agents", '{"city": "Oslo"}')
        again = (await asked.http.get(f"/v1/responses/{document['id']}")).json()
        assert again == document
