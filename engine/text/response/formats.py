"""The formats in which chat models write their replies, from the models' own chat templates."""

# ruff: noqa: RUF001  DeepSeek's delimiters are written with full-width bars

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from penstock.engine.errors import ConfigError, InvalidRequest
from penstock.engine.text.response.syntax import (
    Arguments,
    Calls,
    ParameterMarks,
    ReasoningMarks,
    ReplyFormat,
    TurnMarks,
)

MAX_PREFIX_TAGS = 256
AUTO, NONE = "auto", "none"  # values of the setting besides the names of formats

_THINK = ReasoningMarks("<think>\n", "\n</think>\n\n")
_THINK_TAGS = ("<think>", "</think>")
_CALL_TAGS = ("<tool_call>", "</tool_call>")
_CHATML = TurnMarks(("<|im_start|>assistant\n",), "<|im_end|>")
_DEEPSEEK_CALLS = Calls(Arguments.JSON, group_begin="<｜tool▁calls▁begin｜>", group_end="<｜tool▁calls▁end｜>")
_DEEPSEEK_TAGS = (
    *_THINK_TAGS,
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_DEEPSEEK_TURN = TurnMarks(
    ("<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>"), "<｜end▁of▁sentence｜>"
)
_LLAMA_ANCHORS = (
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|header_start|>assistant<|header_end|>\n\n",
)

# The first format whose marks a template has is chosen, so special cases come before general ones.
_ALL = (
    ReplyFormat(  # gpt-oss; a reply is a row of messages, each with a channel
        "gpt_oss",
        Calls(
            Arguments.JSON,
            begin="<|channel|>commentary to=functions.",
            after_name=" <|constrain|>json<|message|>",
            end="<|call|>",
        ),
        ReasoningMarks("<|channel|>analysis<|message|>", "<|end|>"),
        text_begin="<|channel|>final<|message|>",
        text_end="<|end|>",
        next_part="<|start|>assistant",
        delimiters=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        turn=TurnMarks(("<|start|>assistant",), "<|return|>"),
        marks=("<|channel|>", "<|message|>"),
    ),
    ReplyFormat(  # Gemma 4
        "gemma",
        Calls(Arguments.BARE_KEYS, begin="<|tool_call>call:", end="<tool_call|>", quote='<|"|>'),
        ReasoningMarks("<|channel>thought\n", "<channel|>"),
        delimiters=("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        turn=TurnMarks(("<|turn>model\n",), "<turn|>"),
        marks=("<|tool_call>",),
    ),
    ReplyFormat(
        "function_gemma",
        Calls(Arguments.BARE_KEYS, begin="<start_function_call>call:", end="<end_function_call>", quote="<escape>"),
        delimiters=("<start_function_call>", "<end_function_call>", "<escape>"),
        turn=TurnMarks(("<start_of_turn>model\n",), "<end_of_turn>"),
        marks=("<start_function_call>",),
    ),
    ReplyFormat(  # DeepSeek V3 and R1, and the models distilled from it
        "deepseek_v3",
        replace(
            _DEEPSEEK_CALLS,
            separator="\n",
            begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            after_name="\n```json\n",
            end="\n```<｜tool▁call▁end｜>",
        ),
        _THINK,
        delimiters=_DEEPSEEK_TAGS,
        marks=("<｜tool▁calls▁begin｜>", "```json"),
        turn=_DEEPSEEK_TURN,
    ),
    ReplyFormat(
        "deepseek_v31",
        replace(
            _DEEPSEEK_CALLS,
            begin="<｜tool▁call▁begin｜>",
            after_name="<｜tool▁sep｜>",
            end="<｜tool▁call▁end｜>",
        ),
        ReasoningMarks("<think>", "</think>"),
        delimiters=_DEEPSEEK_TAGS,
        marks=("<｜tool▁calls▁begin｜>",),
        turn=_DEEPSEEK_TURN,
    ),
    ReplyFormat(  # GLM 4.5 and later
        "glm",
        Calls(
            Arguments.PARAMETERS,
            begin="<tool_call>",
            after_name="\n",
            parameter=ParameterMarks("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
            end="</tool_call>",
            separator="\n",
        ),
        ReasoningMarks("<think>", "</think>\n"),
        delimiters=(*_THINK_TAGS, *_CALL_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        turn=TurnMarks(("<|assistant|>",), "<|user|>"),
        marks=("<arg_key>",),
    ),
    ReplyFormat(  # Qwen3-Coder, Qwen3.5 and later, Nemotron 3
        "qwen3_coder",
        Calls(
            Arguments.PARAMETERS,
            begin="<tool_call>\n<function=",
            after_name=">\n",
            parameter=ParameterMarks("<parameter=", ">\n", "\n</parameter>\n"),
            end="</function>\n</tool_call>",
            separator="\n",
        ),
        _THINK,
        delimiters=(*_THINK_TAGS, *_CALL_TAGS),
        marks=("<function=", "<parameter="),
        turn=_CHATML,
    ),
    ReplyFormat(  # Hermes, Qwen2.5, Qwen3, and many that were trained like them
        "hermes",
        Calls(Arguments.OBJECT, begin="<tool_call>\n", end="\n</tool_call>", separator="\n"),
        _THINK,
        delimiters=(*_THINK_TAGS, *_CALL_TAGS),
        marks=("<tool_call>",),
        turn=_CHATML,
    ),
    ReplyFormat(  # Mistral since version 11 of its tokenizers, Magistral
        "mistral",
        Calls(Arguments.JSON, begin="[TOOL_CALLS]", after_name="[ARGS]"),
        ReasoningMarks("[THINK]", "[/THINK]"),
        delimiters=("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
        turn=TurnMarks(("[/INST]", "[/TOOL_RESULTS]"), "</s>"),
        marks=("[TOOL_CALLS]", "[ARGS]"),
    ),
    ReplyFormat(  # earlier Mistral
        "mistral_list",
        Calls(Arguments.OBJECT, group_begin="[TOOL_CALLS] [", separator=", ", group_end="]"),
        delimiters=("[TOOL_CALLS]",),
        turn=TurnMarks(("[/INST]", "[/TOOL_RESULTS]"), "</s>"),
        marks=("[TOOL_CALLS]",),
    ),
    ReplyFormat(  # OLMo 3
        "olmo3",
        Calls(Arguments.PYTHON, group_begin="<function_calls>\n", separator="\n", group_end="\n</function_calls>"),
        ReasoningMarks("<think>", "</think>\n"),
        delimiters=(*_THINK_TAGS, "<function_calls>", "</function_calls>"),
        turn=_CHATML,
        marks=("<function_calls>",),
    ),
    ReplyFormat(  # Llama 4, and Llama 3.2 where its template asks for it
        "llama_pythonic",
        Calls(Arguments.PYTHON, group_begin="[", separator=", ", group_end="]", group_mark="<|python_start|>"),
        delimiters=("<|python_start|>", "<|python_end|>"),
        turn=TurnMarks(_LLAMA_ANCHORS, "<|eot|>"),
        marks=("[func_name1(",),
    ),
    ReplyFormat(  # Llama 3.1 to 3.3
        "llama3_json",
        Calls(Arguments.OBJECT, separator="; ", arguments_key="parameters", group_mark="<|python_tag|>"),
        delimiters=("<|python_tag|>",),
        turn=TurnMarks(_LLAMA_ANCHORS, "<|eot_id|>"),
        marks=("<|start_header_id|>", '"parameters"'),
    ),
)

FORMATS: Mapping[str, ReplyFormat] = {format_.name: format_ for format_ in _ALL}


def detect_format(template: str | None) -> str | None:
    """Returns the format of a chat template, by the tags in its text; None if it shows none."""
    if template is None:
        return None
    for format_ in _ALL:
        if _has(template, format_.marks):
            return format_.name
    return "hermes" if _has(template, _THINK_TAGS[1:]) else None  # reasons, and calls no tools


def resolve_format(setting: str, template: str | None) -> str | None:
    """Returns the format of a model with this chat template, unless `setting` names another.

    Raises:
        ConfigError: `setting` is neither `auto`, `none` nor a format.
    """
    if (why := why_no_format(setting)) is not None:
        raise ConfigError(f"chat_format {why}, not {setting!r}")
    if setting == AUTO:
        return detect_format(template)
    return None if setting == NONE else setting


def why_no_format(setting: str) -> str | None:
    """Returns what the setting `chat_format` must be, or None if it is that."""
    if setting in (AUTO, NONE) or setting in FORMATS:
        return None
    return f"must be {AUTO}, {NONE} or one of {', '.join(FORMATS)}"


def reply_prefix(format_name: str, prompt: str) -> str:
    """Returns the part of the reply that a prompt already has: the text after the last anchor, such as `<think>`.

    A prompt that ends with another turn than the model's has nothing of its reply.

    Raises:
        InvalidRequest: it has more tags than the engine's thread has time for.
    """
    format_ = FORMATS[format_name]
    found = [(prompt.rfind(anchor), len(anchor)) for anchor in format_.turn.anchors]
    place, length = max(found, default=(-1, 0))
    if place < 0:
        return _open_reasoning(format_, prompt)
    prefix = prompt[place + length :]
    if format_.turn.end and format_.turn.end in prefix:
        return ""
    num_tags = sum(map(prefix.count, format_.delimiters))
    if num_tags > MAX_PREFIX_TAGS:
        raise InvalidRequest(f"the message that is continued has {num_tags} tags, at most {MAX_PREFIX_TAGS} can be")
    return prefix


def shows_reasoning(format_name: str, template: str) -> bool:
    """Whether a chat template of this format has a reasoning tag: not all models that use the format reason."""
    reasoning = FORMATS[format_name].reasoning
    return reasoning is not None and any(tag.strip() in template for tag in (reasoning.begin, reasoning.end))


def _open_reasoning(format_: ReplyFormat, prompt: str) -> str:
    """Returns the reasoning tag at the end of a prompt that has none of the anchors."""
    begin = format_.reasoning.begin.strip() if format_.reasoning else ""
    return begin if begin and prompt.rstrip().endswith(begin) else ""


def _has(template: str, marks: Iterable[str]) -> bool:
    return all(mark in template for mark in marks)
