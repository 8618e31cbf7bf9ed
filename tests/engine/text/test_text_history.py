"""A template takes any history: each call gets one result, nothing that was said is lost, and what is well stays."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.text.bridges.history import NO_RESULT, complete
from penstock.engine.text.conversation import Conversation, ConversationTemplate, RenderedChat
from penstock.engine.text.template_needs import TemplateNeeds
from tests.engine.tokenizers_for_tests import CHAT_TEMPLATE as NO_TOOLS
from tests.support.packages import ROOT

TEMPLATES = {path.stem: path.read_text() for path in (ROOT / "tests/chat_templates").rglob("*.jinja")}
ALL = {**TEMPLATES, "no tools": NO_TOOLS}
BY_TEMPLATE = pytest.mark.parametrize("name", ALL)
CUT_OFF = '{"city": "Osl'

Message = dict[str, Any]


@cache
def template(name: str) -> ConversationTemplate:
    return ConversationTemplate(ALL[name], {"bos_token": "<|start|>", "eos_token": "<|end|>"})


def rendered(name: str, messages: Sequence[Message], **more: Any) -> RenderedChat:
    return template(name).render(Conversation(messages, now_s=0.0, **more))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def call(id_: str | None, arguments: Any = None, name: str = "look") -> Message:
    made: Message = {"type": "function", "function": {"name": name, "arguments": arguments or {"at": f"at-{id_}"}}}
    return made if id_ is None else {"id": id_, **made}


def called(*calls: Message, **more: Any) -> Message:
    return {"role": "assistant", **more, "tool_calls": list(calls)}


def result(id_: str | None, content: Any = None, **more: Any) -> Message:
    made = {"role": "tool", "content": f"result-{id_}" if content is None else content, **more}
    return made if id_ is None else {**made, "tool_call_id": id_}


Q, MORE = user("What?"), user("And?")
A = {"role": "assistant", "content": "So."}
C1, C2, R1, R2 = call("c1"), call("c2"), result("c1"), result("c2")
MISSING = {"role": "tool", "content": NO_RESULT}

# History, and the one that a template gets that shows all there is, with what is said of it.
HISTORIES: dict[str, tuple[list[Message], list[Message], dict[str, int]]] = {
    "no calls": ([Q, A, A, MORE], [Q, A, A, MORE], {}),
    "as it should be": ([Q, called(C1, C2), R1, R2, A, MORE], [Q, called(C1, C2), R1, R2, A, MORE], {}),
    "turn after turn": ([Q, called(C1), R1, called(C2), R2], [Q, called(C1), R1, called(C2), R2], {}),
    "another order": ([Q, called(C1, C2), R2, R1], [Q, called(C1, C2), R1, R2], {"results_moved": 1}),
    "behind the user": ([Q, called(C1), MORE, R1], [Q, called(C1), R1, MORE], {"results_moved": 1}),
    "behind another call": (
        [Q, called(C1), called(C2), R1, R2], [Q, called(C1), R1, called(C2), R2], {},
    ),
    "no result": (
        [Q, called(C1), MORE], [Q, called(C1), {**MISSING, "tool_call_id": "c1"}, MORE], {"results_missing": 1},
    ),
    "no result at the end": (
        [Q, called(C1)], [Q, called(C1), {**MISSING, "tool_call_id": "c1"}], {"results_missing": 1},
    ),
    "one result of two": (
        [Q, called(C1, C2), R2],
        [Q, called(C1, C2), {**MISSING, "tool_call_id": "c1"}, R2],
        {"results_missing": 1},
    ),
    "an id that nobody made": (
        [Q, called(C1, C2), R2, result("c9")],
        [Q, called(C1, C2), {**result("c9"), "tool_call_id": "c1"}, R2],
        {"results_moved": 1},
    ),
    "no ids": (
        [Q, called(call(None), call(None, name="find")), result(None, "a", name="find"), result(None, "b")],
        [Q, called(call(None), call(None, name="find")), result(None, "b"), result(None, "a", name="find")],
        {"results_moved": 1},
    ),
    "a call that was cut away": ([R1, Q], [R1, Q], {}),
    "a second result": ([Q, called(C1), R1, result("c1", "again")], [Q, called(C1), R1, result("c1", "again")], {}),
    "a late result": (
        [Q, called(C1), MORE, A, R1, MORE],
        [Q, called(C1), {**MISSING, "tool_call_id": "c1"}, MORE, A, R1, MORE],
        {"results_missing": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_each_call_has_one_result_which_follows_it(name: str) -> None:
    given, expected, changes = HISTORIES[name]
    assert complete(given, needs(), is_open=False) == (expected, changes)
    assert complete(expected, needs(), is_open=False)[0] == expected


def needs() -> TemplateNeeds:
    """A template that shows everything as it is."""
    return TemplateNeeds(lambda messages, tools: json.dumps(messages) + "".join(_plain(messages)))


def _plain(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for inner in value.values() for text in _plain(inner))
    else:
        yield from (text for inner in value for text in _plain(inner))


def test_calls_that_go_on_wait_for_their_results() -> None:
    history = [Q, called(C1), called(C2, C1)]
    expected = [Q, called(C1), {**MISSING, "tool_call_id": "c1"}, called(C2, C1)]
    assert complete(history, needs(), is_open=True) == (expected, {"results_missing": 1})


ids = st.sampled_from(["c1", "c2", "c3", None])
contents = st.uuids().map(str)
told = st.builds(result, ids, contents)
said = st.builds(
    lambda made, content: called(*made, content=content) if made else {"role": "assistant", "content": content},
    st.lists(st.builds(lambda id_, name: call(id_, name=name), ids, contents), max_size=3),
    contents,
)
histories = st.lists(st.one_of(told, said, contents.map(user)), min_size=1, max_size=12)


@given(history=histories)
def test_nothing_is_lost_or_twice_and_the_next_turn_begins_with_this_one(history: list[Message]) -> None:
    made, changes = complete(history, needs(), is_open=False)
    spoken = [text for message in history for text in _plain(message) if len(text) == 36]
    assert sorted(text for message in made for text in _plain(message) if len(text) == 36) == sorted(spoken)
    for place, message in enumerate(made):
        count = len(message.get("tool_calls", ()))
        assert [each["role"] for each in made[place + 1 : place + 1 + count]] == ["tool"] * count
    assert sum(message["content"] == NO_RESULT for message in made) == changes.get("results_missing", 0)
    assert complete(made, needs(), is_open=False)[0] == made
    roles = [message["role"] for message in history]
    for place in range(1, len(history)):
        if roles[place] == "assistant" != roles[place - 1]:  # here one was asked for
            before, _ = complete(history[:place], needs(), is_open=False)
            assert made[: len(before)] == before


@BY_TEMPLATE
@pytest.mark.parametrize("is_named", [False, True], ids=["no names", "names"])
def test_every_template_takes_it_and_shows_every_word(name: str, is_named: bool) -> None:
    for history, (asked, *_) in HISTORIES.items():
        messages = [{**each, "name": "look"} if is_named and each["role"] == "tool" else each for each in asked]
        text = rendered(name, messages).text
        words = [each for one in messages for each in _plain(one) if "-" in each or each == one.get("content")]
        assert [word for word in words if word not in text] == [], history


BY_KEY = {
    "deepseek_v32", "deepseek_v4", "gemma", "glm", "hy_v3", "hy_v3_opensource", "lfm2_5", "llama_pythonic",
    "minimax_m2", "olmo3", "qwen3_coder", "seed_oss", "system_first",
}  # fmt: skip
"""Templates that write arguments key by key, so that they can show no others than objects."""


@BY_TEMPLATE
@pytest.mark.parametrize("arguments", [CUT_OFF, "null", "[1]", "\n", "no JSON", '{"a": NaN}'])
def test_arguments_that_are_no_object_are_shown_where_they_can_be(name: str, arguments: str) -> None:
    chat = rendered(name, [Q, called(call("c1", arguments)), R1])
    is_emptied = name in BY_KEY
    assert chat.history_changes.get("arguments_emptied", 0) == is_emptied
    assert is_emptied or arguments in chat.text or json.dumps(arguments)[1:-1] in chat.text


@BY_TEMPLATE
def test_a_message_may_have_no_content(name: str) -> None:
    silent: list[Message] = [
        {"role": "assistant"},
        {"role": "assistant", "content": ()},
        {"role": "assistant", "reasoning": "hm"},
    ]
    for message in silent:
        assert MORE["content"] in rendered(name, [Q, message, MORE]).text
    for nothing in (None, (), ""):
        assert MORE["content"] in rendered(name, [Q, called(C1), {**R1, "content": nothing}, MORE]).text


def test_what_is_said_of_it_depends_on_what_the_template_shows() -> None:
    several = [Q, called(C1, C2, content="Both."), R1, R2, MORE]
    is_parted, is_text = {"calls_parted": 1}, {"calls_as_text": 1, "results_as_text": 2}
    is_split = {"calls_split": 1, **is_parted}
    expected: dict[str, dict[str, int]] = {name: {} for name in ("hermes", "deepseek", "gemma", "xml_tools")}
    expected |= {"llama3": is_split, "gpt_oss": is_split, "mistral": is_parted}
    expected |= {"roles_only": is_text, "no tools": is_text}
    for name, changes in expected.items():
        assert rendered(name, several).history_changes == changes, name
    lone = [R1, Q]
    assert {name for name in expected if rendered(name, lone).history_changes} == {
        "gpt_oss", "gemma", "roles_only", "no tools",
    }  # fmt: skip


def test_nothing_changes_where_nothing_can_be_found_out() -> None:
    source = (
        "{{ today.upper() }}{% for m in messages %}{{ m.role }} {{ m.tool_calls | default('') | length }}.{% endfor %}"
    )
    chat = Conversation([Q, called(C1, C2), R1, R2, R1], variables={"today": "monday"})
    made = ConversationTemplate(source, {}).render(chat)
    assert (made.text, made.history_changes) == ("MONDAYuser 0.assistant 2.tool 0.tool 0.tool 0.", {})


def test_text_stands_in_for_what_a_template_does_not_show() -> None:
    text = rendered("roles_only", [Q, called(C1, content="Wait."), MORE]).text
    assert text == (
        '<|user|>What?<|assistant|>Wait.[look {"at": "at-c1"}]<|end|>'
        f"<|user|>The result of look:{NO_RESULT}<|user|>And?<|assistant|>"
    )
