"""Programs that are run unmodified against a gateway, each with a script of checks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.packages import ROOT

HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "clients.md"


class Program(NamedTuple):
    """A program, and where its checks are.

    Attributes:
        script: in this folder.
        packages: those that the page tells the versions of. Those of Python are pinned in a file of requirements.
    """

    script: str
    packages: tuple[str, ...]

    @property
    def environment(self) -> str:
        """The name of the environment that has the program."""
        folder, _, name = self.script.partition("/")
        return folder if self.is_javascript else name.removesuffix("_chats.py")

    @property
    def is_javascript(self) -> bool:
        return self.script.endswith(".mjs")

    @property
    def versions(self) -> Mapping[str, str]:
        pins = _pins_of_npm(self.environment) if self.is_javascript else _pins_of_pip(self.environment)
        return {package: pins[package] for package in self.packages}


PROGRAMS = (
    Program("python/openai_python_chats.py", ("openai",)),
    Program("python/anthropic_python_chats.py", ("anthropic",)),
    Program("python/langchain_chats.py", ("langchain-openai",)),
    Program("python/litellm_chats.py", ("litellm",)),
    Program("python/openai_agents_chats.py", ("openai-agents",)),
    Program("python/pydantic_ai_chats.py", ("pydantic-ai-slim",)),
    Program("python/instructor_chats.py", ("instructor",)),
    Program("python/smolagents_chats.py", ("smolagents",)),
    Program("python/llama_index_chats.py", ("llama-index-llms-openai-like",)),
    Program("python/haystack_chats.py", ("haystack-ai",)),
    Program("python/semantic_kernel_chats.py", ("semantic-kernel",)),
    Program("python/dspy_chats.py", ("dspy",)),
    Program("python/lm_eval_chats.py", ("lm-eval",)),
    Program("python/guidellm_chats.py", ("guidellm",)),
    Program("javascript/openai_js.mjs", ("openai",)),
    Program("javascript/anthropic_js.mjs", ("@anthropic-ai/sdk",)),
    Program("javascript/ai_sdk.mjs", ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic")),
    Program("javascript/openai_agents_js.mjs", ("@openai/agents",)),
    Program("javascript/langchain_js.mjs", ("@langchain/openai",)),
)

_HEAD = """# Client programs that are tested

`make test-clients` runs each of these programs as it is published, in an environment of its own, against a gateway
and workers with a real model, and writes this page. Calls are required by `tool_choice`, as the model was not
trained for tools. JavaScript programs share one environment.

A **worker** is killed in the middle of a reply that the program reads: it sees nothing of it. A **gateway** is killed
in the middle of a reply that it waits for. Its own retry gets the same text from another gateway, and its API key is
charged for what workers have published of both replies. guidellm measures, and never asks again.

**The four** checks are chat and stream, cut and continued, tool loop, and structured output.

| program | versions | passed | killed |
| --- | --- | --- | --- |
"""

_TAIL = """
Programs on the command line begin with prompts that are longer than the model's context: a script takes its place.
They run what it asks for, and send back what that printed.
"""
_THE_FOUR = ("chat_and_stream", "cut_and_continued", "tool_loop", "structured_output")
_KILLS = {"worker_killed": "worker", "gateway_killed": "gateway"}


class Passed(NamedTuple):
    """What a program passed.

    Attributes:
        checks: names.
        apis: names of the APIs that it was asked through.
    """

    checks: Sequence[str]
    apis: str

    @classmethod
    def said_in(cls, output: str) -> Passed:
        (apis,) = re.findall(r"^apis: (.+)$", output, re.MULTILINE)
        return cls(re.findall(r"^passed: (\S.*\S) *$", output, re.MULTILINE), apis)

    @property
    def cells(self) -> str:
        checks = [each for each in self.checks if each not in _KILLS]
        if set(_THE_FOUR) <= set(checks):
            checks = ["the_four", *(each for each in checks if each not in _THE_FOUR)]
        kills = ", ".join(_KILLS[each] for each in self.checks if each in _KILLS)
        return f"{self.apis}: {', '.join(checks).replace('_', ' ')} | {kills}"


def page(passed: Mapping[Program, Passed]) -> str:
    """Returns docs/clients.md after a run. The commands have a test of their own."""
    rows = [
        f"| {'JavaScript' if each.is_javascript else 'Python'} | {versions_of(each)} | {passed[each].cells} |"
        for each in PROGRAMS
    ]
    agents = [f"| command line | `{name}` {version} | {WHAT_COMMANDS_DO} |" for name, version in COMMANDS.items()]
    return _HEAD + "\n".join([*rows, *agents, _TAIL])


def versions_of(program: Program) -> str:
    return ", ".join(f"`{package}` {version}" for package, version in program.versions.items())


def _pins_of_pip(name: str) -> Mapping[str, str]:
    found = re.findall(r"^([\w-]+)(?:\[[\w,]+\])?==(\S+)", (HERE / "python" / f"{name}.txt").read_text(), re.MULTILINE)
    return dict(found)


def _pins_of_npm(name: str) -> Mapping[str, str]:
    pins: Mapping[str, str] = json.loads((HERE / name / "package.json").read_text())["dependencies"]
    return pins


COMMANDS = _pins_of_npm("commands")
"""Agents on the command line, with their versions."""

WHAT_COMMANDS_DO = "tool loop | worker, gateway"
