"""The grammar of a reply allows the right texts in each format, and the parser reads all of them."""

# ruff: noqa: RUF001  DeepSeek writes full-width bars
from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from penstock.engine.errors import InvalidRequest
from penstock.engine.request import ResponseSpec, Tool
from penstock.engine.text.response.formats import FORMATS
from penstock.engine.text.response.grammar.reply_grammar import reply_grammar
from penstock.engine.text.response.grammar.rules import (
    FREE,
    CallRule,
    ChoiceText,
    JsonText,
    LarkText,
    RegexText,
    TextRule,
)
from tests.engine.text.reply_texts import Message, write
from tests.engine.text.reply_walks import vocabulary

MAX_SPACE = 25  # characters: a line break and 24 of indentation

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 40},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "note": {"type": ["string", "null"]},
        "wind": {"type": "boolean"},
        "hours": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
        "from": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "limit": {"anyOf": [{"type": "number"}, {"type": "string"}]},
        "kind": {"$ref": "#/$defs/kind"},
    },
    "required": ["city", "unit"],
    "$defs": {"kind": {"type": "string", "enum": ["rain", "sun"]}},
}
TOOLS = (
    Tool("weather", json.dumps(WEATHER), strict=True),
    Tool("stop"),
    Tool("set", '{"type": "object", "properties": {"v": {"type": "boolean"}}, "required": ["v"]}'),
)
SCHEMAS = {tool.name: json.loads(tool.parameters) for tool in TOOLS}
REQUIRED = CallRule(required=True)
ONE = CallRule(required=True, at_most_one=True)

# One call of `set` with v = true, and one of `stop`, as the templates write them.
CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "set", "arguments": {"v": true}}\n</tool_call>',
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=set>\n<parameter=v>\ntrue\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    ),
    "glm": (
        "<tool_call>set\n<arg_key>v</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
        "<tool_call>stop\n</tool_call>",
    ),
    "gemma": ("<|tool_call>call:set{v:true}<tool_call|>", "<|tool_call>call:stop{}<tool_call|>"),
    "function_gemma": (
        "<start_function_call>call:set{v:true}<end_function_call>",
        "<start_function_call>call:stop{}<end_function_call>",
    ),
    "mistral": ('[TOOL_CALLS]set[ARGS]{"v": true}', "[TOOL_CALLS]stop[ARGS]{}"),
    "mistral_list": (
        '[TOOL_CALLS] [{"name": "set", "arguments": {"v": true}}]',
        '[TOOL_CALLS] [{"name": "stop", "arguments": {}}]',
    ),
    "deepseek_v3": (
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>set\n```json\n"
            '{"v": true}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n"
            "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
    "deepseek_v31": (
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>set<｜tool▁sep｜>"
            '{"v": true}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": (
        (
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="set">\n<｜DSML｜parameter name="v" string="false">true'
            "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
        ),
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="stop">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ),
    "deepseek_v4": (
        (
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="set">\n<｜DSML｜parameter name="v" string="false">true'
            "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
        ),
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="stop">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    ),
    "kimi_k2": (
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.set:0<|tool_call_argument_begin|>"
            '{"v": true}<|tool_call_end|><|tool_calls_section_end|>'
        ),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.stop:12<|tool_call_argument_begin|>"
            "{}<|tool_call_end|><|tool_calls_section_end|>"
        ),
    ),
    "ernie": (
        '<tool_call>\n{"name": "set", "arguments": {"v": true}}\n</tool_call>',
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    ),
    "hyperclovax": (
        '-> tool/function_call\n[{"name": "set", "arguments": {"v": true}}]',
        '-> tool/function_call\n[{"name": "stop", "arguments": {}}]',
    ),
    "gpt_oss": (
        '<|channel|>commentary to=functions.set <|constrain|>json<|message|>{"v": true}<|call|>',
        "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}<|call|>",
    ),
    "llama3_json": ('{"name": "set", "parameters": {"v": true}}', '{"name": "stop", "parameters": {}}'),
    "llama_pythonic": ("[set(v=True)]", "[stop()]"),
    "hy_v3": (
        (
            "<tool_calls>\n<tool_call>set<tool_sep>\n<arg_key>v</arg_key>\n<arg_value>true</arg_value>\n"
            "</tool_call>\n</tool_calls>"
        ),
        "<tool_calls>\n<tool_call>stop<tool_sep>\n</tool_call>\n</tool_calls>",
    ),
    "hy_v3_opensource": (
        (
            "<tool_calls:opensource>\n<tool_call:opensource>set<tool_sep:opensource>\n<arg_key:opensource>v"
            "</arg_key:opensource>\n<arg_value:opensource>true</arg_value:opensource>\n</tool_call:opensource>\n"
            "</tool_calls:opensource>"
        ),
        (
            "<tool_calls:opensource>\n<tool_call:opensource>stop<tool_sep:opensource>\n</tool_call:opensource>\n"
            "</tool_calls:opensource>"
        ),
    ),
    "seed_oss": (
        ("<seed:tool_call>\n<function=set>\n<parameter=v>true</parameter>\n</function>\n</seed:tool_call>"),
        "<seed:tool_call>\n<function=stop>\n</function>\n</seed:tool_call>",
    ),
    "minimax_m2": (
        (
            '<minimax:tool_call>\n<invoke name="set">\n<parameter name="v">true</parameter>\n</invoke>\n'
            "</minimax:tool_call>"
        ),
        '<minimax:tool_call>\n<invoke name="stop">\n</invoke>\n</minimax:tool_call>',
    ),
    "command_r7b": (
        (
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "set", "parameters": {"v": true}}\n]'
            "<|END_ACTION|>"
        ),
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "stop", "parameters": {}}\n]<|END_ACTION|>',
    ),
    "phi4_mini": (
        '<|tool_call|>[{"name": "set", "arguments": {"v": true}}]<|/tool_call|>',
        '<|tool_call|>[{"name": "stop", "arguments": {}}]<|/tool_call|>',
    ),
    "granite": (
        '<|tool_call|>[{"name": "set", "arguments": {"v": true}}]',
        '<|tool_call|>[{"name": "stop", "arguments": {}}]',
    ),
    "lfm2": ("<|tool_call_start|>[set(v=True)]<|tool_call_end|>", "<|tool_call_start|>[stop()]<|tool_call_end|>"),
    "solar_open": (
        (
            "<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>set<|tool_call:args|>"
            '{"v": true}<|tool_call:end|><|calls|>'
        ),
        ("<|tool_calls|><|tool_call:begin|>b2<|tool_call:name|>stop<|tool_call:args|>{}<|tool_call:end|><|calls|>"),
    ),
    "nemotron": (
        '<TOOLCALL>[{"name": "set", "arguments": {"v": true}}]</TOOLCALL>',
        '<TOOLCALL>[{"name": "stop", "arguments": {}}]</TOOLCALL>',
    ),
    "tool_calls_list": (
        '<tool_calls>[{"name": "set", "arguments": {"v": true}}]</tool_calls>',
        '<tool_calls>[{"name": "stop", "arguments": {}}]</tool_calls>',
    ),
    "olmo3": ("<function_calls>\nset(v=True)\n</function_calls>", "<function_calls>\nstop()\n</function_calls>"),
}
THINKERS = sorted(name for name, format_ in FORMATS.items() if format_.reasoning and not format_.has_messages)


def grammar(
    format_: str,
    calls: CallRule = FREE,
    text: TextRule | None = None,
    prefix: str = "",
    tools: Any = TOOLS,
    **kwargs: Any,
) -> str:
    spec = ResponseSpec(format_, prefix, tools)
    source = reply_grammar(spec, text=text, calls=calls, special_token_ids=vocabulary().special_token_ids, **kwargs)
    assert source is not None
    return source


def accepts(source: str, text: str) -> bool:
    return vocabulary().accepts(source, text)


def thought(format_: str) -> str:
    reasoning = FORMATS[format_].reasoning
    assert reasoning is not None
    return f"{reasoning.begin}hm, `a` < b{reasoning.end}"


def test_every_format_has_an_example() -> None:
    assert set(CALLS) == set(FORMATS)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_required_call_is_all_there_is(format_: str) -> None:
    source = grammar(format_, REQUIRED)
    first, second = CALLS[format_]
    assert accepts(source, first)
    assert accepts(source, second)
    assert not accepts(source, "Let me see.")
    assert not accepts(source, "")
    assert not accepts(source, first.replace("set", "get"))
    assert not accepts(source, first.replace("true", "1").replace("True", "1"))


@pytest.mark.parametrize("format_", FORMATS)
def test_calls_follow_each_other_unless_only_one_may_be(format_: str) -> None:
    first, second = CALLS[format_]
    syntax = FORMATS[format_].calls
    if syntax.group_begin:  # calls of one group
        end = len(syntax.group_end)
        head = len(syntax.group_begin)
        both = first[: len(first) - end] + syntax.separator + second[head:]
    else:
        both = first + syntax.separator + second
    is_one_per_turn = FORMATS[format_].has_messages
    assert accepts(grammar(format_, REQUIRED), both) == (not is_one_per_turn)
    assert not accepts(grammar(format_, ONE), both)
    assert not accepts(grammar(format_, CallRule(at_most_one=True)), both)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_named_tool_is_the_only_one(format_: str) -> None:
    source = grammar(format_, ONE, tools=TOOLS[2:])
    first, second = CALLS[format_]
    assert accepts(source, first)
    assert not accepts(source, second)


@pytest.mark.parametrize("format_", FORMATS)
def test_with_strict_tools_text_is_free_and_a_call_is_not(format_: str) -> None:
    source = grammar(format_)
    header = FORMATS[format_].text_begin
    first, _ = CALLS[format_]
    assert accepts(source, f"{header}I can't <b>say</b> {{}}.")
    assert accepts(source, first)
    assert not accepts(source, first.replace("set", "get"))
    if not header and not format_.startswith("llama"):
        assert accepts(source, f"Let me see. {first}")
        assert not accepts(source, f"Let me see. {first[: len(first) // 2]}")


@pytest.mark.parametrize(
    ("format_", "mark"), [("llama3_json", "<|python_tag|>"), ("llama_pythonic", "<|python_start|>")]
)
def test_calls_that_look_like_text_stand_at_its_beginning_or_behind_a_mark(format_: str, mark: str) -> None:
    source = grammar(format_)
    first, _ = CALLS[format_]
    assert accepts(source, f"Let me see.{mark}{first}")
    assert accepts(source, f"Like {first}, but")  # text, to the parser as well
    assert not accepts(source, first[0] + "1, 2" + first[-1])
    with_text = grammar(format_, text=JsonText('{"type": ["object", "array"]}'))
    assert accepts(with_text, mark + first)
    assert accepts(with_text, '{"name": "x"}')


@pytest.mark.parametrize("format_", THINKERS)
def test_reasoning_comes_first_or_not_at_all(format_: str) -> None:
    first, _ = CALLS[format_]
    for source in (grammar(format_, REQUIRED), grammar(format_)):
        assert accepts(source, thought(format_) + first)
        assert accepts(source, first)
        assert not accepts(source, thought(format_).strip()[:-1])
    assert not accepts(grammar(format_, REQUIRED, has_reasoning=False), thought(format_) + first)
    assert accepts(grammar(format_), thought(format_) + "Well.")


@pytest.mark.parametrize("format_", THINKERS)
def test_reasoning_goes_on_where_the_prompt_began_it(format_: str) -> None:
    reasoning = FORMATS[format_].reasoning
    assert reasoning is not None
    first, _ = CALLS[format_]
    rest = thought(format_).removeprefix(reasoning.begin)
    source = grammar(format_, REQUIRED, prefix=reasoning.begin)
    assert accepts(source, rest + first)
    assert not accepts(source, first)
    ended = grammar(format_, REQUIRED, prefix=reasoning.begin + reasoning.end)
    assert accepts(ended, first)
    assert not accepts(ended, thought(format_) + first)
    assert not accepts(grammar(format_, REQUIRED, prefix="Well, "), thought(format_) + first)


@pytest.mark.parametrize("format_", THINKERS)
def test_the_form_of_the_text_is_that_of_what_follows_the_reasoning(format_: str) -> None:
    source = grammar(format_, text=JsonText('{"type": "array", "items": {"type": "integer"}}'), tools=())
    assert accepts(source, "[1, 2]")
    assert accepts(source, f"{thought(format_)}[1, 2]")
    assert not accepts(source, thought(format_))
    assert not accepts(source, "Well, [1, 2]")
    assert not accepts(source, f"[1, 2]{thought(format_)}")


@pytest.mark.parametrize("format_", FORMATS)
def test_with_tools_a_reply_is_text_of_the_form_or_calls(format_: str) -> None:
    source = grammar(
        format_, text=JsonText('{"type": "object", "properties": {"ok": {}}, "required": ["ok"]}', strict=True)
    )
    mark = FORMATS[format_].calls.group_mark
    header = FORMATS[format_].text_begin
    first, _ = CALLS[format_]
    assert accepts(source, header + '{"ok": 1}')
    assert accepts(source, mark + first)
    assert not accepts(source, header + "Well.")
    assert not accepts(source, mark + first.replace("set", "get"))


def test_messages_of_gpt_oss_have_channels() -> None:
    analysis = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    call, _ = CALLS["gpt_oss"]
    auto = grammar("gpt_oss")
    assert accepts(auto, f"{analysis}{analysis}{final}Well.")
    assert accepts(auto, f"{analysis}{final}Let me see.<|end|><|start|>assistant{call}")
    assert accepts(auto, call.removesuffix("<|call|>"))  # where that token ends the reply
    assert not accepts(auto, "Well.")
    required = grammar("gpt_oss", REQUIRED)
    assert accepts(required, analysis + call)
    assert not accepts(required, f"{final}Well.")
    assert not accepts(required, f"{analysis}{final}Let me see.<|end|><|start|>assistant{call}")
    choice = grammar("gpt_oss", text=ChoiceText(("yes", "no")), tools=())
    assert accepts(choice, f"{analysis}{final}yes")
    assert not accepts(choice, f"{analysis}{final}maybe")
    opened = grammar("gpt_oss", REQUIRED, prefix="<|channel|>analysis<|message|>")
    assert accepts(opened, f"hm<|end|><|start|>assistant{call}")
    assert accepts(grammar("gpt_oss", text=ChoiceText(("yes", "no")), tools=(), prefix=final), "yes")


@pytest.mark.parametrize("format_", FORMATS)
def test_text_that_spells_a_special_token_is_text(format_: str) -> None:
    """A grammar allows a token; its letters one by one are something else."""
    opening = FORMATS[format_].pieces(
        FORMATS[format_].calls.group_begin or FORMATS[format_].calls.begin or "<|python_tag|>"
    )[0]
    if opening not in vocabulary().special_token_ids:
        return
    letters = [id_ for letter in opening for id_ in vocabulary().tokenizer.encode(letter)]
    free, required = vocabulary().matcher(grammar(format_)), vocabulary().matcher(grammar(format_, REQUIRED))
    header = vocabulary().tokenizer.encode(FORMATS[format_].text_begin) if FORMATS[format_].text_begin else ()
    ids = [*header, *letters, *vocabulary().tokenizer.encode("x")]
    assert free.try_consume_tokens(ids) == len(ids)
    assert free.is_accepting()
    assert required.try_consume_tokens(letters) < len(letters)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(
    ("calls", "text"),
    [(REQUIRED, None), (ONE, None), (FREE, None), (CallRule(at_most_one=True), None), (FREE, JsonText())],
    ids=["required", "one", "auto", "at most one", "json"],
)
def test_the_parser_reads_what_the_grammar_allows(format_: str, calls: CallRule, text: TextRule | None) -> None:
    spec = ResponseSpec(format_, "", TOOLS)
    source = grammar(format_, calls, text)
    num_whole = 0
    for seed in range(12):
        walk = vocabulary().walk(source, random.Random(f"{format_}/{seed}"))
        reply = vocabulary().read(spec, walk.ids)
        assert not any(token in reply.text + reply.reasoning for token in vocabulary().special_token_ids)
        if not walk.is_whole:
            continue
        num_whole += 1
        for name, arguments in reply.arguments():
            validator = jsonschema.Draft202012Validator
            validator(SCHEMAS[name], format_checker=validator.FORMAT_CHECKER).validate(arguments)
        if calls.required:
            assert reply.calls
            assert not reply.text.strip()
        if calls.at_most_one:
            assert len(reply.calls) <= 1
        if text is not None:
            assert bool(reply.calls) != bool(reply.text)
            json.loads(reply.text or "{}")
    assert num_whole >= 4


@pytest.mark.parametrize("format_", [name for name in FORMATS if not FORMATS[name].has_messages])
@pytest.mark.parametrize("prefix", ["Well, ", "\n"])
def test_a_required_call_is_one_behind_what_the_prompt_has_of_the_reply_too(format_: str, prefix: str) -> None:
    source = grammar(format_, REQUIRED, prefix=prefix)
    for seed in range(8):
        walk = vocabulary().walk(source, random.Random(f"{format_}/{seed}"))
        reply = vocabulary().read(ResponseSpec(format_, prefix, TOOLS), walk.ids)
        assert (reply.calls and not reply.text.strip()) or not walk.is_whole


BOUND: dict[str, Any] = {  # without free strings, which may be blank
    "type": "object",
    "properties": {
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "id": {"const": 12345678901234567890},
        "hours": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
        "at": {
            "type": "object",
            "properties": {"unit": {"enum": ["C", "F"]}, "none": {"type": "null"}},
            "required": ["unit", "none"],
            "additionalProperties": False,
        },
    },
    "required": ["days", "id", "hours", "at"],
    "additionalProperties": False,
}
WHOLE = {"days": 3, "id": 12345678901234567890, "hours": [True, False], "at": {"unit": "C", "none": None}}


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("special", [False, True], ids=["tags are text", "tags are tokens"])
def test_white_space_in_a_required_call_ends(format_: str, special: bool) -> None:
    """Otherwise a model may write nothing else, up to the limit of the reply."""
    source = reply_grammar(
        ResponseSpec(format_, "", (Tool("set", json.dumps(BOUND)),)),
        calls=ONE,
        has_reasoning=False,
        special_token_ids=vocabulary().special_token_ids if special else {},
    )
    assert source is not None
    assert vocabulary().longest_blank(source, random.Random(format_)) <= MAX_SPACE


@pytest.mark.parametrize("without", ["", "id"], ids=["with a long number", "without"])
@pytest.mark.parametrize("strict", [False, True])
def test_white_space_in_json_ends_behind_an_indentation(without: str, strict: bool) -> None:
    schema = BOUND | {"required": [name for name in BOUND["required"] if name != without]}
    schema["properties"] = {name: each for name, each in BOUND["properties"].items() if name != without}
    source = reply_grammar(None, text=JsonText(json.dumps(schema), strict=strict))
    assert source is not None
    assert 0 < vocabulary().longest_blank(source, random.Random(0)) <= MAX_SPACE
    value = {name: each for name, each in WHOLE.items() if name != without}
    for indent in (None, 2, 4, "\t"):
        assert accepts(source, json.dumps(value, indent=indent))
    assert not accepts(source, json.dumps(value).replace(":", ":" + " " * (MAX_SPACE + 1)))


@pytest.mark.parametrize("format_", FORMATS)
def test_a_strict_tool_that_takes_nothing_gets_nothing(format_: str) -> None:
    source = grammar(format_, ONE, tools=(Tool("stop", '{"type": "object", "properties": {}}', strict=True),))
    _, nothing = CALLS[format_]
    assert accepts(source, nothing)
    assert not accepts(source, write(format_, Message(calls=[("stop", "")]), call_arguments=[{"more": "x"}]))


def test_a_required_call_can_t_go_on_as_text() -> None:
    with pytest.raises(InvalidRequest, match="requires a call, and the final message that is continued is text"):
        grammar("gpt_oss", REQUIRED, prefix="<|channel|>final<|message|>Well, ")


BARE = [name for name, format_ in FORMATS.items() if (marks := format_.calls.parameter) and not marks.before_text]


@pytest.mark.parametrize("format_", BARE)
def test_a_bare_string_of_several_kinds_does_not_read_like_another_kind(format_: str) -> None:
    tools = (Tool("f", '{"properties": {"x": {"type": ["string", "null"]}}, "required": ["x"]}', strict=True),)
    source = grammar(format_, ONE, tools=tools)
    opening, _, closing = re.sub(r"(>|=|\")v(<|>|\")", r"\1x\2", CALLS[format_][0].replace("set", "f")).partition(
        "true"
    )
    for text, is_allowed in (
        ("word", True),
        ("null", True),
        ("12", False),
        ("true", False),
        ("[1]", False),
        ("a 1", True),
    ):
        assert accepts(source, opening + text + closing) is is_allowed
    assert accepts(source, opening + "two\nlines\n\n" + closing)


def test_where_strings_are_marked_they_may_read_like_another_kind() -> None:
    tools = (Tool("set", '{"properties": {"v": {"type": ["string", "null"]}}, "required": ["v"]}', strict=True),)
    source = grammar("deepseek_v32", ONE, tools=tools)
    call = CALLS["deepseek_v32"][0]
    for value, of_text, of_others in (("null", True, True), ("12", True, False), ("a", True, False)):
        others = call.replace("true", value)
        assert accepts(source, others) is of_others
        assert accepts(source, others.replace('"false"', '"true"')) is of_text


def test_nothing_constrains_a_reply_without_rules_and_strict_tools() -> None:
    assert reply_grammar(None) is None
    assert reply_grammar(ResponseSpec("hermes")) is None
    assert reply_grammar(ResponseSpec("hermes", "", TOOLS[1:])) is None
    assert reply_grammar(ResponseSpec("hermes", "", TOOLS[1:]), calls=CallRule(restricted=True)) is not None
    assert reply_grammar(ResponseSpec("hermes", "", TOOLS[1:]), calls=CallRule(at_most_one=True)) is not None
    assert reply_grammar(ResponseSpec("hermes", "", TOOLS[:1])) is not None


@pytest.mark.parametrize("spec", [None, ResponseSpec("hermes")], ids=["plain", "chat"])
@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (JsonText(), '{"a": []}', "[]"),
        (JsonText('{"enum": ["é", 1]}'), '"é"', '"e"'),
        (RegexText(r"[a-c]/\d{2}"), "b/12", "b/1"),
        (RegexText("^ab|c$"), "c", "d"),
        (ChoiceText(('say "hi"\n', "/\\", "x")), 'say "hi"\n', "say"),
        (ChoiceText(("/\\",)), "/\\", "/"),
        (LarkText('start: A+ "."\nA: /[ab]/\n%ignore " "'), "a b ab.", "c."),
    ],
)
def test_rules_of_the_text_hold_without_tools(spec: ResponseSpec | None, rule: TextRule, good: str, bad: str) -> None:
    source = reply_grammar(spec, text=rule)
    assert source is not None
    assert accepts(source, good)
    assert not accepts(source, bad)
    if spec is not None:
        assert accepts(source, f"<think>hm</think>\n\n{good}")


def test_a_grammar_of_the_users_is_lark_whatever_it_looks_like() -> None:
    """Llguidance takes text that begins with a brace for its own JSON, which sets other things as well."""
    source = reply_grammar(None, text=LarkText('{"grammars": [{"lark_grammar": "start: /a/"}]}'))
    assert source is not None
    assert vocabulary().matcher(source).is_error()


def test_names_and_choices_cannot_break_out_of_the_grammar() -> None:
    tool = Tool('a" | "b', strict=True)
    for format_ in FORMATS:
        matcher = vocabulary().matcher(grammar(format_, ONE, tools=(tool,)))
        assert not matcher.is_error(), matcher.get_error()
        assert not accepts(grammar(format_, ONE, tools=(tool,)), CALLS[format_][1].replace("stop", "b"))


def test_calls_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="tool_choice"):
        reply_grammar(None, calls=REQUIRED)
    with pytest.raises(InvalidRequest, match="tool_choice"):
        reply_grammar(ResponseSpec("hermes"), calls=REQUIRED)
    with pytest.raises(InvalidRequest, match="parameters of the tool 'f'"):
        grammar("hermes", REQUIRED, tools=(Tool("f", "[]"),))
    with pytest.raises(InvalidRequest, match="response_format"):
        reply_grammar(None, text=JsonText("{"))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"properties": {"a b": {}}}, "'a b'"),
        ({"minProperties": 1}, "'minProperties'"),
        ({"properties": {"x": {"oneOf": [{"type": "string"}]}}}, "oneOf"),
        ({"properties": {"x": {"type": "string", "format": "iri"}}}, "iri"),
        ({"properties": {"x": {"type": "string", "pattern": "^a|b$"}}}, "pattern"),
        ({"properties": {"x": {"$ref": "#/$defs/y"}}}, "y"),
        ({"properties": {"x": {"$ref": "#/properties/x"}}}, "circles"),
    ],
)
def test_a_strict_schema_that_a_format_has_no_syntax_for_is_refused(parameters: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        grammar("qwen3_coder", ONE, tools=(Tool("f", json.dumps(parameters), strict=True),))


def test_many_arguments_are_refused_where_the_grammar_would_be_too_deep() -> None:
    """Llguidance overflows its stack at 2000."""
    properties = {f"p{number}": {"type": "integer"} for number in range(128)}
    source = grammar("llama_pythonic", ONE, tools=(Tool("f", json.dumps({"properties": properties}), strict=True),))
    assert accepts(source, "[f(p7=1, p127=2)]")
    assert not accepts(source, "[f(p8=1, p7=2)]")
    more = json.dumps({"properties": properties | {"more": {}}})
    with pytest.raises(InvalidRequest, match="129 arguments"):
        grammar("llama_pythonic", ONE, tools=(Tool("f", more, strict=True),))


def parameter(schema: Any, **root: Any) -> str:
    return json.dumps({"properties": {"x": schema}, **root})


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "minLength": "a"}, "minLength"),
        ({"type": 5}, "type"),
        ({"type": "array", "items": {"type": 3}}, "type"),
        ({"type": [["a"]]}, "type"),
        ({"type": ["string", {}]}, "type"),
        ({"type": "object", "required": 5}, "required"),
        ({"anyOf": [{"type": "string", "pattern": 5}, {"type": "null"}]}, "pattern"),
    ],
)
def test_a_malformed_schema_is_refused_with_its_tool_and_keyword(format_: str, schema: Any, keyword: str) -> None:
    for parameters in (parameter(schema), parameter({"$ref": "#/$defs/y"}, **{"$defs": {"y": schema}})):
        for is_strict in (False, True):
            with pytest.raises(InvalidRequest, match=f"the tool 'f': {keyword} can't be"):
                grammar(format_, ONE, tools=(Tool("f", parameters, strict=is_strict),))


def test_a_union_that_has_itself_as_a_branch_is_its_other_branches() -> None:
    union = {"anyOf": [{"type": "integer"}, *[{"$ref": "#/$defs/y"}] * 16, {"type": "null"}]}
    tool = Tool("f", parameter({"$ref": "#/$defs/y"}, **{"$defs": {"y": union}}), strict=True)
    source = grammar("llama_pythonic", ONE, tools=(tool,))
    assert accepts(source, "[f(x=None)]")
    assert not accepts(source, "[f(x=True)]")


def test_shared_definitions_are_there_for_every_argument_that_refers_to_them() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "additionalProperties": False}
    properties = {name: {"type": "array", "items": {"$ref": "#/$defs/n"}} for name in "ab"}
    tool = Tool("f", json.dumps({"properties": properties, "$defs": {"n": node}}), strict=True)
    source = grammar("llama_pythonic", ONE, tools=(tool,))
    assert accepts(source, '[f(a=[{"next": {}}], b=[])]')
    assert not accepts(source, '[f(a=[], b=[{"more": {}}])]')


MIB = 2**20
HEAVY = {
    "alternatives": parameter({"anyOf": [{"type": "integer"}] * 300}),
    "values": parameter({"enum": [f"value {number}" for number in range(MIB // 14)]}),
    "values of many arguments": json.dumps(
        {
            "properties": {f"p{n}": {"anyOf": [{"$ref": "#/$defs/e"}, {"type": "null"}]} for n in range(128)},
            "$defs": {"e": {"enum": [f"value {number}" for number in range(MIB // 16)]}},
        }
    ),
    "definitions": json.dumps(
        {
            "properties": {f"p{n}": {"type": "array", "items": {"$ref": "#/$defs/d1"}} for n in range(128)},
            "$defs": {
                f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(15_000)
            }
            | {"d15000": {}},
        }
    ),
    "arguments": json.dumps({"properties": {f"p{n}": {"type": "string"} for n in range(30_000)}}),
}


@pytest.mark.parametrize("format_", ["qwen3_coder", "llama_pythonic", "gemma"])
@pytest.mark.parametrize("what", HEAVY)
@pytest.mark.timeout(60)
def test_a_schema_that_would_take_long_is_refused_with_its_tool(format_: str, what: str) -> None:
    with pytest.raises(InvalidRequest, match="the parameters of the tool 'f'"):
        grammar(format_, ONE, tools=(Tool("f", HEAVY[what]),))


@pytest.mark.parametrize(
    ("pattern", "text"), [(r"\d", "5"), (r"\d", "٣"), (r"\w", "é"), (r"\w", "_"), (r"\s", "\xa0"), (r"\D", "٣")]
)
def test_classes_of_characters_are_the_same_in_a_pattern_and_in_a_schema(pattern: str, text: str) -> None:
    in_schema = reply_grammar(None, text=JsonText(json.dumps({"type": "string", "pattern": f"^{pattern}$"})))
    alone = reply_grammar(None, text=RegexText(pattern))
    assert in_schema is not None
    assert alone is not None
    accepts = vocabulary().accepts
    assert (
        accepts(in_schema, json.dumps(text, ensure_ascii=False))
        == accepts(alone, text)
        == (text in "5_\xa0" or pattern == r"\D")
    )
