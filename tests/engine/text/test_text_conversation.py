"""Conversations with tools over several turns give the prompts of transformers, in templates of six families."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.errors import ConfigError, InvalidRequest
from penstock.engine.text.chat_template import RenderingEnded
from penstock.engine.text.conversation import Conversation, ConversationTemplate, EncodedChat
from penstock.engine.text.template_needs import CallShape, TemplateNeeds, short_id
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.tokenizers_for_tests import byte_level
from tests.support.packages import ROOT

FOLDER = ROOT / "tests/chat_templates"
TEMPLATES = {path.stem: path.read_text() for path in FOLDER.glob("*.jinja")}
FORMATS = {
    "hermes": "hermes",
    "llama3": "llama3_json",
    "mistral": "mistral_list",
    "deepseek": "deepseek_v3",
    "gpt_oss": "gpt_oss",
    "gemma": "function_gemma",
}
BY_FAMILY = pytest.mark.parametrize("family", TEMPLATES)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather <now> & today.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"enum": ["°C", "°F"]}, "days": {"type": "array"}},
                "required": ["city"],
            },
        },
    },
    {
        "function": {"parameters": {"properties": {}, "type": "object"}, "description": "Noon?", "name": "is_noon"},
        "type": "function",
    },
]
ARGUMENTS: dict[str, Any] = {"city": 'Zürich "HB"', "days": [1, 2.5, None, True], "unit": {"z": "<b>", "a": "\n"}}
QUESTION = {"role": "user", "content": "What's the weather? é 🛁 <|end|>"}
SYSTEM = {"role": "system", "content": "Be  brief.\n"}
CALL = {"id": "abcDEF123", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
CALLED = {"role": "assistant", "content": None, "reasoning": "Let me look.\n", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "abcDEF123", "content": '{"sky": "blue"}'}
ANSWER = {"role": "assistant", "content": " It is blue. "}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a question": [QUESTION],
    "with a system message": [SYSTEM, QUESTION],
    "a call": [QUESTION, CALLED, RESULT],
    "a call with a system message": [SYSTEM, QUESTION, CALLED, RESULT],
    "over several turns": [
        SYSTEM, QUESTION, CALLED, RESULT, ANSWER, {"role": "user", "content": "And now?"}, CALLED, RESULT,
    ],
    "an answer at the end": [QUESTION, CALLED, RESULT, ANSWER, QUESTION],
}  # fmt: skip


def tokenizer_for(family: str, **kwargs: Any) -> Any:
    return byte_level(chat_template=TEMPLATES[family], bos_token="<|start|>", **kwargs)


@cache
def ours(family: str) -> Tokenizer:
    return Tokenizer(tokenizer_for(family))


def encoded(family: str, messages: list[dict[str, Any]], **more: Any) -> EncodedChat:
    return ours(family).encode_chat(Conversation(messages, **more))


def theirs(family: str, messages: list[dict[str, Any]], **more: Any) -> str:
    more = {"add_generation_prompt": True, "tokenize": False, **more}
    return str(tokenizer_for(family).apply_chat_template(messages, **more))


def as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Turns a message into what a template wants that inserts content and arguments as they are."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(ARGUMENTS, ensure_ascii=False)}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "content": message["content"] or "", "tool_calls": calls} if calls else message


def native(family: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages as somebody who knows the template would write them for transformers."""
    return [as_text(message) for message in messages] if family == "deepseek" else messages


@BY_FAMILY
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
def test_prompts_are_those_of_transformers(family: str, name: str, tools: list[dict[str, Any]]) -> None:
    messages = CONVERSATIONS[name]
    chat = encoded(family, messages, tools=tools)
    assert chat.text == theirs(family, native(family, messages), tools=tools or None)
    tokens = tokenizer_for(family)(chat.text, add_special_tokens=False)["input_ids"]
    assert chat.token_ids == tuple(tokens)
    assert chat.reply_format == FORMATS[family]


@pytest.mark.parametrize(
    "use",
    [
        lambda template: template.render(Conversation([SYSTEM, QUESTION, CALLED, RESULT], TOOLS)),
        lambda template: template.limits(template.read_back((), None)),
        lambda template: template.shows_tools,
    ],
    ids=["render", "read back", "tools"],
)
def test_its_processes_end_with_the_last_reference(use: Callable[[ConversationTemplate], object]) -> None:
    template = ConversationTemplate(TEMPLATES["hermes"], {})
    use(template)
    is_left = weakref.ref(template._template._sandbox)
    gc.disable()
    try:
        del template
        assert is_left() is None
    finally:
        gc.enable()


@BY_FAMILY
def test_without_a_head_for_the_answer(family: str) -> None:
    messages = [QUESTION, ANSWER]
    expected = theirs(family, messages, add_generation_prompt=False)
    assert encoded(family, messages, add_generation_prompt=False).text == expected


@BY_FAMILY
@pytest.mark.parametrize("content", ["It is", "It is ", " It", "A\n"])
def test_the_final_message_goes_on(family: str, content: str) -> None:
    messages = [QUESTION, {"role": "assistant", "content": content}]
    expected = theirs(family, messages, continue_final_message=True, add_generation_prompt=False)
    chat = encoded(family, messages, continue_final_message=True)
    assert chat.text == expected
    assert chat.text.rstrip().endswith(content.strip())


def test_parts_go_on_at_the_last_one() -> None:
    parts = [{"type": "text", "text": "It "}, {"type": "text", "text": "is"}]
    messages: list[dict[str, Any]] = [QUESTION, {"role": "assistant", "content": parts}]
    expected = theirs("gemma", messages, continue_final_message=True, add_generation_prompt=False)
    chat = encoded("gemma", messages, continue_final_message=True)
    assert chat.text == expected
    assert chat.text.endswith("Itis")  # this template trims


@pytest.mark.parametrize(
    ("template", "message", "told"),
    [
        ("{{ messages[0].content }}", {"role": "assistant", "reasoning": "x"}, "has no content to continue"),
        ("{{ messages[0].role }}", {"role": "assistant", "content": "x"}, "shows no content"),
        ("{{ messages[0].content[:3] }}", {"role": "assistant", "content": "xyz"}, "does not show the final message"),
        ("{{ messages[0].content | upper }}", {"role": "assistant", "content": "x"}, "does not show the final message"),
    ],
)
def test_what_cannot_go_on_is_refused(template: str, message: dict[str, Any], told: str) -> None:
    tokenizer = Tokenizer(byte_level(chat_template=template))
    with pytest.raises(InvalidRequest, match=f"continue_final_message: .*{told}"):
        tokenizer.encode_chat(Conversation([message], continue_final_message=True))


def test_thinking_can_be_off_and_what_the_prompt_has_of_the_reply_is_told() -> None:
    off = encoded("hermes", [QUESTION], variables={"enable_thinking": False})
    assert off.text == theirs("hermes", [QUESTION], enable_thinking=False)
    assert off.reply_prefix == "<think>\n\n</think>\n\n"
    assert encoded("hermes", [QUESTION]).reply_prefix == ""
    assert encoded("deepseek", [QUESTION]).reply_prefix == "<think>\n"


def test_a_format_can_be_set() -> None:
    chat = Conversation([QUESTION])
    assert Tokenizer(tokenizer_for("hermes"), "glm").encode_chat(chat).reply_format == "glm"
    assert Tokenizer(tokenizer_for("hermes"), "none").encode_chat(chat).reply_format is None
    with pytest.raises(ConfigError, match=r"chat_format must be auto, none or one of .*, not 'hermse'"):
        Tokenizer(byte_level(), "hermse")


def test_reasoning_effort_and_the_date_are_the_template_s_variables() -> None:
    chat = encoded("gpt_oss", [QUESTION], variables={"reasoning_effort": "high"}, now_s=86_400.0)
    assert "Current date: 1970-01-02\n\nReasoning: high" in chat.text


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_a_variable_may_not_be_a_special_token(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs may not set {name}"):
        encoded("hermes", [QUESTION], variables={name: "x"})


@BY_FAMILY
def test_a_developer_s_message_is_the_system_s_where_a_template_does_not_know_it(family: str) -> None:
    developer = {**SYSTEM, "role": "developer"}
    known = family in ("gpt_oss", "gemma")
    assert encoded(family, [developer, QUESTION]).text == theirs(family, [developer if known else SYSTEM, QUESTION])


@BY_FAMILY
def test_ids_that_a_template_would_refuse_are_shortened(family: str) -> None:
    long = "call_0123456789abcdef01234567"
    messages: list[dict[str, Any]] = [
        QUESTION,
        {**CALLED, "tool_calls": [{**CALL, "id": long}]},
        {**RESULT, "tool_call_id": long},
    ]
    text = encoded(family, messages, tools=TOOLS).text
    if family == "mistral":
        assert text.count(short_id(long)) == 2
        assert long not in text
    else:
        assert text == theirs(family, native(family, messages), tools=TOOLS)


def test_where_a_call_s_function_is_shown_in_its_id_alone_ids_are_made_of_both() -> None:
    template = ConversationTemplate((FOLDER / "written/kimi_k2.jinja").read_text(), {})
    name = "get_weather"
    again = {**CALL, "function": {"name": "other", "arguments": ARGUMENTS}}
    more: dict[str, Any] = {**CALLED, "tool_calls": [again, {**CALL, "id": "x"}]}
    history: list[dict[str, Any]] = [QUESTION, CALLED, RESULT, more, RESULT]
    text = template.render(Conversation(history, TOOLS)).text
    assert re.findall(r"begin\|>(functions[^<]*)<|Return of (\S+)", text) == [
        (f"functions.{name}:0", ""),
        ("", f"functions.{name}:0"),
        ("functions.other:1", ""),
        (f"functions.{name}:2", ""),
        ("", "functions.other:1"),
        ("", f"functions.{name}:2"),
    ]
    assert "call_ids" in template.limits()
    assert "call_ids" not in ConversationTemplate(TEMPLATES["hermes"], {}).limits()


def test_a_short_id_stands_for_itself_and_no_two_long_ones_are_alike() -> None:
    assert short_id("abcDEF123") == "abcDEF123"
    shortened = {short_id(f"call_{number}") for number in range(100)}
    assert len(shortened) == 100
    assert all(len(id_) == 9 and id_.isalnum() for id_ in shortened)


@BY_FAMILY
def test_parts_are_joined_where_a_template_reads_text_alone(family: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = encoded(family, [{"role": "user", "content": parts}]).text
    expected = parts if family == "gemma" else "one\ntwo"
    assert text == theirs(family, [{"role": "user", "content": expected}])


def test_text_is_a_part_where_a_template_reads_parts_alone() -> None:
    template = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    assert (
        Tokenizer(byte_level(chat_template=template)).encode_chat(Conversation([QUESTION])).text
        == (QUESTION["content"])
    )


ONLY_THE_USERS = (
    "{% for m in messages %}{% if m.role == 'user' and m.content is not string %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% else %}{{ m.content }}{% endif %}|{% endfor %}"
)


def test_what_content_may_be_depends_on_whose_it_is() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    roles = ("system", "user", "assistant", "tool")
    messages = [{"role": role, "content": parts} for role in roles]
    text = Tokenizer(byte_level(chat_template=ONLY_THE_USERS)).encode_chat(Conversation(messages)).text
    assert text == "one\ntwo|onetwo|one\ntwo|one\ntwo|"


def test_with_tools_the_template_for_them_is_used() -> None:
    templates = {"default": "plain", "tool_use": "<tool_call>{{ tools | length }}"}
    tokenizer = Tokenizer(byte_level(chat_template=templates))
    plain, with_tools = tokenizer.encode_chat(Conversation([QUESTION])), Conversation([QUESTION], TOOLS)
    assert (plain.text, plain.reply_format) == ("plain", None)
    assert tokenizer.encode_chat(with_tools).text == "<tool_call>2"
    assert tokenizer.encode_chat(with_tools).reply_format == "hermes"
    assert Tokenizer(byte_level(chat_template={"default": "one"})).encode_chat(with_tools).text == "one"


def test_a_template_in_a_file_of_its_own_is_found(tmp_path: Path) -> None:
    byte_level(chat_template={"default": "d", "tool_use": "t"}).save_pretrained(tmp_path)
    assert (tmp_path / "chat_template.jinja").exists()
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.encode_chat(Conversation([QUESTION])).text == "d"
    assert tokenizer.encode_chat(Conversation([QUESTION], TOOLS)).text == "t"


def test_what_a_slow_moment_hid_is_found_out_the_next_time() -> None:
    answers: list[str | InvalidRequest] = [
        RenderingEnded("no answer within 30 s"),
        InvalidRequest("no"),
        "penstock_called",
    ]

    def render(messages: Any, tools: Any) -> str:
        answer = answers.pop(0)
        if isinstance(answer, InvalidRequest):
            raise answer
        return answer

    needs = TemplateNeeds(render)
    with pytest.raises(RenderingEnded, match="no answer"):
        _ = needs.calls
    assert needs.calls == CallShape(has_content=True)
    assert answers == []
    assert needs.calls == CallShape(has_content=True)  # is remembered


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="messages is empty"):
        encoded("hermes", [])
