"""Tags are read whether a tokenizer holds them, or parts of them, as special tokens or as text."""

# ruff: noqa: RUF001  DeepSeek's delimiters are written with full-width bars

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import astuple

import pytest

from penstock.engine.request import ResponseSpec, Tool
from penstock.engine.text.response.formats import FORMATS
from penstock.engine.text.response.grammar.reply_grammar import reply_grammar
from penstock.engine.text.response.grammar.rules import CallRule
from penstock.engine.text.response.reading.replies import ReplyFormats
from tests.engine.text.reply_texts import TOOLS, Message, read, write
from tests.engine.text.reply_walks import Vocabulary

_THINK = ("<think>", "</think>")
_CHATML = ("<|im_start|>", "<|im_end|>")
_LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
_SECTIONS = ("tool_calls_section_begin", "tool_calls_section_end", "tool_call_begin", "tool_call_argument_begin",
    "tool_call_end", "im_assistant", "im_middle", "im_end")  # fmt: skip
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")  # fmt: skip
_HY_V3 = ("think", "/think", "tool_calls", "/tool_calls", "tool_call", "/tool_call", "tool_sep", "arg_key", "/arg_key",
    "arg_value", "/arg_value")  # fmt: skip
_SOLAR = ("think", "content", "begin", "end", "tool_calls", "tool_call:begin", "tool_call:name", "tool_call:args",
    "tool_call:end", "calls", "flush")  # fmt: skip

# What tokenizers of a format's models hold as special tokens; turns' marks among them, which no reply has.
HELD: Mapping[str, Collection[str]] = {
    "gpt_oss": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    "gemma": ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|turn>", "<turn|>", "<|think|>"),
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>", "<start_of_turn>", "<end_of_turn>"),
    "deepseek_v3": (*_THINK, *_DEEPSEEK),
    "deepseek_v31": (*_THINK, *_DEEPSEEK),
    "deepseek_v32": (*_THINK, "｜DSML｜", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "deepseek_v4": (*_THINK, "｜DSML｜", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "kimi_k2": (*_THINK, *(f"<|{word}|>" for word in _SECTIONS)),
    "hy_v3": [f"<{word}>" for word in _HY_V3],
    "hy_v3_opensource": [f"<{word}:opensource>" for word in _HY_V3],
    "glm": (
        *_THINK,
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<|user|>",
    ),
    "seed_oss": ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>", "<seed:bos>", "<seed:eos>"),
    "minimax_m2": (*_THINK, "<minimax:tool_call>", "</minimax:tool_call>", "]~b]", "[e~["),
    "command_r7b": [f"<|{side}_{part}|>" for side in ("START", "END") for part in ("THINKING", "ACTION", "RESPONSE")],
    "phi4_mini": ("<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|assistant|>", "<|end|>"),
    "granite": ("<|tool_call|>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_list_start|>", "<|tool_list_end|>", *_CHATML),
    "solar_open": [f"<|{word}|>" for word in _SOLAR],
    "nemotron": ("<TOOLCALL>", "</TOOLCALL>", *_LLAMA),
    "tool_calls_list": ("<tool_calls>", "</tool_calls>", *_THINK),
    "qwen3_coder": ("<tool_call>", "</tool_call>", *_THINK, *_CHATML),
    "ernie": ("<tool_call>", "</tool_call>", "<response>", "</response>", *_THINK, *_CHATML),
    "hyperclovax": (*_CHATML, "<|endofturn|>"),
    "hermes": ("<tool_call>", "</tool_call>", *_THINK, *_CHATML),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]", "[/INST]"),
    "mistral_list": ("[TOOL_CALLS]", "[INST]", "[/INST]"),
    "olmo3": ("<function_calls>", "</function_calls>", *_CHATML),
    "llama_pythonic": ("<|python_start|>", "<|python_end|>", "<|header_start|>", "<|header_end|>", "<|eot|>"),
    "llama3_json": ("<|python_tag|>", *_LLAMA),
}
_TAG = re.compile(r"</?[^<>\s=]+[>=]?|\[/?[A-Z_]+\]|｜\w+｜|->")


def tags_of(name: str) -> list[str]:
    """Returns everything that looks like a tag in a format's syntax, parts of longer tags included."""
    format_ = FORMATS[name]
    syntax = [*_texts(astuple(format_.calls)), *_texts(astuple(format_.reasoning or format_.calls))]
    found = {tag for text in (*syntax, *format_.delimiters) for tag in _TAG.findall(text)}
    return sorted(found | {bar for tag in found for bar in re.findall(r"｜DSML｜", tag)})


def _texts(values: object) -> Iterator[str]:
    if isinstance(values, tuple):
        yield from (text for value in values for text in _texts(value))
    elif isinstance(values, str):
        yield values


def said(name: str, special_tokens: Collection[str]) -> Message:
    """Writes a message, and reads it as a stream gives it: special tokens that are not syntax have no text."""
    format_ = FORMATS[name]
    arguments: list[dict[str, object]] = [{"city": "Oslo", "days": 2}] * (1 if format_.has_messages else 2)
    thought = "hm" if format_.reasoning else ""
    text = "" if name.startswith("llama") else "So."
    message = Message(text, thought, [("get_weather", "")] * len(arguments))
    formats = ReplyFormats({token: place for place, token in enumerate(special_tokens)})
    written = formats.dialect(name).written(write(name, message, call_arguments=arguments))
    for token in sorted(special_tokens, key=len, reverse=True):
        written = written.replace(token, "")
    found = read(formats.parser(ResponseSpec(name, tools=TOOLS), "r", 0), written)
    assert found == Message(text, thought, [("get_weather", json.dumps(each)) for each in arguments])
    return found


def test_each_format_has_its_special_tokens() -> None:
    assert set(HELD) == set(FORMATS)
    for name, tokens in HELD.items():
        assert FORMATS[name].special_within(tokens), name


@pytest.mark.parametrize("name", FORMATS)
def test_special_tokens_of_a_tokenizer_are_seen(name: str) -> None:
    assert said(name, HELD[name]) == said(name, ())


@pytest.mark.parametrize("name", FORMATS)
def test_any_tag_may_be_a_special_token(name: str) -> None:
    for tokens in (*([tag] for tag in tags_of(name)), FORMATS[name].delimiters, tags_of(name)):
        said(name, tokens)


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_a_part_of_a_tag_is_a_special_token_for_the_reader_and_for_grammars(name: str) -> None:
    held = Vocabulary(special=("｜DSML｜",))
    kinds = {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}}
    schema = {"type": "object", "properties": kinds, "required": ["city"], "additionalProperties": False}
    spec = ResponseSpec(name, tools=(Tool("get_weather", json.dumps(schema)),))
    text = write(
        name, Message("So.", calls=[("get_weather", "")] * 2), call_arguments=[{"city": "Oslo", "days": 3}] * 2
    )
    reply = held.read(spec, held.tokenizer.encode(text))
    assert reply.text == "So."
    assert reply.arguments() == [("get_weather", {"city": "Oslo", "days": 3})] * 2
    for rule in (CallRule(required=True), CallRule(required=True, at_most_one=True)):
        source = reply_grammar(spec, calls=rule, has_reasoning=False, special_token_ids=held.special_token_ids)
        assert source is not None
        assert held.accepts(source, text.removeprefix("So.")) == (not rule.at_most_one)
        walks = [held.walk(source, random.Random(seed)) for seed in range(12)]
        replies = [held.read(spec, walk.ids) for walk in walks if walk.is_whole]
        assert len(replies) >= 4
        assert all(reply.arguments() and not reply.text.strip() for reply in replies)
