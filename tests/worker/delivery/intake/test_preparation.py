"""A request on the wire becomes what an engine needs: tokens, and the variables of a chat template."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest

from penstock.engine.errors import InvalidRequest, PromptTooLong
from penstock.engine.request import ResponseSpec, Tool
from penstock.engine.text.conversation import Conversation, EncodedChat
from penstock.engine.text.fewest_tokens import Check, let_pass
from penstock.protocol.wire import GenerateRequest
from penstock.tools.chaos.fake_engine import FakeText
from penstock.worker.config import WorkerConfig
from penstock.worker.intake.preparation import Preparation, Preparer, prepare
from penstock.worker.threads import Threads

CHAT = ({"role": "user", "content": "a"},)


class Listener(FakeText):
    def __init__(self) -> None:
        self.chats: list[Conversation] = []

    def encode_chat(self, chat: Conversation, check: Check = let_pass) -> EncodedChat:
        self.chats.append(chat)
        return EncodedChat((1,), "x")


def prepared(config: WorkerConfig | None = None, **fields: Any) -> Preparation:
    return Preparer(FakeText(), config or WorkerConfig()).prepare(GenerateRequest(**fields))


def heard(**fields: Any) -> Conversation:
    """Returns the conversation that comes to the tokenizer."""
    listener = Listener()
    Preparer(listener, WorkerConfig()).prepare(GenerateRequest(**{"messages": CHAT, **fields}), 12.5)
    (chat,) = listener.chats
    return chat


def test_three_forms_of_a_prompt() -> None:
    assert prepared(prompt="ab") == Preparation((97, 98))
    assert prepared(prompt_token_ids=(5, 6)) == Preparation((5, 6))
    assert prepared(messages=CHAT) == Preparation(tuple(b"user:a"))


@pytest.mark.parametrize("prompt", [{"prompt": "abc"}, {"prompt_token_ids": (1, 2, 3)}, {"messages": CHAT}])
def test_a_prompt_is_counted_in_tokens_whatever_its_form(prompt: dict[str, Any]) -> None:
    with pytest.raises(PromptTooLong, match=r"has \d tokens, the limit max_prompt_tokens is 2"):
        prepared(WorkerConfig(max_prompt_tokens=2), **prompt)
    assert prepared(WorkerConfig(max_prompt_tokens=2), prompt="ab").prompt_token_ids == (97, 98)


class Foreseeing(FakeText):
    """Says beforehand that half of the tokens are certain. What was refused by then must not be encoded."""

    def encode(self, text: str, check: Check = let_pass) -> Sequence[int]:
        check(len(text) // 2)
        return super().encode(text)

    def encode_chat(self, chat: Conversation, check: Check = let_pass) -> EncodedChat:
        check(len(chat.messages[0]["content"]) // 2)
        return super().encode_chat(chat)


@pytest.mark.parametrize(
    ("max_prompt_tokens", "max_model_len", "told"),
    [
        (10, 100, "the prompt has at least 15 tokens, the limit max_prompt_tokens is 10"),
        (None, 10, "at least 15 tokens; with max_model_len 10 it can have 9"),
        (20, None, "the prompt has (30|35) tokens, the limit max_prompt_tokens is 20"),
    ],
)
@pytest.mark.parametrize("name", ["prompt", "messages"])
def test_a_prompt_is_refused_by_what_is_certain_of_it_before_it_is_encoded(
    name: str, max_prompt_tokens: int | None, max_model_len: int | None, told: str
) -> None:
    preparer = Preparer(Foreseeing(), WorkerConfig(max_prompt_tokens=max_prompt_tokens), None, max_model_len)
    text = "x" * 30
    asked = GenerateRequest(**{name: text if name == "prompt" else ({"role": "user", "content": text},)})
    with pytest.raises(PromptTooLong, match=told):
        preparer.read(asked)
    assert len(preparer.encode(asked).prompt_token_ids) >= 30  # a call that only counts is told


def test_what_is_certain_refuses_no_prompt_that_fits() -> None:
    for count in (9, 10):
        text = "x" * (2 * count)
        preparer = Preparer(Foreseeing(), WorkerConfig(max_prompt_tokens=2 * count), None, 2 * count + 1)
        assert len(preparer.read(GenerateRequest(prompt=text)).prompt_token_ids) == 2 * count


def test_what_the_chat_template_refuses_is_the_request_s_fault() -> None:
    with pytest.raises(InvalidRequest, match="the last message must be the user's"):
        prepared(messages=({"role": "assistant", "content": "a"},))


class Toolless(FakeText):
    """The tokenizer of a model whose template shows no tools."""

    def encode_chat(self, chat: Conversation, check: Check = let_pass) -> EncodedChat:
        return EncodedChat((1,), "x", shows_tools=not chat.tools)


TOOL = {"type": "function", "function": {"name": "look_up"}}
NAMED = {"type": "function", "function": {"name": "look_up"}}
ANY_OF = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize("tool_choice", ["required", NAMED, ANY_OF])
def test_tools_that_the_model_cannot_see_are_not_required(tool_choice: Any) -> None:
    asked = GenerateRequest(messages=CHAT, tools=(TOOL,), tool_choice=tool_choice)
    with pytest.raises(InvalidRequest, match="tool_choice: the model's chat template shows no tools"):
        Preparer(Toolless(), WorkerConfig()).prepare(asked)


class Unread(FakeText):
    """The tokenizer of a model whose calls no format reads."""

    def encode_chat(self, chat: Conversation, check: Check = let_pass) -> EncodedChat:
        return EncodedChat((1,), "x", "hermes", reads_calls=False, reads_several_calls=False, reads_reasoning=False)


def test_calls_that_are_not_read_are_not_required_and_stay_text() -> None:
    preparer = Preparer(Unread(), WorkerConfig())
    with pytest.raises(InvalidRequest, match="tool_choice requires a call, but no known format reads the calls"):
        preparer.prepare(GenerateRequest(messages=CHAT, tools=(TOOL,), tool_choice="required"))
    strict = {"type": "function", "function": {"name": "look_up", "strict": True}}
    with pytest.raises(InvalidRequest, match="tools: look_up is strict, but no known format reads the calls"):
        preparer.prepare(GenerateRequest(messages=CHAT, tools=(strict,)))
    preparation = preparer.prepare(GenerateRequest(messages=CHAT, tools=(TOOL,)))
    assert preparation.ignored == ("tools",)
    assert preparation.response == ResponseSpec("hermes", reads_reasoning=False)
    assert preparer.prepare(GenerateRequest(messages=CHAT)).ignored == ()


def test_tools_that_the_model_cannot_see_are_said_to_be_ignored() -> None:
    preparer = Preparer(Toolless(), WorkerConfig())
    assert preparer.prepare(GenerateRequest(messages=CHAT, tools=(TOOL,))).ignored == ("tools",)
    assert preparer.prepare(GenerateRequest(messages=CHAT)).ignored == ()


def test_the_template_s_present_is_when_the_request_was_enqueued() -> None:
    assert heard().now_s == 12.5


def test_messages_come_with_what_they_say_and_calls_with_mappings() -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": '{"b": [1, 2.0], "a": "é"}'}}
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    chat = heard(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts, "name": "ada"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "4"},
            {"role": "assistant", "content": "four", "tool_calls": []},
        ]
    )
    assert list(chat.messages) == [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": tuple(parts), "name": "ada"},
        {
            "role": "assistant",
            "reasoning": "hm",
            "tool_calls": (
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"b": [1, 2.0], "a": "é"}}},
            ),
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": "four"},
    ]


def test_arguments_that_are_no_object_come_as_text() -> None:
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ('{"a": ', "null", "", '{"a": 1}')]
    (message,) = heard(messages=[{"role": "assistant", "tool_calls": calls}]).messages
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"a": ', "null", {}, {"a": 1}]


def test_tools_come_as_they_were_given() -> None:
    tool = {"function": {"parameters": {"z": 1, "a": None}, "strict": None, "name": "f"}, "type": "function"}
    assert str(heard(tools=[tool]).tools[0]) == str(tool)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True, False)),
        ({"add_generation_prompt": False}, (False, False)),
        ({"continue_final_message": True}, (False, True)),
        ({"continue_final_message": True, "add_generation_prompt": False}, (False, True)),
    ],
)
def test_the_answer_begins_anew_unless_the_final_message_goes_on(
    fields: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    chat = heard(**fields)
    assert (chat.add_generation_prompt, chat.continue_final_message) == expected


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"chat_template_kwargs": {"x": [1]}}, {"x": [1]}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": False, "thinking": True},
        ),
    ],
)
def test_variables_of_the_template(fields: dict[str, Any], variables: dict[str, Any]) -> None:
    assert heard(**fields).variables == variables


def test_an_echo_is_the_prompt_as_text_and_of_a_chat_what_the_assistant_began() -> None:
    assert prepared(prompt="ab", echo=True).echo == "ab"
    assert prepared(prompt_token_ids=(97, 98), echo=True).echo == "ab"
    assert prepared(prompt_token_ids=(97, 256, 2**63 - 1, 98), echo=True).echo == "ab"  # the engine judges others
    assert prepared(messages=CHAT, echo=True).echo == ""
    begun = {"role": "assistant", "content": [{"type": "text", "text": "It"}, {"type": "text", "text": "is"}]}
    asked = GenerateRequest(messages=(*CHAT, begun), echo=True, continue_final_message=True)
    assert Preparer(Listener(), WorkerConfig()).prepare(asked).echo == "It\nis"
    ended = GenerateRequest(messages=(*CHAT, begun), echo=True)
    assert Preparer(Listener(), WorkerConfig()).prepare(ended).echo == ""


CALLER = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class Hermes(FakeText):
    """A model that reasons and calls tools."""

    special_token_ids: Mapping[str, int] = MappingProxyType({"<think>": 7, "</think>": 8, "<tool_call>": 9})

    def encode_chat(self, chat: Conversation, check: Check = let_pass) -> EncodedChat:
        return EncodedChat((1, 2), "x<think>", "hermes", "<think>", has_reasoning=True)


class Compiler:
    """Compiles every source to itself."""

    def __init__(self) -> None:
        self.sources: list[str] = []

    def compile(self, source: str) -> Any:
        self.sources.append(source)
        return f"compiled {len(self.sources)}"


def test_how_a_reply_is_read_follows_from_the_template_and_the_tools() -> None:
    preparer = Preparer(Hermes(), WorkerConfig())
    plain = preparer.prepare(GenerateRequest(messages=CHAT))
    assert plain == Preparation((1, 2), ResponseSpec("hermes", "<think>"))
    tools = (Tool("f", '{"type": "object"}'),)
    assert preparer.prepare(GenerateRequest(messages=CHAT, tools=[CALLER])).response == (
        ResponseSpec("hermes", "<think>", tools)
    )
    without = preparer.prepare(GenerateRequest(messages=CHAT, tools=[CALLER], tool_choice="none"))
    assert without.response == ResponseSpec("hermes", "<think>")
    assert preparer.prepare(GenerateRequest(prompt="ab")).response is None


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x", "regex": "a+"},
        {"prompt_token_ids": (1,), "response_format": {"type": "json_object"}},
        {"messages": CHAT, "choice": ["a", "b"]},
        {"messages": CHAT, "tools": [CALLER], "tool_choice": "required"},
    ],
)
def test_what_constrains_a_reply_is_compiled(fields: dict[str, Any]) -> None:
    compiler = Compiler()
    preparation = Preparer(Hermes(), WorkerConfig(), compiler).prepare(GenerateRequest(**fields))
    assert preparation.grammar_source in compiler.sources
    assert str(preparation.grammar) == "compiled 1"
    with pytest.raises(InvalidRequest, match="this engine can't constrain replies"):
        Preparer(Hermes(), WorkerConfig()).prepare(GenerateRequest(**fields))


@pytest.mark.parametrize("form", [{"choice": ["a"]}, {"tools": [CALLER], "parallel_tool_calls": False}])
def test_a_form_needs_the_head_of_an_answer_in_front_of_it(form: dict[str, Any]) -> None:
    preparer = Preparer(Hermes(), WorkerConfig(), Compiler())
    with pytest.raises(InvalidRequest, match=r"add_generation_prompt false: .* cannot be held to a form"):
        preparer.prepare(GenerateRequest(messages=CHAT, add_generation_prompt=False, **form))
    for fields in ({}, {"add_generation_prompt": False, "continue_final_message": True}):
        assert preparer.prepare(GenerateRequest(messages=CHAT, **form, **fields)).grammar is not None
    assert preparer.prepare(GenerateRequest(messages=CHAT, add_generation_prompt=False)).grammar is None


async def test_off_the_event_loop_a_grammar_waits_for_no_chat_and_no_chat_for_a_grammar() -> None:
    threads = Threads()
    begun: list[str] = []

    class Noting(Compiler):
        def compile(self, source: str) -> Any:
            begun.append(threading.current_thread().name)
            return super().compile(source)

    preparer = Preparer(Hermes(), WorkerConfig(), Noting())
    request = GenerateRequest(messages=CHAT, choice=["a"])
    try:
        assert str((await prepare(preparer, threads, request, {}, 0.0)).grammar) == "compiled 1"
    finally:
        threads.close()
    assert begun[0].startswith("penstock-grammar")
