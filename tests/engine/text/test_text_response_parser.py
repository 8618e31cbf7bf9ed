"""Replies are read whatever a model writes, in every format, cut anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import ResponseParser

from penstock.engine.text.response.formats import FORMATS
from penstock.engine.text.response.reading import parser as parser_module
from penstock.engine.text.response.reading.calls import CallReader
from penstock.engine.text.response.reading.delta import DELIMITER, Delta, ReplyEnd
from penstock.engine.text.response.reading.parser import MAX_CUT_OFF, PIECE_CHARS
from penstock.engine.text.response.reading.source import Reading, TextCursor
from tests.engine.text.reply_texts import TOOLS, Message, as_written, is_json, parser, read, write

NAMES = list(FORMATS)
each_format = pytest.mark.parametrize("name", NAMES)
each_kind = pytest.mark.parametrize("special", [False, True], ids=["tags are text", "tags are tokens"])
LOOK_ALIKES = [
    "<",
    "<t",
    "<tool_cal",
    "</",
    "think>",
    "[",
    "[TOOL",
    "{",
    "}",
    '"',
    "\\",
    "\n",
    " ",
    "a",
    "é",
    "(",
    "|>",
]


def cut(text: str, places: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(borders)]


places = st.lists(st.integers(0, 10_000), max_size=12)
fragments = st.lists(st.sampled_from(LOOK_ALIKES), max_size=12).map("".join)
keys = st.sampled_from(["city", "days", "x_1"])
plain = st.text("ab <>{}[]()é,:=/'\"\\", max_size=12)
values = st.one_of(plain, st.integers(-99, 99), st.booleans(), st.none(), st.lists(st.integers(0, 9), max_size=3))


@st.composite
def messages(draw: st.DrawFn, name: str) -> tuple[Message, str, list[dict[str, object]]]:
    """Draws a message, its text, and the arguments of its calls."""
    format_ = FORMATS[name]
    reasoning = draw(fragments).strip() if format_.reasoning else ""
    text = draw(fragments).strip() if not name.startswith("llama") else ""
    most = 1 if name == "gpt_oss" else 3  # a call ends its replies
    least = 0 if not name.startswith("llama") else 1
    arguments: list[dict[str, object]] = draw(
        st.lists(st.dictionaries(keys, values, max_size=3), min_size=least, max_size=most)
    )
    called = [("search" if place % 2 else "unlisted", json.dumps(one)) for place, one in enumerate(arguments)]
    message = Message(text, reasoning, called)
    return message, write(name, message, call_arguments=arguments), arguments


def is_taken_literally(name: str, message: Message, arguments: list[dict[str, object]]) -> bool:
    """Checks whether nothing in the message reads as syntax, and no value as one of another type."""
    if any(tag in message.text + message.reasoning for tag in FORMATS[name].delimiters):
        return False
    if FORMATS[name].calls.parameter is not None:
        texts = [value for one in arguments for value in one.values() if isinstance(value, str)]
        return not any(text in ("True", "False", "None") or is_json(text) or text != text.strip("\n") for text in texts)
    return True


@each_format
@each_kind
@settings(max_examples=40)
@given(data=st.data())
def test_what_a_model_writes_is_read_wherever_it_is_cut(name: str, special: bool, data: st.DataObject) -> None:
    message, text, arguments = data.draw(
        messages(name).filter(lambda drawn: is_taken_literally(name, drawn[0], drawn[2]))
    )
    chunks = cut(as_written(name, text, special=special), data.draw(places))
    reading = parser(name, special=special)
    found = read(reading, chunks)
    assert (found.text, found.reasoning) == (message.text, message.reasoning)
    assert [called for called, _ in found.calls] == [called for called, _ in message.calls]
    assert [json.loads(text) for _, text in found.calls] == arguments
    assert reading.calls_tools == bool(arguments)


@each_format
@each_kind
@settings(max_examples=40)
@given(data=st.data())
def test_any_split_of_anything_gives_the_same(name: str, special: bool, data: st.DataObject) -> None:
    """With tags in any order and broken calls, nothing raises, and no delimiter leaks (`Message.take`)."""
    text = as_written(name, data.draw(garbage(name)), special=special)
    ended = data.draw(st.sampled_from(ReplyEnd))
    whole = read(parser(name, special=special), [text], ended)
    assert read(parser(name, special=special), list(text), ended) == whole
    assert read(parser(name, special=special), cut(text, data.draw(places)), ended) == whole


@each_format
@settings(max_examples=40)
@given(data=st.data())
def test_what_only_looks_like_tags_survives(name: str, data: st.DataObject) -> None:
    """Where text has no tags of its own, what is neither reasoning nor a call is text, to the last character."""
    text = data.draw(garbage(name))
    found = read(parser(name), cut(text, data.draw(places)))
    if not (found.calls or _reasons(name, text) or FORMATS[name].text_begin):
        assert found == Message(text)


@each_format
@settings(max_examples=40)
@given(data=st.data())
def test_what_is_spelled_is_no_token(name: str, data: st.DataObject) -> None:
    """With a tokenizer whose delimiters are tokens, text that spells them is text."""
    text = data.draw(garbage(name))
    if name in ("llama3_json", "llama_pythonic"):
        text = "a" + text
    if name == "gpt_oss":
        text = "a" + text
    said = text.lstrip() if FORMATS[name].text_begin.isspace() else text
    assert read(parser(name, special=True), cut(text, data.draw(places))) == Message(said)


@each_format
@settings(max_examples=40)
@given(data=st.data())
def test_what_comes_out_follows_from_the_tokens_so_far(name: str, data: st.DataObject) -> None:
    text = data.draw(garbage(name))
    chunks = cut(text, data.draw(places))
    one, other = parser(name), parser(name)
    count = data.draw(st.integers(0, len(chunks)))
    assert [one.push(chunk) for chunk in chunks[:count]] == [other.push(chunk) for chunk in chunks[:count]]
    assert [one.push(chunk) for chunk in chunks[count:]] == [other.push(chunk) for chunk in chunks[count:]]
    assert one.finish() == other.finish()


def garbage(name: str) -> st.SearchStrategy[str]:
    format_ = FORMATS[name]
    calls = format_.calls
    syntax = {
        *format_.delimiters,
        calls.begin,
        calls.end,
        calls.group_begin,
        calls.after_name,
        calls.separator,
        "{",
        "}",
    }
    known = [
        "search",
        "get_weather",
        '{"name": "search", "arguments": {',
        '"name"',
        "city",
        "=",
        ":",
        ",",
        "1",
        "x",
        " ",
        "\n",
    ]
    known += ["\\ud83d", '{"name": "\\ud83d", "arguments": {"\\udc00": 1}}', "a\\ud83d", "'\\ud83d'", '"\\ud83d"']
    known += ['"', "'", "\\", "(", ")", "[", "]", "<", "functions.", "to=", "assistant", "analysis", "\t", "true"]
    if calls.parameter is not None:
        syntax |= {calls.parameter.before_key, calls.parameter.before_value, calls.parameter.end}
    return st.lists(st.sampled_from([*sorted(syntax - {""}), *known]), max_size=25).map("".join)


def _reasons(name: str, text: str) -> bool:
    reasoning = FORMATS[name].reasoning
    return reasoning is not None and text.lstrip().startswith(reasoning.begin.strip())


@each_format
@each_kind
def test_without_tools_there_are_no_calls(name: str, special: bool) -> None:
    arguments: list[dict[str, object]] = [{"city": "Paris"}]
    text = write(name, Message(calls=[("search", "")]), call_arguments=arguments)
    found = read(parser(name, special=special, tools=()), as_written(name, text, special=special))
    assert not found.calls
    assert "Paris" in found.text
    if not special and name != "gpt_oss":
        assert found.text == text


@each_format
def test_a_call_that_is_cut_off_keeps_what_was_streamed(name: str) -> None:
    """Before its name was certain it is text, tags included; after that it has what came."""
    text = write(name, Message(calls=[("search", "")]), call_arguments=[{"city": "Paris"}])
    for end in range(len(text)):
        found = read(parser(name), text[:end])
        if found.calls:
            [(called, arguments)] = found.calls
            assert called == "search"
            assert '{"city": "Paris"}'.startswith(arguments)
            assert not found.text
        elif name != "gpt_oss":
            assert found.text == text[:end]


LEAD = "Let me see."
each_end = pytest.mark.parametrize("ended", [ReplyEnd.CUT, ReplyEnd.STOPPED], ids=["cut", "stopped"])


def each_beginning(text: str, name: str, *, special: bool, ended: ReplyEnd) -> Iterator[tuple[str, Message]]:
    """Ends `text` behind each of its characters; yields what comes out."""
    written = as_written(name, text, special=special)
    for end in range(len(written)):
        yield written[:end], read(parser(name, special=special), [written[:end]], ended)


@each_format
@each_kind
@each_end
@pytest.mark.parametrize("lead", ["", LEAD])
def test_a_call_that_something_else_ends_is_no_text(name: str, special: bool, ended: ReplyEnd, lead: str) -> None:
    """Nor are its tags; one character of a tag is not a sign yet."""
    text = write(name, Message(lead, calls=[("get_weather", "")]), call_arguments=[{"city": "Paris"}])
    format_ = FORMATS[name]
    plain = "".join(piece for piece in format_.pieces(format_.text_end) if piece not in format_.delimiters)
    tags = (*format_.delimiters, format_.text_end, plain)
    for seen, found in each_beginning(text, name, special=special, ended=ended):
        rest = "" if lead.startswith(found.text) else found.text.removeprefix(lead)
        if ended is ReplyEnd.CUT:
            assert len(rest.strip()) <= 1, seen
        else:  # a stop string comes next, so what looks like a part of a tag is none
            assert any(tag.startswith(rest) and tag != rest for tag in tags), seen


@each_format
@each_kind
@each_end
def test_a_call_whose_name_came_is_a_call_wherever_something_else_ends_it(
    name: str, special: bool, ended: ReplyEnd
) -> None:
    """It has the arguments that came."""
    arguments: list[dict[str, object]] = [{"city": "Paris", "days": 2}] * (1 if FORMATS[name].has_messages else 2)
    text = write(name, Message(calls=[("get_weather", "")] * len(arguments)), call_arguments=arguments)
    for seen, found in each_beginning(text, name, special=special, ended=ended):
        num_named = len(re.findall(f"get_weather{behind_a_name(name, special=special)}", seen, re.DOTALL))
        assert [called for called, _ in found.calls] == ["get_weather"] * num_named, seen
        assert all('{"city": "Paris", "days": 2}'.startswith(came) for _, came in found.calls), seen


def behind_a_name(name: str, *, special: bool) -> str:
    """Returns a pattern of what ends the name of a call: a character that is none of it, or the end of its header."""
    format_ = FORMATS[name]
    if format_.has_messages:
        return ".*?" + re.escape(as_written(name, format_.pieces(format_.calls.after_name)[-1], special=special))
    return ":7." if format_.calls.id is not None and format_.calls.id.before == ":" else "."


@pytest.mark.parametrize("name", ["llama3_json", "llama_pythonic"])
@each_end
def test_a_call_without_a_tag_is_no_text_once_it_names_a_tool(name: str, ended: ReplyEnd) -> None:
    written = write(name, Message(calls=[("get_weather", "")]), call_arguments=[{"city": "Paris"}])
    text = written.removeprefix(FORMATS[name].calls.group_mark)
    for seen, found in each_beginning(text, name, special=True, ended=ended):
        assert found.text == (seen if "g" not in seen else ""), seen


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"name": "Bob'),
        ("llama3_json", '{"city": "get_'),
        ("llama_pythonic", "[below"),
        ("hermes", "a < b"),
    ],
)
@each_end
def test_other_text_that_something_else_ends_stays(name: str, text: str, ended: ReplyEnd) -> None:
    for seen, found in each_beginning(text + "-", name, special=False, ended=ended):
        assert found.text == seen


@each_format
def test_what_the_model_itself_leaves_is_what_it_wrote(name: str) -> None:
    text = write(name, Message(calls=[("get_weather", "")]), call_arguments=[{"city": "Paris"}])
    if name != "gpt_oss":
        for seen, found in each_beginning(text[: text.index("weather")], name, special=False, ended=ReplyEnd.ITSELF):
            assert found.text == seen


def test_a_tag_of_reasoning_that_is_cut_is_no_text() -> None:
    for seen, found in each_beginning("<think>\nhm\n</think>\n\nYes", "hermes", special=False, ended=ReplyEnd.CUT):
        assert "<t" not in found.text, seen
        assert "</" not in found.reasoning, seen


def test_arguments_are_streamed_as_they_come() -> None:
    reading = parser("hermes")
    text = '<tool_call>\n{"name": "search", "arguments": {"q": "a'
    assert [reading.push(character).tool_calls for character in text[:-8]] == [()] * (len(text) - 8)
    released = [reading.push(character) for character in text[-8:]]
    assert [call.arguments for delta in released for call in delta.tool_calls] == [
        "{",
        '"',
        "q",
        '"',
        ":",
        " ",
        '"',
        "a",
    ]
    assert released[0].tool_calls[0].name == "search"
    assert re.fullmatch("call_[0-9a-f]{24}", released[0].tool_calls[0].id or "")


def test_only_what_could_become_a_tag_is_held_back() -> None:
    reading = parser("hermes")
    assert [reading.push(text).text for text in ("a", "<", "b", "<tool_", "x", "<tool_call>", "{", "no")] == [
        "a", "", "<b", "", "<tool_x", "", "", "<tool_call>{no",
    ]  # fmt: skip


def test_an_answer_in_json_is_streamed_where_calls_are_json_too() -> None:
    reading = parser("llama3_json")
    assert [reading.push(text).text for text in ('{"', "title", '":', ' "', "a")] == ["", "", "", '{"title": "', "a"]


def test_white_space_between_parts_belongs_to_none() -> None:
    reading = parser("hermes")
    pushed = [
        reading.push(text) for text in ("<think>", "\n", "a", "\n", "b", "\n", "</think>", "\n\n", "c", "\n", "d ")
    ]
    assert [delta.reasoning for delta in pushed] == ["", "", "a", "", "\nb", "", "", "", "", "", ""]
    assert [delta.text for delta in pushed] == ["", "", "", "", "", "", "", "", "c", "", "\nd"]
    assert reading.finish() == Delta(" ")


@pytest.mark.parametrize(
    ("prefix", "reply", "message"),
    [
        ("<think>\n", "hm</think>yes", Message("yes", "hm")),
        ("<think>", "hm</think>yes", Message("yes", "hm")),
        ("<think>\n\n</think>\n\n", "yes", Message("yes")),
        ("</think>", "yes", Message("yes")),
        ("\n", "<think>hm</think>yes", Message("yes", "hm")),
        ("Once upon ", "a time<think>", Message("a time<think>")),
        ("Once <tool_", "upon", Message("upon")),
    ],
)
@each_kind
def test_what_the_prompt_has_of_a_reply_is_not_repeated(
    prefix: str, reply: str, message: Message, special: bool
) -> None:
    if special and "<think>" in message.text:
        message = Message("a time")
    assert (
        read(parser("hermes", prefix=prefix, special=special), as_written("hermes", reply, special=special)) == message
    )


def test_special_tokens_that_are_no_syntax_can_be_shown() -> None:
    text = as_written("mistral", "a[ARGS]b[THINK]c", special=True)
    assert read(parser("mistral", special=True), text) == Message("ab", "c")
    assert read(parser("mistral", special=True, shows=True), text) == Message("a[ARGS]b", "c")


@pytest.mark.parametrize(
    ("name", "reply", "message"),
    [
        (
            "hermes",
            '<tool_call>{"arguments": {"a": 1}, "id": [2], "name": "f"}</tool_call>x',
            Message("x", calls=[("f", '{"a": 1}')]),
        ),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', Message(calls=[("f", "{}")])),
        ("hermes", '<tool_call>{"name": "f", "parameters": {}}', Message(calls=[("f", "{}")])),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>b',
            Message("b", calls=[("f", '{"a": 1}')]),
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,,}}', Message(",}}", calls=[("f", '{"a": 1,')])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b\nc"}}', Message(calls=[("f", '{"a": "b\\nc"}')])),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{}"}',
            Message('<tool_call>{"name": "f", "arguments": "{}"}'),
        ),
        ("hermes", '<tool_call>{"name": ""}</tool_call>', Message('<tool_call>{"name": ""}</tool_call>')),
        ("hermes", '<tool_call><tool_call>{"name": "f"}</tool_call>', Message("<tool_call>", calls=[("f", "{}")])),
        ("hermes", "a<think>b</think>c", Message("a<think>b</think>c")),
        ("llama3_json", '{"name": "search", "parameters": {}} and more', Message("and more", calls=[("search", "{}")])),
        ("llama3_json", '{"name": "Ada", "parameters": {}}', Message('{"name": "Ada", "parameters": {}}')),
        ("llama3_json", '{"name": "search"}', Message('{"name": "search"}')),
        ("llama3_json", 'a {"name": "search", "parameters": {}}', Message('a {"name": "search", "parameters": {}}')),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', Message(calls=[("f", "{}")])),
        ("llama_pythonic", "[see](search)", Message("[see](search)")),
        ("llama_pythonic", "[search](x)", Message("[search](x)")),
        (
            "llama_pythonic",
            "[search(a=None, b={'c': (1, -2.5)})]",
            Message(calls=[("search", '{"a": null, "b": {"c": [1, -2.5]}}')]),
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=days>\nsoon\n</parameter>\n</function>\n</tool_call>",
            Message(calls=[("get_weather", '{"days": "soon"}')]),
        ),
        (
            "qwen3_coder",
            "<tool_call><function=get_weather><parameter=city>\n12\n</parameter><parameter=days>12</parameter></function>",
            Message(calls=[("get_weather", '{"city": "12", "days": 12}')]),
        ),
        ("mistral", '[TOOL_CALLS]search{"a": 1}', Message(calls=[("search", '{"a": 1}')])),
        ("gpt_oss", "Hello", Message("Hello")),
        (
            "gpt_oss",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.f<|channel|>x json<|message|>{}",
            Message("", "hm", [("f", "{}")]),
        ),
        ("gpt_oss", " to=functions.f<|channel|>commentary json<|message|>{}", Message(calls=[("f", "{}")])),
        ("gpt_oss", "<|channel|>final <|constrain|>json<|message|>{}<|return|>", Message("{}")),
    ],
)
def test_replies_that_are_not_by_the_book(name: str, reply: str, message: Message) -> None:
    for special in (False, True):
        if special and DELIMITER.search(as_written(name, message.text, special=True)):
            continue
        assert read(parser(name, special=special), as_written(name, reply, special=special)) == message


def test_a_tool_of_the_request_is_not_needed_for_a_call_with_a_tag() -> None:
    assert "f" not in {tool.name for tool in TOOLS}
    assert read(parser("mistral"), "[TOOL_CALLS]f[ARGS]{}").calls == [("f", "{}")]


def test_a_long_name_or_header_is_given_up() -> None:
    long = "x" * 300
    assert read(parser("mistral"), f"[TOOL_CALLS]{long}[ARGS]{{}}").text == f"[TOOL_CALLS]{long}[ARGS]{{}}"
    reading = parser("gpt_oss", special=True)
    header = as_written("gpt_oss", "<|channel|>" + "x" * 600, special=True)
    assert read(reading, header) == Message("x" * 600)


def test_deep_nesting_costs_no_stack() -> None:
    deep = "[" * 50_000
    found = read(parser("hermes"), ['<tool_call>{"name": "f", "arguments": {"a": ', deep])
    assert found.calls == [("f", '{"a": ' + deep)]
    assert read(parser("llama_pythonic"), [f"[search(a={deep}"]) == Message(f"[search(a={deep}")


HALF = r"\ud83d"
HALVES = {
    "hermes": ['<tool_call>{"name": "NAME", "arguments": {"KEY": "KEY"}}</tool_call>'],
    "mistral_list": ['[TOOL_CALLS] [{"name": "NAME", "arguments": {"KEY": ["KEY"]}}]'],
    "llama3_json": [
        '<|python_tag|>{"name": "NAME", "parameters": {"KEY": "KEY"}}',
        '<|python_tag|>{"parameters": {"KEY": "KEY"}, "name": "NAME"}',
    ],
    "llama_pythonic": ["<|python_start|>[NAME(a='KEY', b={'KEY': 1})]"],
    "gemma": ['<|tool_call>call:NAME{"KEY":"KEY"}<tool_call|>'],
    "qwen3_coder": [
        '<tool_call><function=NAME><parameter=a>"KEY"</parameter><parameter=b>{"KEY": "KEY"}</parameter></function>'
    ],
}


@pytest.mark.parametrize("name", HALVES)
def test_half_a_character_stays_an_escape_in_arguments(name: str) -> None:
    for form in HALVES[name]:
        message = read(parser(name), form.replace("NAME", "search").replace("KEY", HALF))
        assert [call for call, _ in message.calls] == ["search"]
        assert HALF in message.calls[0][1]
        assert json.loads(message.calls[0][1])


@pytest.mark.parametrize("name", ["hermes", "mistral_list", "llama3_json"])
def test_what_has_half_a_character_or_a_long_one_for_its_name_is_no_call(name: str) -> None:
    for form in HALVES[name]:
        for call in ("search" + HALF, "x" * 257):
            text = form.replace("NAME", call).replace("KEY", "a")
            assert read(parser(name), text) == Message(text)
        whole = form.replace("NAME", r"\ud83d\ude00").replace("KEY", "a")
        assert [call for call, _ in read(parser(name), whole).calls] == ["\U0001f600"]


@each_kind
@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>comm", Message("", "hm")),
        ("<|channel|>final<|message|>a<|end|><|start|>assistantcomm", Message("a")),
        ("<|channel|>fin", Message()),
        (" to=functions.sea", Message()),
        ("to=you and me", Message("to=you and me")),
        ("<|channel|>commentary to=functions.f<|message|>not JSON", Message("not JSON")),
        ("<|channel|>commentary to=functions.f<|message|>", Message()),
        (
            "<|channel|>commentary to=functions.f<|message|>x<|call|><|channel|>final<|message|>b",
            Message("xb"),
        ),
    ],
)
def test_headers_are_no_text(special: bool, reply: str, message: Message) -> None:
    written = as_written("gpt_oss", reply, special=special)
    assert read(parser("gpt_oss", special=special), [written]) == message
    assert read(parser("gpt_oss", special=special), written) == message


@each_kind
def test_calls_that_the_prompt_has_do_not_count(special: bool) -> None:
    first, second = (f'<tool_call>{{"name": "{name}", "arguments": {{"a": 1}}}}</tool_call>' for name in "fg")

    def reply(prefix: str, text: str) -> tuple[Message, bool]:
        reading = parser("hermes", prefix=prefix, special=special)
        return read(reading, as_written("hermes", text, special=special)), reading.calls_tools

    assert reply(first, second) == (Message(calls=[("g", '{"a": 1}')]), True)
    assert reply(first, "b") == (Message("b"), False)
    begun, rest = first.split("1")
    assert reply(begun, "1" + rest) == (Message(calls=[("f", "1}")]), True)
    assert reply(first + begun, "x") == (Message(calls=[("f", "")]), False)


def test_a_group_of_calls_that_the_prompt_began_goes_on() -> None:
    prefix = '[TOOL_CALLS] [{"name": "f", "arguments": {}}'
    reading = parser("mistral_list", prefix=prefix)
    assert read(reading, ', {"name": "g", "arguments": {}}]').calls == [("g", "{}")]
    assert read(parser("mistral_list", prefix=prefix), " x") == Message("x")


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("qwen3_coder", "<tool_call><function=f>" + 2 * "<parameter=a>{}</parameter>" + "</function></tool_call>"),
        ("glm", "<tool_call>f" + 2 * "<arg_key>a</arg_key><arg_value>{}</arg_value>" + "</tool_call>"),
        ("llama_pythonic", "<|python_start|>[f(a={}, a={})]"),
        ("gemma", "<|tool_call>call:f{{a:{},a:{}}}<tool_call|>"),
    ],
)
def test_of_a_repeated_argument_the_first_counts(name: str, reply: str) -> None:
    text = reply.replace("{{", "{").replace("}}", "}").replace("{}", "1", 1).replace("{}", "2", 1)
    assert read(parser(name), text).calls == [("f", '{"a": 1}')]


@pytest.mark.parametrize(
    ("name", "begun", "endless"),
    [("hermes", "<tool_call>", " " * 1200), ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "1" * 5000)],
)
def test_what_does_not_end_is_given_up(name: str, begun: str, endless: str) -> None:
    reading = parser(name)
    whole = read(parser(name), [begun + endless + "a"])
    assert read(reading, begun + endless + "a") == whole
    assert whole.text.endswith("a")
    assert not reading.calls_tools


# --- what a long reply costs: each character is looked at a bounded number of times ---


@each_format
def test_white_space_at_the_beginning_is_not_looked_at_again(name: str) -> None:
    reading = parser(name)
    message = Message()
    for _ in range(50):
        message.take(reading.push(" \n" * 40))
        assert reading._held == ""
    assert message == Message()
    format_ = FORMATS[name]
    tag = format_.reasoning.begin.strip() if format_.reasoning else ""
    message.take(reading.push(f"{tag}x"))
    message.take(reading.finish())
    assert message == (Message(reasoning="x") if tag else Message(" \n" * 2000 + "x"))


def test_a_long_word_is_looked_at_once() -> None:
    looked_at: list[str] = []

    class Characters:
        def match(self, text: str, start: int) -> re.Match[str] | None:
            looked_at.append(text[start:])
            return re.compile("[a-z]*").match(text, start)

    source = TextCursor("=")
    source.place = 1
    source.settle()
    reading = source.run(Characters())  # type: ignore[arg-type]
    for _ in range(100):
        next(reading)
        source.push("abc")
    source.push(",")
    with pytest.raises(StopIteration) as ended:
        next(reading)
    assert ended.value.value == "abc" * 100
    assert sum(map(len, looked_at)) <= 301


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
def test_calls_within_calls_that_are_cut_off_are_read_a_bounded_number_of_times(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    original = CallReader.read

    def read_call(calls: CallReader, source: TextCursor, *, is_marked: bool, tag: str) -> Reading[None]:
        begun.append(source.text)
        return original(calls, source, is_marked=is_marked, tag=tag)

    monkeypatch.setattr(CallReader, "read", read_call)
    text = write(name, Message(calls=[("search", "")]), call_arguments=[{"city": "Oslo"}])
    text = text[: text.index("Oslo")] * 500 + "end"
    assert read(parser(name), [text]) == Message(text)
    assert len(begun) == MAX_CUT_OFF + 1


@each_format
@each_kind
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_what_the_prompt_has_of_a_reply_is_read_piece_by_piece(name: str, special: bool, data: st.DataObject) -> None:
    message, text, _ = data.draw(messages(name))
    assert message is not None
    place = data.draw(st.integers(0, len(text)))
    read_with = []
    for size in (1, 7, 10**6):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parser_module, "PIECE_CHARS", size)
            reading = parser(name, special=special, prefix=text[:place])
        read_with.append(read(reading, [as_written(name, text[place:], special=special)]))
    assert read_with[0] == read_with[1] == read_with[2]


def test_a_long_text_that_the_prompt_has_is_cut_before_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    original = ResponseParser.feed

    def feed(scanner: ResponseParser, text: str) -> list[dict[str, object]]:
        looked_at.append(len(text))
        return original(scanner, text)

    monkeypatch.setattr(ResponseParser, "feed", feed)
    parser("hermes", prefix="Well. " + "<tool_call>" * 10_000)
    assert max(looked_at) <= PIECE_CHARS
