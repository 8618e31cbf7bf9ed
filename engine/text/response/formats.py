"""The formats in which chat models write their replies, from the models' own chat templates."""

# ruff: noqa: RUF001  DeepSeek's delimiters are written with full-width bars

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.engine.text.response import flaws
from penstock.engine.text.response.syntax import (
    Arguments,
    Calls,
    IdMarks,
    ParameterMarks,
    ReasoningMarks,
    ReplyFormat,
    TurnMarks,
)

_THINK = ReasoningMarks("<think>\n", "\n</think>\n\n")
_BARE_THINK = ReasoningMarks("<think>", "</think>")
_THINK_TAGS = ("<think>", "</think>")
_CALL_TAGS = ("<tool_call>", "</tool_call>")
_HERMES_CALLS = Calls(Arguments.OBJECT, begin="<tool_call>\n", end="\n</tool_call>", separator="\n")
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


def _barred(*words: str) -> tuple[str, ...]:
    return tuple(f"<|{word}|>" for word in words)


def _json_list(begin: str, end: str) -> Calls:
    """Returns the syntax of calls that are a JSON list of objects between two tags."""
    return Calls(Arguments.OBJECT, group_begin=f"{begin}[", separator=", ", group_end=f"]{end}")


def _hy_v3(name: str, suffix: str) -> ReplyFormat:
    """Returns the format of Hunyuan 3, whose open checkpoints have a suffix in each tag."""

    def tag(word: str) -> str:
        return f"<{word}{suffix}>"

    words = ("think", "/think", "tool_calls", "/tool_calls", "tool_call", "/tool_call", "tool_sep", "arg_key",
             "/arg_key", "arg_value", "/arg_value")  # fmt: skip
    return ReplyFormat(
        name,
        Calls(
            Arguments.PARAMETERS,
            group_begin=tag("tool_calls") + "\n",
            begin=tag("tool_call"),
            after_name=tag("tool_sep") + "\n",
            parameter=ParameterMarks(
                tag("arg_key"), f"{tag('/arg_key')}\n{tag('arg_value')}", tag("/arg_value") + "\n"
            ),
            end=tag("/tool_call") + "\n",
            group_end=tag("/tool_calls"),
        ),
        ReasoningMarks(tag("think"), tag("/think")),
        delimiters=tuple(map(tag, words)),
        marks=(tag("tool_sep"), tag("arg_key")),
    )


def _dsml(name: str, group: str) -> ReplyFormat:
    """Returns a format in DeepSeek's markup language; `group` is the tag around all calls."""
    opening, closing = "<｜DSML｜", "</｜DSML｜"
    return ReplyFormat(
        name,
        Calls(
            Arguments.PARAMETERS,
            group_begin=f"{opening}{group}>\n",
            begin=f'{opening}invoke name="',
            after_name='">\n',
            parameter=ParameterMarks(
                f'{opening}parameter name="',
                '" string="false">',
                f"{closing}parameter>\n",
                before_text='" string="true">',
            ),
            end=f"{closing}invoke>\n",
            group_end=f"{closing}{group}>",
        ),
        _BARE_THINK,
        delimiters=(*_THINK_TAGS, f"{opening}{group}>", f"{closing}{group}>"),
        marks=("｜DSML｜", group),
        turn=_DEEPSEEK_TURN,
    )


# A template that prints no calls has the first format whose marks it has, so special cases come before general ones.
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
        delimiters=_barred("start", "channel", "constrain", "message", "end", "call", "return"),
        turn=TurnMarks(("<|start|>assistant",), "<|return|>"),
        flaws=flaws.BODY,
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
        _BARE_THINK,
        delimiters=_DEEPSEEK_TAGS,
        marks=("<｜tool▁calls▁begin｜>",),
        turn=_DEEPSEEK_TURN,
    ),
    _dsml("deepseek_v32", "function_calls"),
    _dsml("deepseek_v4", "tool_calls"),
    ReplyFormat(  # Kimi K2; the id of a call has the function's name
        "kimi_k2",
        Calls(
            Arguments.JSON,
            group_begin="<|tool_calls_section_begin|>",
            begin="<|tool_call_begin|>functions.",
            id=IdMarks(":", "[0-9]{1,4}", is_behind_name=True),
            after_name="<|tool_call_argument_begin|>",
            end="<|tool_call_end|>",
            group_end="<|tool_calls_section_end|>",
        ),
        _BARE_THINK,
        delimiters=(
            *_THINK_TAGS,
            *_barred(
                "tool_calls_section_begin",
                "tool_call_begin",
                "tool_call_argument_begin",
                "tool_call_end",
                "tool_calls_section_end",
            ),
        ),
        turn=TurnMarks(("<|im_assistant|>assistant<|im_middle|>",), "<|im_end|>"),
        marks=("<|tool_calls_section_begin|>",),
    ),
    _hy_v3("hy_v3", ""),
    _hy_v3("hy_v3_opensource", ":opensource"),
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
    ReplyFormat(
        "seed_oss",
        Calls(
            Arguments.PARAMETERS,
            begin="<seed:tool_call>\n<function=",
            after_name=">\n",
            parameter=ParameterMarks("<parameter=", ">", "</parameter>\n"),
            end="</function>\n</seed:tool_call>",
            separator="\n",
        ),
        ReasoningMarks("<seed:think>", "</seed:think>"),
        delimiters=("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
        turn=TurnMarks(("<seed:bos>assistant\n",), "<seed:eos>"),
        marks=("<seed:tool_call>",),
    ),
    ReplyFormat(
        "minimax_m2",
        Calls(
            Arguments.PARAMETERS,
            group_begin="<minimax:tool_call>\n",
            begin='<invoke name="',
            after_name='">\n',
            parameter=ParameterMarks('<parameter name="', '">', "</parameter>\n"),
            end="</invoke>\n",
            group_end="</minimax:tool_call>",
        ),
        _THINK,
        delimiters=(*_THINK_TAGS, "<minimax:tool_call>", "</minimax:tool_call>"),
        turn=TurnMarks(("]~b]ai\n",), "[e~["),
        marks=("<minimax:tool_call>",),
    ),
    ReplyFormat(  # Command R7B, Command A
        "command_r7b",
        Calls(
            Arguments.OBJECT,
            group_begin="<|START_ACTION|>[\n    ",
            separator=",\n    ",
            group_end="\n]<|END_ACTION|>",
            name_key="tool_name",
            arguments_key="parameters",
            id=IdMarks('"tool_call_id": "', "[0-9]{1,4}", '", '),
        ),
        ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),
        text_begin="<|START_RESPONSE|>",
        text_end="<|END_RESPONSE|>",
        delimiters=_barred(
            "START_THINKING", "END_THINKING", "START_ACTION", "END_ACTION", "START_RESPONSE", "END_RESPONSE"
        ),
        turn=TurnMarks(("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",), "<|END_OF_TURN_TOKEN|>"),
        marks=("<|START_ACTION|>",),
    ),
    ReplyFormat(  # Phi-4-mini
        "phi4_mini",
        _json_list("<|tool_call|>", "<|/tool_call|>"),
        _BARE_THINK,
        delimiters=(*_THINK_TAGS, *_barred("tool_call", "/tool_call")),
        turn=TurnMarks(("<|assistant|>",), "<|end|>"),
        marks=("<|tool|>", "<|/tool|>"),
    ),
    ReplyFormat(  # Granite 3
        "granite",
        _json_list("<|tool_call|>", ""),
        _BARE_THINK,
        delimiters=(*_THINK_TAGS, *_barred("tool_call")),
        turn=TurnMarks(("<|start_of_role|>assistant<|end_of_role|>",), "<|end_of_text|>"),
        marks=("<|tool_call|>", "<|start_of_role|>"),
    ),
    ReplyFormat(  # LFM2
        "lfm2",
        Calls(Arguments.PYTHON, group_begin="<|tool_call_start|>[", separator=", ", group_end="]<|tool_call_end|>"),
        _BARE_THINK,
        delimiters=(*_THINK_TAGS, *_barred("tool_call_start", "tool_call_end")),
        turn=_CHATML,
        marks=("<|tool_list_start|>",),
    ),
    ReplyFormat(  # Solar Open; a reply is a row of messages, of which each but the last ends with `<|end|>`
        "solar_open",
        Calls(
            Arguments.JSON,
            group_begin="<|tool_calls|>",
            begin="<|tool_call:begin|>",
            id=IdMarks("", "[a-z0-9]{1,10}", "<|tool_call:name|>"),
            after_name="<|tool_call:args|>",
            end="<|tool_call:end|>",
            group_end="<|calls|>",
        ),
        ReasoningMarks("<|think|>", "<|end|><|begin|>assistant"),
        text_begin="<|content|>",
        text_end="<|end|><|begin|>assistant",
        delimiters=_barred(
            "think",
            "content",
            "begin",
            "end",
            "tool_calls",
            "tool_call:begin",
            "tool_call:name",
            "tool_call:args",
            "tool_call:end",
            "calls",
        ),
        turn=TurnMarks(("<|begin|>assistant",), "<|flush|>"),
        marks=("<|tool_call:begin|>",),
    ),
    ReplyFormat(  # Llama-Nemotron
        "nemotron",
        _json_list("<TOOLCALL>", "</TOOLCALL>"),
        _THINK,
        delimiters=(*_THINK_TAGS, "<TOOLCALL>", "</TOOLCALL>"),
        turn=TurnMarks(_LLAMA_ANCHORS, "<|eot_id|>"),
        marks=("<TOOLCALL>",),
    ),
    ReplyFormat(  # Apriel, Jamba, Hunyuan A13B
        "tool_calls_list",
        _json_list("<tool_calls>", "</tool_calls>"),
        _THINK,
        delimiters=(*_THINK_TAGS, "<tool_calls>", "</tool_calls>"),
        marks=("<tool_calls>[",),
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
        flaws=flaws.TAGS,
        marks=("<function=", "<parameter="),
        turn=_CHATML,
    ),
    ReplyFormat(  # ERNIE 4.5 that thinks
        "ernie",
        _HERMES_CALLS,
        _THINK,
        text_begin="<response>\n",
        text_end="\n</response>\n",
        delimiters=(*_THINK_TAGS, *_CALL_TAGS, "<response>", "</response>"),
        marks=("<response>", "<tool_call>"),
        turn=_CHATML,
    ),
    ReplyFormat(  # HyperCLOVA X SEED Think; each part of a reply is a turn, whose role says what it is
        "hyperclovax",
        _json_list("-> tool/function_call\n", ""),
        ReasoningMarks("/think\n", "<|im_end|>\n<|im_start|>assistant"),
        text_begin="\n",
        text_end="<|im_end|>\n<|im_start|>assistant",
        delimiters=("<|im_start|>", "<|im_end|>", "-> tool/function_call"),
        marks=("-> tool/function_call", "<|im_start|>"),
        turn=TurnMarks(("<|im_start|>assistant",), "<|endofturn|>"),
    ),
    ReplyFormat(  # Hermes, Qwen2.5, Qwen3, and many that were trained like them
        "hermes",
        _HERMES_CALLS,
        _THINK,
        delimiters=(*_THINK_TAGS, *_CALL_TAGS),
        flaws={**flaws.ARGUMENTS, **flaws.BACKSLASH},
        marks=("<tool_call>",),
        turn=_CHATML,
    ),
    ReplyFormat(  # Mistral since version 11 of its tokenizers, Magistral
        "mistral",
        Calls(
            Arguments.JSON,
            begin="[TOOL_CALLS]",
            id=IdMarks("[CALL_ID]", "[a-zA-Z0-9]{9}", is_behind_name=True, is_optional=True),
            after_name="[ARGS]",
        ),
        ReasoningMarks("[THINK]", "[/THINK]"),
        delimiters=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
        turn=TurnMarks(("[/INST]", "[/TOOL_RESULTS]"), "</s>"),
        flaws=flaws.BACKSLASH,
        marks=("[TOOL_CALLS]", "[ARGS]"),
    ),
    ReplyFormat(  # earlier Mistral
        "mistral_list",
        _json_list("[TOOL_CALLS] ", ""),
        delimiters=("[TOOL_CALLS]",),
        turn=TurnMarks(("[/INST]", "[/TOOL_RESULTS]"), "</s>"),
        flaws=flaws.BACKSLASH,
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
        Calls(
            Arguments.PYTHON,
            group_begin="[",
            separator=", ",
            group_end="]",
            group_mark="<|python_start|>",
            group_mark_end="<|python_end|>",
        ),
        delimiters=_barred("python_start", "python_end"),
        turn=TurnMarks(_LLAMA_ANCHORS, "<|eot|>"),
        marks=("[func_name1(",),
    ),
    ReplyFormat(  # Llama 3.1 to 3.3
        "llama3_json",
        Calls(Arguments.OBJECT, separator="; ", arguments_key="parameters", group_mark="<|python_tag|>"),
        delimiters=_barred("python_tag"),
        turn=TurnMarks(_LLAMA_ANCHORS, "<|eot_id|>"),
        flaws={**flaws.SEPARATOR, **flaws.BACKSLASH},
        marks=("<|start_header_id|>", '"parameters"'),
    ),
)

FORMATS: Mapping[str, ReplyFormat] = {format_.name: format_ for format_ in _ALL}
