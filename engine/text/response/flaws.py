"""Calls that are nearly right: the flaws of each format's models that are known, and where each was reported.

A flaw is mended only without a grammar, where the name is one of the request's functions and nothing else can be meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class Flaw(Enum):
    NO_OPENING = "the tag in front of a call is missing"
    STRAY_TAG = "a tag around a call stands twice, or with a bracket too many"
    NO_PARAMETER_END = "the tag behind a parameter is missing"
    TEXT_ARGUMENTS = "the arguments are the text of a JSON object"
    NULL_ARGUMENTS = "the arguments are null"
    LIST = "a list of calls stands in place of one"
    LONE_BACKSLASH = "a backslash in a string escapes nothing"
    OTHER_SEPARATOR = "a comma or a line break divides calls"
    NO_BODY = "a call of a function that needs no arguments has no body"


_BACKSLASH = {Flaw.LONE_BACKSLASH: "https://github.com/FoundationAgents/OpenManus/issues/1161"}
_STRAY = {Flaw.STRAY_TAG: "https://github.com/QwenLM/qwen-code/issues/10700"}
_QWEN_CODER = {
    **_STRAY,
    Flaw.NO_OPENING: "https://github.com/ollama/ollama/pull/17742",  # 3 of 16 and 7 of 16 turns
    Flaw.NO_PARAMETER_END: "https://github.com/ollama/ollama/pull/17914",
}

_TAGGED = (
    *("gemma", "function_gemma", "deepseek_v3", "deepseek_v31", "hy_v3", "hy_v3_opensource", "glm", "seed_oss"),
    *(
        "minimax_m2",
        "command_r7b",
        "phi4_mini",
        "granite",
        "lfm2",
        "solar_open",
        "nemotron",
        "tool_calls_list",
        "olmo3",
    ),
)

FLAWS: Mapping[str, Mapping[Flaw, str]] = MappingProxyType(
    {
        "qwen3_coder": _QWEN_CODER,
        "hermes": {
            Flaw.TEXT_ARGUMENTS: "https://github.com/vllm-project/vllm/pull/54964",
            Flaw.NULL_ARGUMENTS: "https://github.com/NousResearch/hermes-agent/issues/83937",
            Flaw.LIST: "https://github.com/huggingface/smolagents/pull/1003",
            **_BACKSLASH,
            **_STRAY,
        },
        "llama3_json": {
            Flaw.OTHER_SEPARATOR: "https://github.com/vllm-project/vllm/pull/47612",
            **_BACKSLASH,
        },
        "mistral": {**_BACKSLASH, **_STRAY},
        "mistral_list": {**_BACKSLASH, **_STRAY},
        **dict.fromkeys(_TAGGED, _STRAY),
        "gpt_oss": {Flaw.NO_BODY: "https://github.com/avalan-ai/avalan/pull/715"},
    }
)
"""Flaws and their sources, by the name of a format."""
