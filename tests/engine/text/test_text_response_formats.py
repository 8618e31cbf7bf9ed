"""Formats of chat replies: what is declared of each, and which one a model has."""

# ruff: noqa: RUF001  DeepSeek writes full-width bars

from __future__ import annotations

import re

import pytest

from penstock.engine.errors import InvalidRequest
from penstock.engine.text.response.choice import MAX_PREFIX_TAGS, named_in, reply_prefix, why_no_format
from penstock.engine.text.response.formats import FORMATS
from penstock.engine.text.response.syntax import ReplyFormat

TEMPLATES = {
    "hermes": "{{ '<|im_start|>' }}<tool_call>\\n{{ tool_call | tojson }}\\n</tool_call>",
    "qwen3_coder": "<tool_call>\\n<function=' + name + '>\\n<parameter=' + key + '>\\n",
    "glm": "<tool_call>{{ name }}\\n<arg_key>{{ k }}</arg_key>",
    "llama3_json": '<|start_header_id|>{{ \'{"name": "\' + name + \'", "parameters": \' }}',
    "llama_pythonic": "<|header_start|>assistant ... [func_name1(params_name1=params_value1, ...)]",
    "mistral": "[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
    "mistral_list": "[TOOL_CALLS] [{{ calls }}]",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}\\n```json\\n",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>",
    "deepseek_v32": "<｜DSML｜function_calls>\\n<｜DSML｜invoke name=",
    "deepseek_v4": "<｜DSML｜tool_calls>\\n<｜DSML｜invoke name=",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}",
    "ernie": "<response>{{ content }}</response><tool_call>\\n{{ tool_call }}",
    "hyperclovax": "<|im_start|>assistant -> tool/function_call\\n[{{ calls }}]",
    "gpt_oss": "<|start|>assistant<|channel|>final<|message|>",
    "hy_v3": "<tool_calls>\\n<tool_call>{{ name }}<tool_sep>\\n<arg_key>",
    "hy_v3_opensource": "<tool_call:opensource>{{ name }}<tool_sep:opensource>\\n<arg_key:opensource>",
    "seed_oss": "<seed:tool_call>\\n<function=' + name + '>\\n<parameter=' + key + '>",
    "minimax_m2": "<minimax:tool_call>\\n<invoke name=",
    "command_r7b": "<|START_ACTION|>[{{ calls }}]<|END_ACTION|>",
    "phi4_mini": "<|system|><|tool|>{{ tools }}<|/tool|>",
    "granite": "<|start_of_role|>Answer with <|tool_call|> and a list",
    "lfm2": "<|tool_list_start|>{{ tools }}<|tool_list_end|>",
    "solar_open": "<|tool_calls|><|tool_call:begin|>{{ id }}<|tool_call:name|>{{ name }}",
    "nemotron": "<TOOLCALL>[{{ calls }}]</TOOLCALL>",
    "tool_calls_list": "<tool_calls>[{{ calls }}]</tool_calls>",
    "olmo3": "<function_calls>{{ calls }}</function_calls>",
    "gemma": "<|tool_call>call:{{ name }}",
    "function_gemma": "<start_function_call>call:{{ name }}",
}


def test_every_format_has_a_template_here() -> None:
    assert set(TEMPLATES) == set(FORMATS)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_prints_no_calls_names_its_format(name: str) -> None:
    assert named_in(TEMPLATES[name])[0] == name == FORMATS[name].name


def test_a_setting_is_checked() -> None:
    assert why_no_format("auto") is why_no_format("none") is why_no_format("glm") is None
    assert re.fullmatch("must be auto, none or one of .*hermes.*", why_no_format("hermse") or "")


@pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
def test_syntax_comes_apart_into_its_delimiters_and_text(format_: ReplyFormat) -> None:
    for syntax in (format_.calls.begin, format_.calls.end, format_.calls.group_begin, format_.calls.after_name):
        pieces = format_.pieces(syntax)
        assert "".join(pieces) == syntax
        assert not any(
            tag in piece for piece in pieces if piece not in format_.delimiters for tag in format_.delimiters
        )


@pytest.mark.parametrize(
    ("name", "prompt", "prefix"),
    [
        ("hermes", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", ""),
        ("hermes", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("hermes", "<|im_start|>assistant\nhm<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n", ""),
        ("hermes", "<|im_start|>assistant\nOnce upon", "Once upon"),
        ("hermes", "[user]hi[model]<think>\n", "<think>"),
        ("hermes", "[user]hi[model]", ""),
        ("mistral", "[INST]a[/INST]b</s>[TOOL_RESULTS]1[/TOOL_RESULTS]", ""),
        ("deepseek_v31", "<｜User｜>hi<｜Assistant｜></think>", "</think>"),
        ("gpt_oss", "<|start|>user<|message|>hi<|end|><|start|>assistant", ""),
    ],
)
def test_a_prompt_may_have_the_beginning_of_a_reply(name: str, prompt: str, prefix: str) -> None:
    assert reply_prefix(name, prompt) == prefix


def test_a_message_that_is_continued_has_a_bounded_number_of_tags() -> None:
    """The engine's thread looks at what follows each tag."""
    prompt = "<|im_start|>assistant\n" + "Well. <tool_call>" * MAX_PREFIX_TAGS
    assert reply_prefix("hermes", prompt) == "Well. <tool_call>" * MAX_PREFIX_TAGS
    with pytest.raises(
        InvalidRequest, match=f"is continued has {MAX_PREFIX_TAGS + 1} tags, the limit is {MAX_PREFIX_TAGS}"
    ):
        reply_prefix("hermes", prompt + "</think>")
