"""Tools, blocks and items of every kind that the official clients know: taken, left out and said, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import pytest
from anthropic.types.beta import BetaContentBlockParam, BetaToolUnionParam
from llguidance import LLMatcher
from openai.types.chat import ChatCompletionToolUnionParam
from openai.types.responses import ResponseInputItemParam, ToolParam

from penstock.engine.request import ResponseSpec, Tool
from penstock.engine.text.response.grammar.reply_grammar import reply_grammar
from penstock.engine.text.response.grammar.rules import CallRule
from penstock.gateway.anthropic.request import read_message
from penstock.gateway.errors import ApiError
from penstock.gateway.http.passed_over import reading_fields
from penstock.gateway.openai.chat_request import read_chat
from penstock.gateway.responses.input.items import read_items, to_messages
from penstock.gateway.responses.request import read_response
from penstock.producer import GenerateRequest
from tests.support.programs.gateway_harness import CARD

TURN = {"role": "user", "content": "hi"}


def kinds_of(union: Any) -> Iterator[str]:
    """Yields the values of `type` of all that a union has."""
    for each in get_args(union):
        if get_args(each):
            yield from kinds_of(each)
        else:
            yield from re.findall(r"'(\w+)'", str(getattr(each, "__annotations__", {}).get("type")))


def chat(tools: list[dict[str, Any]], **more: Any) -> GenerateRequest:
    return read_chat({"model": "m", "messages": [TURN], "tools": tools, **more}).request(CARD)


def response(tools: list[dict[str, Any]], **more: Any) -> GenerateRequest:
    return read_response({"model": "m", "input": "hi", "tools": tools, **more}).request([TURN], CARD)


def message(tools: list[dict[str, Any]], **more: Any) -> GenerateRequest:
    return read_message({"model": "m", "max_tokens": 4, "messages": [TURN], "tools": tools, **more}).request()


SCHEMA = {"type": "object"}
TOOL: Mapping[str, dict[str, Any]] = {
    "chat": {"function": {"name": "f"}},
    "responses": {"name": "f", "parameters": SCHEMA, "tools": []},
    "messages": {"name": "f", "input_schema": SCHEMA},
}
APIS: Mapping[str, tuple[Callable[..., GenerateRequest], Any]] = {
    "chat": (chat, ChatCompletionToolUnionParam),
    "responses": (response, ToolParam),
    "messages": (message, BetaToolUnionParam),
}
FUNCTIONS = {"function", "custom", "local_shell", "shell", "apply_patch", "bash", "text_editor", "memory"}
"""Tools that the client runs and the model is shown, without their versions."""


@pytest.mark.parametrize(
    ("api", "kind"), [(api, kind) for api, (_, union) in APIS.items() for kind in sorted(set(kinds_of(union)))]
)
def test_a_tool_is_shown_or_left_out_and_said(api: str, kind: str) -> None:
    read, _ = APIS[api]
    given = {**TOOL[api], "type": kind}
    if (api, kind) == ("chat", "custom"):
        with pytest.raises(ApiError, match=r"tools\[0\]: custom tools are for"):
            read([given])
        return
    with reading_fields(is_strict=False) as notes:
        request = read([given])
    is_function = kind.rpartition("_20")[0] in FUNCTIONS or kind in FUNCTIONS
    assert len(request.tools) == is_function
    assert (f"tools.{kind}" in notes.said.split(", ")) == (not is_function and kind != "namespace")


@pytest.mark.parametrize(
    ("api", "kind", "choice"),
    [
        ("messages", "web_search_20250305", {"type": "tool", "name": "web_search"}),
        ("messages", "web_search_20250305", {"type": "any"}),
        ("chat", "web_search", {"type": "function", "function": {"name": "web_search"}}),
        ("chat", "web_search", "required"),
        ("responses", "web_search", "required"),
    ],
)
def test_a_call_of_a_tool_that_is_left_out_cannot_be_required(api: str, kind: str, choice: Any) -> None:
    with pytest.raises(ApiError, match="tool_choice"):
        APIS[api][0]([{"type": kind, "name": "web_search"}], tool_choice=choice)


def test_a_tool_of_the_clients_has_an_input_that_a_model_can_follow() -> None:
    examples = [{"command": "ls"}]
    tools = [{"type": f"{kind}_20990101", "name": kind, "strict": True} for kind in ("bash", "text_editor", "memory")]
    request = message([*tools, {"name": "run", "input_schema": SCHEMA, "input_examples": examples}])
    for tool in request.tools[:3]:
        shown = Tool(tool["function"]["name"], json.dumps(tool["function"]["parameters"]), strict=True)
        source = reply_grammar(ResponseSpec(format="hermes", tools=(shown,)), calls=CallRule(required=True))
        assert source is not None
        assert LLMatcher.validate_grammar(source) == ""
    assert request.tools[3]["function"]["description"] == 'Examples of inputs:\n{"command": "ls"}'


FIELDS = {
    "text": "said", "thinking": "hm", "data": "x", "id": "c", "tool_use_id": "c", "name": "f", "input": {},
    "source": "s", "content": [{"type": "text", "text": "said"}],
}  # fmt: skip
REFUSED_BLOCKS = {"image", "container_upload", "document", "search_result", "tool_result"}
"""Blocks that a user gives: an assistant says none of them."""


@pytest.mark.parametrize("kind", sorted(set(kinds_of(BetaContentBlockParam))))
def test_a_block_of_an_assistant_comes_back_or_is_left_out_and_said(kind: str) -> None:
    block = {**FIELDS, "type": kind, **({"content": "said"} if kind == "compaction" else {})}
    turns = [TURN, {"role": "assistant", "content": [block]}, TURN]
    if kind in REFUSED_BLOCKS:
        with pytest.raises(ApiError, match=r"messages\[1\]\.content\[0\]"):
            message([], messages=turns)
        return
    with reading_fields(is_strict=False) as notes:
        request = message([], messages=turns)
    is_shown = kind in ("text", "thinking", "redacted_thinking", "tool_use", "compaction")
    assert (f"messages.content.{kind}" in notes.said.split(", ")) != is_shown
    assert [each.role for each in request.messages or ()] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "said"}},
        {"type": "document", "title": "T", "source": {"type": "content", "content": FIELDS["content"]}},
        {"type": "search_result", "title": "T", "source": "s", "content": FIELDS["content"]},
    ],
)
def test_a_text_from_elsewhere_is_shown_with_its_title(block: dict[str, Any]) -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    turns = [
        {"role": "user", "content": [block]}, {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]  # fmt: skip
    asked, _, heard = message([], messages=turns).messages or ()
    for each in (asked, heard):
        assert isinstance(each.content, tuple)
        texts = [part.text for part in each.content]
        assert (texts[0], texts[-1]) == ("T\n\n", "said")


REFUSED_ITEMS = {
    "compaction": "what it holds only another server can read",
    "compaction_trigger": "nothing is compacted",
    "configuration_update": "it would change the answer",
    "item_reference": "it is looked up first",
}
SHOWN_ITEMS = {
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call",
    "apply_patch_call_output", "additional_tools",
}  # fmt: skip
ITEM = {
    "id": "i", "call_id": "c", "name": "f", "arguments": "{}", "input": "x", "output": "said", "role": "user",
    "content": "said", "tools": [],
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(set(kinds_of(ResponseInputItemParam))))
def test_an_item_is_shown_left_out_and_said_or_refused(kind: str) -> None:
    items = [{**ITEM, "type": kind, **({"content": None} if kind == "reasoning" else {})}, TURN]
    if kind in REFUSED_ITEMS:
        with pytest.raises(ApiError, match=f"input\\[0\\]: items of type '{kind}' are not supported"):
            read_items(items)
        return
    with reading_fields(is_strict=False) as notes:
        assert to_messages(read_items(items))[-1] == TURN
    assert (f"input.{kind}" in notes.said.split(", ")) == (kind not in SHOWN_ITEMS)


def test_calls_of_custom_tools_are_history_in_chats() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "run", "input": 'print("1")'}}
    turns = [TURN, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c"}]
    _, said, _ = chat([], messages=turns).messages or ()
    assert said.tool_calls is not None
    assert said.tool_calls[0].function.arguments == '{"input": "print(\\"1\\")"}'
