"""When the worker of a chat with tools, reasoning or a grammar dies after any chunk, no byte is lost, doubled or
changed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import Engine, EngineConfig
from penstock.engine.demo import MODEL_DIR
from penstock.engine.scheduling.pace import Pace
from penstock.engine.text.response.call_ids import call_id
from penstock.producer import GenerateRequest
from penstock.protocol.redis.connection import RedisClient
from tests.e2e.takeover.left_replies import SIZES, generate, resumed
from tests.support.packages import ROOT
from tests.support.patience import slow

TEMPLATE = ROOT / "tests/chat_templates/hermes.jinja"
ARGUMENTS = {
    "type": "object",
    "properties": {"at": {"type": "string", "maxLength": 3}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["at", "n"],
    "additionalProperties": False,
}
SUN = {"type": "function", "function": {"name": "sun", "parameters": ARGUMENTS, "strict": True}}
BASE: dict[str, Any] = {
    "messages": ({"role": "user", "content": "Is it noon?"},),
    "n": 2,
    "temperature": 1.5,
    "max_tokens": 10,
    "seed": 4,
    "chat_template_kwargs": {"enable_thinking": False},
}
THINKING = (*BASE["messages"], {"role": "assistant", "content": "<think>\nIt"})
HISTORY = (
    *BASE["messages"],
    {
        "role": "assistant",
        "tool_calls": [{"id": id_, "function": {"name": "sun", "arguments": '{"at": "no'}} for id_ in "ab"],
    },
    {"role": "tool", "tool_call_id": "b"},
    {"role": "assistant"},
    *BASE["messages"],
)
ASKED: dict[str, dict[str, Any]] = {
    "call": {"tools": (SUN,), "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 99},
    "calls": {"tools": (SUN,), "tool_choice": "required"},
    "free": {"tools": (SUN,), "repetition_penalty": 1.2, "frequency_penalty": 0.3, "stop": ("th",), "logprobs": 2},
    "reasoning": {"messages": THINKING, "continue_final_message": True, "presence_penalty": 0.5},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ARGUMENTS}}},
    "history": {"messages": HISTORY, "tools": (SUN,)},
    "choice": {"choice": ("noon", "night", "no one knows"), "prompt_logprobs": 1, "include_stop_str_in_output": True},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    shutil.copytree(MODEL_DIR, directory)
    shutil.copy(TEMPLATE, directory / "chat_template.jinja")
    return directory


def request(kind: str, cut: int) -> GenerateRequest:
    return GenerateRequest.model_validate({**BASE, **ASKED[kind], "id": f"{kind}-{cut}"})


@pytest.mark.parametrize("every", [4, slow(1)])  # token, behind which a worker died
async def test_the_reply_is_the_undisturbed_one_wherever_its_worker_died(
    redis_url: str, redis: RedisClient, model: Path, compile_cache: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    # As many as there are: whether drafts pay depends on the machine and how busy it is.
    monkeypatch.setattr(Pace, "num_drafts", lambda pace, num_rows, num_pairs, chances, host_s: len(chances))
    settings: dict[str, Any] = {**SIZES, "compile_cache_dir": compile_cache}
    engine = Engine.from_checkpoint(model, EngineConfig(**settings, speculation="off"))
    outputs = {kind: generate(engine, request(kind, 0)) for kind in ASKED}
    cuts = [(kind, cut) for kind in ASKED for cut in (*range(0, len(outputs[kind]), every), len(outputs[kind]))]
    replies = await resumed(redis, redis_url, model, EngineConfig(**settings), request, outputs, cuts)
    for (kind, cut), reply in replies.items():
        for choice in reply.choices:
            numbers = range(len(choice.tool_calls))
            assert [call.id for call in choice.tool_calls] == [
                call_id(f"{kind}-{cut}", choice.index, number) for number in numbers
            ]
    for kind in ASKED:
        texts = ["".join(output.text for output in outputs[kind] if output.index == index) for index in range(2)]
        assert texts == [choice.text for choice in replies[kind, 0].choices]
    assert {choice.finish_reason for reply in replies.values() for choice in reply.choices} == {
        "tool_calls",
        "stop",
        "length",
    }
    assert replies["reasoning", 0].reasoning
    guessed = replies["call", 0].usage  # most of what a call is spelled with is forced by its grammar
    assert 0 < guessed.accepted_tokens <= guessed.drafted_tokens
    assert all(choice.tool_calls for choice in replies["call", 0].choices)
    for choice in replies["calls", 0].choices:  # whose calls broke off at the limit
        messages = (*BASE["messages"], choice.message, *BASE["messages"])
        assert generate(
            engine, GenerateRequest.model_validate({**BASE, "messages": messages, "id": f"on-{choice.index}"})
        )
