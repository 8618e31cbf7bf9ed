"""Chats with tools and response formats, in templates of several families, on a real model trained for neither."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from penstock.engine.demo import MODEL_DIR
from penstock.local.llm import LLM
from penstock.producer import Reply, RequestRefused
from tests.support.packages import ROOT

TEMPLATES = ROOT / "tests/chat_templates"
QUESTION = {"role": "user", "content": "Is it noon?"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "It.", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "noon", "description": "It.", "parameters": {}}},
]
WEATHER = {"type": "function", "function": {"name": "weather"}}
ONE_OF = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEATHER]}}
NO_THINKING = {"enable_thinking": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module", params=["hermes", "llama3", "mistral"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compile_cache: Path) -> Iterator[LLM]:
    """The demo model, with the template of another family."""
    directory = tmp_path_factory.mktemp(request.param) / "model"
    shutil.copytree(MODEL_DIR, directory)
    shutil.copy(TEMPLATES / f"{request.param}.jinja", directory / "chat_template.jinja")
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_batch_tokens": 64, "num_pages": 520}
    with LLM(directory, progress=False, **sizes, compile_cache_dir=compile_cache) as llm:
        yield llm


def asked(llm: LLM, *messages: Any, **fields: Any) -> Reply:
    fields = {"temperature": 1.5, "max_tokens": 300, "chat_template_kwargs": NO_THINKING, "tools": TOOLS, **fields}
    return llm.chat([QUESTION, *messages], **fields)


@pytest.mark.parametrize("choice", [WEATHER, ONE_OF], ids=["named", "allowed"])
@pytest.mark.parametrize("seed", range(4))
def test_a_chosen_tool_is_called_as_its_schema_says(llm: LLM, choice: Any, seed: int) -> None:
    reply = asked(llm, tool_choice=choice, parallel_tool_calls=False, seed=seed)
    (call,) = reply.choices[0].tool_calls
    assert call.name == "weather"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    assert reply.finish_reason == "tool_calls"
    assert reply.text.strip() == ""


def test_the_conversation_goes_on_with_what_was_called(llm: LLM) -> None:
    said = asked(llm, tool_choice=WEATHER, seed=1).choices[0]
    call_id = said.tool_calls[0].id
    result = {"role": "tool", "name": "weather", "tool_call_id": call_id, "content": "rain"}
    message = {**said.message, "content": None}
    again = asked(llm, message, result, tool_choice=WEATHER, seed=2)
    assert [call.name for call in again.choices[0].tool_calls] == ["weather"]
    assert again.choices[0].tool_calls[0].id != call_id
    assert again.usage.prompt_tokens > 0


@pytest.mark.parametrize("seed", range(4))
def test_the_text_follows_a_schema(llm: LLM, seed: int) -> None:
    reply = asked(llm, tools=None, response_format=FORMAT, seed=seed)
    jsonschema.validate(json.loads(reply.text), SCHEMA)
    assert (reply.choices[0].tool_calls, reply.finish_reason) == ((), "stop")


def test_no_tool_is_looked_for_where_none_may_be_called(llm: LLM) -> None:
    reply = asked(llm, tool_choice="none", choice=['<tool_call>{"name": "noon", "arguments": {}}</tool_call>'])
    assert reply.text == '<tool_call>{"name": "noon", "arguments": {}}</tool_call>'
    assert reply.choices[0].tool_calls == ()


def test_what_is_continued_can_be_echoed(llm: LLM) -> None:
    begun = {"role": "assistant", "content": "It is"}
    reply = asked(llm, begun, tools=None, continue_final_message=True, echo=True, regex=" (noon|night)")
    assert reply.text in ("It is noon", "It is night")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs may not set eos_token"),
        ({"regex": "("}, "regex|grammar"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 7}, "strict": True}}],
          "tool_choice": "required"}, "f|grammar|schema"),
    ],
)  # fmt: skip
def test_a_mistake_is_the_request_s_own(llm: LLM, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestRefused, match=told):
        asked(llm, **fields)
    assert asked(llm, choice=["still here"], tools=None).text == "still here"
