"""Calls that are nearly right: the flaws of models that are known, and where each was reported.

`formats.py` says which ones the models of a format have.

A flaw is mended only without a grammar, where the name is one of the request's functions and nothing else can be meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class Flaw(Enum):
    NO_OPENING = "the tag in front of a call is missing"
    STRAY_TAG = "a tag around a call is there twice, or with a bracket too many"
    NO_PARAMETER_END = "the tag after a parameter is missing"
    TEXT_ARGUMENTS = "the arguments are the text of a JSON object"
    NULL_ARGUMENTS = "the arguments are null"
    LIST = "a list of calls takes the place of one"
    LONE_BACKSLASH = "a backslash in a string escapes nothing"
    OTHER_SEPARATOR = "a comma or a line break divides calls"
    NO_BODY = "a call of a function that needs no arguments has no body"


STRAY: Mapping[Flaw, str] = MappingProxyType({Flaw.STRAY_TAG: "https://github.com/QwenLM/qwen-code/issues/10700"})
BACKSLASH: Mapping[Flaw, str] = MappingProxyType(
    {Flaw.LONE_BACKSLASH: "https://github.com/FoundationAgents/OpenManus/issues/1161"}
)
TAGS: Mapping[Flaw, str] = MappingProxyType(
    {
        Flaw.NO_OPENING: "https://github.com/ollama/ollama/pull/17742",  # 3 of 16 and 7 of 16 turns
        Flaw.NO_PARAMETER_END: "https://github.com/ollama/ollama/pull/17914",
    }
)
ARGUMENTS: Mapping[Flaw, str] = MappingProxyType(
    {
        Flaw.TEXT_ARGUMENTS: "https://github.com/vllm-project/vllm/pull/54964",
        Flaw.NULL_ARGUMENTS: "https://github.com/NousResearch/hermes-agent/issues/83937",
        Flaw.LIST: "https://github.com/huggingface/smolagents/pull/1003",
    }
)
SEPARATOR: Mapping[Flaw, str] = MappingProxyType(
    {Flaw.OTHER_SEPARATOR: "https://github.com/vllm-project/vllm/pull/47612"}
)
BODY: Mapping[Flaw, str] = MappingProxyType({Flaw.NO_BODY: "https://github.com/avalan-ai/avalan/pull/715"})
