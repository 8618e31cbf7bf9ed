"""Whatever a chat template refuses or loses, each instruction, message and tool of a conversation is in the prompt."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.engine.errors import InvalidRequest
from penstock.engine.text.bridges.limits import LIMITS, RULES, rules_of
from penstock.engine.text.bridges.probe import Probe
from penstock.engine.text.bridges.turns import EMPTY, FILLER
from penstock.engine.text.conversation import Conversation, ConversationTemplate
from tests.support.packages import ROOT

FOLDER = ROOT / "tests/chat_templates"
SOURCES = {path.stem: path.read_text() for path in sorted([*FOLDER.glob("*.jinja"), *FOLDER.glob("limited/*.jinja")])}
BY_TEMPLATE = pytest.mark.parametrize("name", SOURCES)

WITHOUT_CALLS = {"no_system", "roles_only"}
WITHOUT_TOOLS = {"no_system", "roles_only"}

LIMITS_OF = {
    "alternating": {"system", "later_system", "turns", "reasoning", "call_texts"},
    "deepseek": {"systems", "later_system", "tool_keys", "reasoning"},
    "functions_of_system": {"tool_place", "reasoning"},
    "functions_text": {"systems", "later_system", "tool_place", "reasoning", "call_texts"},
    "gemma": {"reasoning"},
    "gpt_oss": {"systems", "later_system", "several_calls", "tool_keys", "call_texts"},
    "hermes": set(),
    "llama3": {"several_calls", "reasoning", "call_texts"},
    "mistral": {"reasoning", "call_texts"},
    "no_empty": {"systems", "later_system", "empty", "tool_place", "reasoning", "call_texts"},
    "no_system": {"system", "later_system", "turns", "calls", "tools", "reasoning"},
    "one_thought": {"call_texts"},
    "roles_only": {"calls", "tools", "reasoning"},
    "system_first": {"systems", "later_system", "turns", "reasoning"},
    "systems_dropped": {"systems", "later_system", "several_calls", "reasoning", "call_texts"},
    "tool_keys": {"tool_keys", "reasoning", "call_texts"},
    "tools_listed": {"reasoning"},
    "xml_tools": {"systems", "later_system", "tool_place", "reasoning"},
}

SPOKEN = "Sentence beside a call."

# One letter a message: system, developer, user, assistant, call, result (tool), an empty user message; a call that
# was spoken with, and one that was thought about, too.
SHAPES = (
    *("su", "ssu", "du", "sdu", "sdsu", "ddu"),  # instructions in front
    *("usau", "uasu", "uas", "us", "uss", "uaud", "suasu", "sus", "susdau", "uasdsau"),  # and later
    *("s", "sd", "sau"),  # without a question
    *("uct", "uctu", "ucts", "suctsau", "uctasu", "uctuau", "ctu", "uctct", "uactau", "uactu", "cta", "ct"),
    *("ukt", "uktau", "suktsu", "uktktu", "uktauktu", "uht", "uhtauhtu"),
    *("uu", "uuau", "uaau", "au", "uaa", "a", "suau", "auau"),  # turns that do not alternate
    *("e", "eau", "sea"),
)
CALLS = {"c": {}, "k": {"content": SPOKEN}, "h": {"content": SPOKEN, "reasoning": "So be it."}}
ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "e": "user", "t": "tool"}

TOOLS: dict[str, dict[str, Any]] = {
    "complete": {
        "description": "Sentence of the tool.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "Sentence of the parameter."}},
            "required": ["word"],
        },
    },
    "no description": {"parameters": {"type": "object", "properties": {"word": {"type": "string"}}}},
    "no parameters": {"description": "Sentence of the tool."},
    "nothing": {},
    "no properties": {"parameters": {"type": "object"}},
    "no types": {
        "parameters": {
            "properties": {
                "word": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
                "words": {"items": {"enum": ["a", "b"]}},
                "more": {"properties": {"deep": {}}},
                "either": {"type": ["null", "number"]},
            }
        }
    },
}


@functools.cache
def template_of(name: str) -> ConversationTemplate:
    return ConversationTemplate(SOURCES[name], {"bos_token": "<s>", "eos_token": "</s>"})


def conversation(shape: str) -> list[dict[str, Any]]:
    return [_message(index, letter) for index, letter in enumerate(shape)]


def _message(index: int, letter: str) -> dict[str, Any]:
    if letter in CALLS:
        function = {"name": "look_up", "arguments": {"word": f"Sentence {index}."}}
        calls = [{"id": "abcdef123", "type": "function", "function": function}]
        return {"role": "assistant", **CALLS[letter], "tool_calls": calls}
    message = {"role": ROLES[letter], "content": "" if letter == "e" else f"Sentence {index}."}
    return {**message, "name": "look_up", "tool_call_id": "abcdef123"} if letter == "t" else message


def tool(keys: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look_up", **keys}}


@BY_TEMPLATE
@pytest.mark.parametrize("tools", [[], [tool(TOOLS["complete"])]], ids=["no tools", "tools"])
def test_every_sentence_is_in_the_prompt(name: str, tools: list[dict[str, Any]]) -> None:
    shown = ["look_up", "Sentence of the tool."] if tools and name not in WITHOUT_TOOLS else []
    for shape in SHAPES:
        if not CALLS.keys() & set(shape) or name not in WITHOUT_CALLS:
            text = template_of(name).render(Conversation(conversation(shape), tools)).text
            said = [f"Sentence {index}." for index, letter in enumerate(shape) if letter != "e"]
            assert [words for words in (*said, *shown) if words not in text] == [], shape
            assert text.count(SPOKEN) == shape.count("k") + shape.count("h"), shape


@BY_TEMPLATE
def test_every_tool_is_in_the_prompt_whatever_it_lacks(name: str) -> None:
    for keys in TOOLS.values():
        tools = [tool(keys), tool({"name": "second"})]
        text = template_of(name).render(Conversation(conversation("su"), tools)).text
        words = ("look_up", "second", keys.get("description", "")) if name not in WITHOUT_TOOLS else ()
        assert all(word in text for word in ("Sentence 0.", *words)), keys
        assert tools == [tool(keys), tool({"name": "second"})]  # what the caller has is not changed


@BY_TEMPLATE
def test_limits_are_found(name: str) -> None:
    limits = template_of(name).limits()
    assert set(limits) - {"parts"} == LIMITS_OF[name]
    assert template_of(name).shows_tools == ("tools" not in limits)
    assert limits == [known for known in LIMITS if known in limits]


def rendered(name: str, shape: str, **more: Any) -> str:
    return template_of(name).render(Conversation(conversation(shape), **more)).text


def given_as(name: str, messages: list[dict[str, Any]]) -> str:
    return template_of(name).render(Conversation(messages)).text


def test_instructions_in_front_become_one() -> None:
    one = [{"role": "system", "content": "Sentence 0.\n\nSentence 1."}, _message(2, "u")]
    for name in ("system_first", "systems_dropped", "deepseek"):
        assert rendered(name, "sdu") == rendered(name, "ssu") == given_as(name, one)


def test_a_later_instruction_is_a_marked_turn_at_its_place() -> None:
    marked = {"role": "user", "content": "<system>\nSentence 2.\n</system>"}
    turns = [_message(0, "u"), _message(1, "a"), marked, _message(3, "u")]
    assert rendered("systems_dropped", "uasu") == given_as("systems_dropped", turns)
    joined = [*turns[:2], {"role": "user", "content": "<system>\nSentence 2.\n</system>\n\nSentence 3."}]
    assert rendered("alternating", "uasu") == given_as("alternating", joined)
    assert "<developer>\nSentence 3.\n</developer>" in rendered("gpt_oss", "uaud")


def test_turns_that_cannot_be_merged_get_a_filler_between() -> None:
    assert f"[/TOOL_RESULTS]{FILLER}</s>[INST] Sentence 3." in rendered("alternating", "uctu")
    assert f"user\n{FILLER}" in rendered("no_system", "au")
    assert FILLER not in rendered("hermes", "uctu") + rendered("hermes", "au")


def test_an_empty_message_says_so_only_where_it_is_refused() -> None:
    assert f"user: {EMPTY}" in rendered("no_empty", "e")
    assert EMPTY not in rendered("hermes", "e")


@BY_TEMPLATE
@pytest.mark.parametrize("tools", [[], [tool(TOOLS["complete"])]], ids=["no tools", "tools"])
def test_what_a_template_shows_whole_is_rendered_as_it_was(name: str, tools: list[dict[str, Any]]) -> None:
    template = template_of(name)
    for shape in SHAPES:
        messages = [template._with_role(message) for message in conversation(shape)]
        try:
            as_given = template._shaped.render(messages, {"tools": tools or (None if name != "tools_listed" else [])})
        except InvalidRequest:
            continue
        wanted = [message["content"] for message in messages if "content" in message] + ["look_up"] * len(tools)
        num_calls = sum(map(shape.count, CALLS))
        if all(word in as_given for word in wanted) and as_given.count("look_up") >= num_calls + len(tools):
            assert template.render(Conversation(messages, tools)).text == as_given, shape


def test_the_rules_count_for_templates_that_need_them() -> None:
    assert {name: rules_of(template_of(name).limits()) for name in ("hermes", "mistral", "no_system")} == {
        "hermes": None,
        "mistral": f"{RULES} call_texts",
        "no_system": f"{RULES} system later_system turns calls",
    }
    assert rules_of(["messages"]) is None


def test_a_template_that_fails_for_any_tool_renders_without() -> None:
    source = "{% if tools %}{{ raise_exception('No tools!') }}{% endif %}{{ messages[0].content }}"
    template = ConversationTemplate(source, {})
    assert template.render(Conversation(conversation("u"), [tool(TOOLS["complete"])])).text == "Sentence 0."
    assert not template.shows_tools


def test_where_nothing_can_be_found_out_messages_stay_as_they_are() -> None:
    source = "{{ today.upper() }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    said = Conversation(conversation("susau"), variables={"today": "monday"})
    assert (
        ConversationTemplate(source, {})
        .render(said)
        .text.startswith("MONDAYsystem: Sentence 0.\nuser: Sentence 1.\nsys")
    )


def test_a_template_that_renders_nothing_is_told_apart() -> None:
    assert ConversationTemplate("{{ 1 // 0 }}", {}).limits() == ["messages"]
    with pytest.raises(InvalidRequest, match="TemplateSyntaxError"):
        ConversationTemplate("{% if %}", {}).limits()


def test_a_conversation_is_probed_once() -> None:
    asked = []

    def render(messages: Sequence[Any], tools: Sequence[Any]) -> str:
        asked.append(messages)
        return " ".join(message["content"] for message in messages)

    probe = Probe(render)
    assert probe.shows("user", "assistant")
    assert probe.shows("user", "assistant")
    assert len(asked) == 1
    assert probe.keeps(["user"], ["system"], [], tools=False)
