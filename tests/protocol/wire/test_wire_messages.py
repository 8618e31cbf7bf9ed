"""Chats on the wire: messages come back as sent, OpenAI's clients are understood, and each mistake is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.producer.request import build_request
from penstock.protocol.errors import RequestRefused
from penstock.protocol.wire import FunctionCall, GenerateRequest, Message, MessageToolCall, WireError, parse_request
from penstock.protocol.wire.messages import MAX_CALLS, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from penstock.protocol.wire.values import MAX_NESTING

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
NAMED = {"type": "function", "function": {"name": "f"}}
REQUIRED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
LIMIT = 1 << 24


def parse(**fields: Any) -> GenerateRequest:
    """Parses flat fields; values that are not text become JSON."""
    flat = {
        name.encode(): (value if isinstance(value, str) else json.dumps(value)).encode()
        for name, value in fields.items()
    }
    return parse_request("1-0", flat, max_body_bytes=LIMIT)


def parse_document(**fields: Any) -> GenerateRequest:
    return parse_request("1-0", {b"request": json.dumps(fields).encode()}, max_body_bytes=LIMIT)


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


CHAT: dict[str, Any] = {
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "hi", "name": "ada"},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "assistant", "content": "fo"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
    "continue_final_message": True,
    "chat_template_kwargs": {"enable_thinking": False, "more": [1, None, {"x": "é"}]},
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    },
    "prompt_logprobs": 3,
    "echo": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
}


def test_a_chat_comes_back_as_it_was_sent_in_either_form() -> None:
    request = parse_document(**CHAT)
    assert parse(**CHAT) == request
    assert parse_document(**json.loads(request.to_entry()["request"])) == request
    assert request.messages is not None
    roles = [message.role for message in request.messages]
    assert roles == ["developer", "user", "assistant", "tool", "assistant"]
    assert request.messages[2].tool_calls == (
        MessageToolCall(id="c1", function=FunctionCall(name="f", arguments='{"a": 1}')),
    )
    assert request.response_format is not None
    assert request.response_format.json_schema is not None
    assert request.response_format.json_schema.schema_ == {"type": "object"}
    assert (request.chosen_tools(), request.is_tool_required) == (("f",), False)
    assert json.loads(request.to_entry()["request"])["response_format"] == CHAT["response_format"]


def test_tools_keep_the_order_of_their_keys() -> None:
    tool = {
        "function": {"parameters": {"z": 1, "a": {"c": None, "b": 1}}, "strict": None, "name": "f"},
        "type": "function",
    }
    sent = parse_document(messages=[USER], tools=[tool]).to_entry()["request"]
    assert json.dumps(tool, separators=(",", ":")) in sent


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"max_completion_tokens": 7, "max_tokens": 7}, {"max_tokens": 7}),
        ({"logprobs": True, "top_logprobs": 5}, {"logprobs": 5}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": False}, {}),
        ({"logprobs": True, "top_logprobs": None}, {"logprobs": 0}),
        ({"logprobs": False, "top_logprobs": None}, {}),
        ({"stop": None, "n": None, "tools": None, "logit_bias": None, "max_tokens": None}, {}),
        ({"response_format": {"type": "text"}, "regex": "a+"}, {"regex": "a+", "response_format": {"type": "text"}}),
        ({"tool_choice": "auto"}, {"tool_choice": "auto"}),
    ],
)  # fmt: skip
def test_openai_s_names_are_understood(given: dict[str, Any], same: dict[str, Any]) -> None:
    expected = parse_document(messages=[USER], **same)
    assert parse_document(messages=[USER], **given) == expected
    flat = {name: value for name, value in given.items() if value is not None}
    assert parse(messages=[USER], **flat) == expected


def test_a_message_s_reasoning_has_two_names_and_arguments_two_forms() -> None:
    message = {
        "role": "assistant",
        "reasoning_content": "hm",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": "é"}}}],
    }
    request = parse_document(messages=[message])
    assert request.messages is not None
    assert request.messages[0].reasoning == "hm"
    assert request.messages[0].tool_calls is not None
    function = request.messages[0].tool_calls[0].function
    assert (function.arguments, function.values()) == ('{"a": "é"}', {"a": "é"})


NESTED = '{"a": ' * MAX_NESTING + "{}" + "}" * MAX_NESTING


@pytest.mark.parametrize(
    ("arguments", "text", "values"),
    [
        ("", "", {}),
        (" \n", " \n", {}),
        (None, "{}", {}),
        ('{"a": 1}', '{"a": 1}', {"a": 1}),
        ({"a": [None]}, '{"a": [null]}', {"a": [None]}),
        *((text, text, text) for text in ("{", '{"a": "x', "null", "[1]", "7", '"a"', "no JSON", "[" * 50_000, NESTED)),
        *((text, text, text) for text in ('{"a": NaN}', '{"a": "\\ud800"}', f'{{"a": {"9" * 5000}}}')),
        ([1], "[1]", "[1]"),
        (True, "true", "true"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_that_are_no_object_are_kept_as_text(arguments: Any, text: str, values: Any) -> None:
    for read in (parse, parse_document):
        messages = read(**called(arguments)).messages
        assert messages is not None
        assert messages[0].tool_calls is not None
        function = messages[0].tool_calls[0].function
        assert (function.arguments, function.values()) == (text, values)


@pytest.mark.parametrize(
    "said",
    [
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": []},
        {"role": "assistant", "reasoning": ""},
        {"role": "assistant", "tool_calls": [{"id": "i" * 5000, "function": {"name": "get weather!" * 30}}]},
        {"role": "assistant", "tool_calls": [{"id": "", "function": {"name": ""}}]},
        {"role": "tool"},
        {"role": "tool", "content": [], "name": "", "tool_call_id": "nobody's"},
    ],
    ids=str,
)
def test_what_was_said_before_is_not_judged(said: dict[str, Any]) -> None:
    request = parse_document(messages=[said, USER])
    assert parse(messages=[said, USER]) == request
    assert parse_document(**json.loads(request.to_entry()["request"])) == request
    assert build_request([said, USER], {}, fresh_id="1-0").messages == request.messages


@pytest.mark.parametrize(
    ("choice", "names", "is_required"),
    [
        (None, None, False),
        ("auto", None, False),
        ("none", (), False),
        ("required", None, True),
        (NAMED, ("f",), True),
        ({"type": "allowed_tools", "allowed_tools": {"tools": [NAMED]}}, ("f",), False),
    ],
)
def test_which_tools_may_be_called(choice: Any, names: tuple[str, ...] | None, is_required: bool) -> None:
    request = parse_document(messages=[USER], tools=[TOOL], tool_choice=choice)
    assert (request.chosen_tools(), request.is_tool_required) == (names, is_required)


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", **fields}]}


def called(arguments: Any) -> dict[str, Any]:
    return message(tool_calls=[{"function": {"name": "f", "arguments": arguments}}])


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], **fields}


def tool(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", **fields}}]}


def test_the_version_may_be_said_in_either_form() -> None:
    for read in (parse, parse_document):
        assert read(prompt="x", v=1).v == 1
        for version in (2, "one", "1" * 5000):
            with pytest.raises(WireError, match="v: Input should be 1, not"):
                read(prompt="x", v=version)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    (chat(temprature=1), "unknown field temprature, did you mean temperature?"),
    (chat(max_completion_token=1), "did you mean max_completion_tokens?"),
    (chat(qqqq=1), "unknown field qqqq"),
    (message(contents="x"), "messages[0]: unknown field contents, did you mean content?"),
    (message(content=[{"type": "text", "txt": "x"}]), "unknown field txt, did you mean text?"),
    (message(content="x", tool_calls=[{**CALL, "functoin": 1}]), "unknown field functoin, did you mean function?"),
    (
        tool(parametres={}),
        "tools[0]: function: unknown field parametres, did you mean parameters?",
    ),
    (chat(response_format={"type": "json_schema", "json_schema": {"shema": {}}}), "did you mean schema?"),
    ({"messages": [{"role": "assistent", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role: Field required"),
    ({"messages": [{"role": "user"}]}, "messages[0]: content is missing"),
    (
        message(content=[{"type": "image_url", "image_url": {}}]),
        "a part of type 'image_url' is not supported, only `text`",
    ),
    (message(content=[{"text": "x"}]), "content"),
    (message(content=7), "content"),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "tool_calls is for the role assistant, not user"),
    ({"messages": [{**USER, "reasoning": "x"}]}, "reasoning is for the role assistant, not user"),
    ({"messages": [{**USER, "tool_call_id": "x"}]}, "tool_call_id is for the role tool, not user"),
    (
        message(reasoning="a", reasoning_content="b"),
        "reasoning and reasoning_content are the same, but given as 'a' and 'b'",
    ),
    (called(nested(MAX_NESTING + 1)), f"more than {MAX_NESTING} deep"),
    (tool(name="a b"), "function.name"),
    (tool(name="x" * 129), "function.name"),
    (tool(parameters=7), "function.parameters"),
    (tool(parameters=nested(MAX_NESTING)), f"is nested more than {MAX_NESTING} deep"),
    (tool(description="\ud800"), "is not Unicode text"),
    (tool(strict="perhaps"), "function.strict"),
    (tool(strict="true"), "function.strict: Input should be a valid boolean"),
    (tool(strict=1), "function.strict: Input should be a valid boolean"),
    (tool(parameters='{"type": "object"}'), "function.parameters: Input should be a valid object"),
    (chat(tools=[{"type": "web_search"}]), "tools[0]"),
    (chat(tools=[7]), "tools[0]"),
    (chat(tools=[TOOL, TOOL]), "tools: f is given more than once"),
    (chat(tools=[TOOL], tool_choice="any"), "tool_choice"),
    (chat(tools=[TOOL], tool_choice={"type": "custom"}), "tool_choice"),
    (
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice: g is not one of the tools: f",
    ),
    (chat(tool_choice="required"), "tool_choice: required, but there are no tools"),
    (chat(tool_choice=NAMED), "tool_choice: f is not one of the tools: there are none"),
    (
        {"prompt": "x", "tools": [TOOL], "parallel_tool_calls": False},
        "tools is for chats, which need messages",
    ),
    ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs is for chats"),
    ({"prompt": "x", "continue_final_message": True}, "continue_final_message is for chats"),
    (chat(add_generation_prompt=True, continue_final_message=True), "contradict each other"),
    (chat(chat_template_kwargs={"tools": [], "messages": [], "x": 1}), "may not set messages, tools"),
    (chat(chat_template_kwargs=[1]), "chat_template_kwargs"),
    (chat(chat_template_kwargs={"a": "\ud800"}), "is not Unicode text"),
    (chat(reasoning_effort="hard"), "reasoning_effort"),
    (chat(response_format={"type": "json"}), "response_format.type"),
    (chat(response_format={"type": "json_schema"}), "json_schema is for the type json_schema, which needs it"),
    (
        chat(response_format={"type": "json_object"}, choice=["a"]),
        "can be given, not response_format and choice",
    ),
    (chat(tools=[TOOL], tool_choice="required", regex="a+"), "tool_choice requires a call, which contradicts regex"),
    (chat(tools=[TOOL], tool_choice=NAMED, choice=["a"]), "tool_choice requires a call, which contradicts choice"),
    (
        chat(tools=[TOOL], tool_choice=REQUIRED, response_format={"type": "json_object"}),
        "tool_choice requires a call, which contradicts response_format",
    ),
    ({"prompt": "x", "regex": ""}, "regex"),
    ({"prompt": "x", "choice": [""]}, "choice"),
    ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt": "x", "logprobs": 3, "top_logprobs": 5}, "top_logprobs: goes with logprobs true, not"),
    ({"prompt": "x", "top_logprobs": 5}, "top_logprobs: goes with logprobs true, not null"),
    ({"prompt": "x", "logprobs": True, "top_logprobs": 21}, "logprobs"),
    (
        {"prompt": "x", "max_tokens": 3, "max_completion_tokens": 5},
        "max_tokens and max_completion_tokens are the same, but given as",
    ),
    ({"messages": [USER] * (MAX_MESSAGES + 1)}, f"at most {MAX_MESSAGES} items"),
    (message(content=[{"type": "text", "text": "x"}] * (MAX_PARTS + 1)), f"at most {MAX_PARTS} items"),
    (message(tool_calls=[CALL] * (MAX_CALLS + 1)), f"at most {MAX_CALLS} items"),
    (chat(tools=[TOOL] * (MAX_TOOLS + 1)), f"at most {MAX_TOOLS} items"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "told"), MISTAKES, ids=[told[:40] for _, told in MISTAKES])
def test_a_mistake_is_refused_by_field_and_value_however_it_comes(fields: dict[str, Any], told: str) -> None:
    for read in (parse, parse_document):
        with pytest.raises(WireError) as caught:
            read(**fields)
        assert told in caught.value.message
        assert caught.value.code == "invalid_request"
        assert caught.value.message.isprintable()
        assert len(caught.value.message) < 2000


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{**USER, **{f"contemt{i}": 1 for i in range(15)}}] * MAX_MESSAGES},
        {"messages": [message(content=[{"type": "text", "tex": "x"}] * MAX_PARTS)["messages"][0]] * 50},
        chat(tools=[{"type": "function", "function": {"nam": 1}}] * MAX_TOOLS),
        chat(**{"c" * 100 + str(i): 1 for i in range(100)}),
    ],
)
def test_however_many_mistakes_a_few_are_looked_at(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusing a request must not cost more than serving it."""
    compared: list[str] = []

    def compare(name: str, *args: Any, **options: Any) -> list[str]:
        compared.append(name)
        return []

    monkeypatch.setattr("difflib.get_close_matches", compare)
    with pytest.raises(WireError, match="unknown field"):
        parse_document(**fields)
    assert len(compared) <= 5
    assert max(map(len, compared), default=0) <= 64


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": ["x"] * 1000},
        {"prompt": "x", "stop": [1] * 1000},
        {"prompt": "x", "bad_token_ids": [-1] * 1000},
        {"prompt": "x", "logit_bias": {f"x{i}": 1 for i in range(1000)}},
        {"messages": [7] * 1000},
    ],
)
def test_a_list_is_read_up_to_its_first_mistake(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        GenerateRequest.model_validate(fields)
    assert caught.value.error_count() <= 256


def test_a_mistake_is_refused_before_it_is_sent() -> None:
    with pytest.raises(RequestRefused, match=r"tools\[0\]: .*unknown field nmae, did you mean name\?"):
        build_request([USER], {"tools": [{"type": "function", "function": {"nmae": "f"}}]}, fresh_id="fresh")
    with pytest.raises(RequestRefused, match="holds <object object"):
        build_request([USER], {"chat_template_kwargs": {"x": object()}}, fresh_id="fresh")
    with pytest.raises(RequestRefused, match="holds nan"):
        build_request([USER], {"chat_template_kwargs": {"x": float("nan")}}, fresh_id="fresh")


def test_a_python_caller_passes_plain_values() -> None:
    reply_so_far = Message(role="assistant", tool_calls=(MessageToolCall(id="c1", function=FunctionCall(name="f")),))
    said: list[Any] = [USER, reply_so_far, {"role": "tool", "tool_call_id": "c1", "content": "4"}]
    request = build_request(
        said,
        {"tools": (TOOL,), "tool_choice": NAMED, "response_format": {"type": "text"}, "choice": ()},
        fresh_id="fresh",
    )
    assert request.messages is not None
    assert request.messages[1] == reply_so_far
    assert request.tools == (TOOL,)


def test_what_is_nested_as_deep_as_can_be_is_taken() -> None:
    depth = nested(MAX_NESTING)
    assert parse_document(messages=[USER], chat_template_kwargs=depth).chat_template_kwargs == depth
    with pytest.raises(WireError, match=f"more than {MAX_NESTING} deep"):
        parse_document(messages=[USER], chat_template_kwargs={"a": depth})
