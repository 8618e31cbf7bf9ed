"""Anthropic's official client, a gateway, and a worker with a real model that was not trained for tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from tests.support.programs.gateway_model import QUEUE, serving_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUESTION: Any = [{"role": "user", "content": "Is it noon?"}]
BRIEF: Any = {"model": QUEUE, "messages": QUESTION, "max_tokens": 12, "extra_body": {"temperature": 0}}
TOOL: Any = {
    "name": "weather",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(
    tmp_path_factory: pytest.TempPathFactory, compile_cache: Path
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        serving_model(tmp_path_factory.mktemp("hermes"), compile_cache) as gateway,
        anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_a_stream_says_what_a_whole_answer_does(client: anthropic.AsyncAnthropic) -> None:
    whole: Any = await client.messages.create(**BRIEF)
    async with client.messages.stream(**BRIEF) as stream:
        streamed: Any = await stream.get_final_message()
    assert [block.model_dump() for block in streamed.content] == [block.model_dump() for block in whole.content]
    assert whole.usage.output_tokens == streamed.usage.output_tokens == 12
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    counted = await client.messages.count_tokens(model=QUEUE, messages=QUESTION)
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


async def test_a_stop_sequence_is_named(client: anthropic.AsyncAnthropic) -> None:
    whole: Any = await client.messages.create(**BRIEF)
    text = whole.content[0].text
    stop = text.strip()[3]
    stopped: Any = await client.messages.create(**BRIEF, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in stopped.content) == text[: text.index(stop)]


async def test_tools_over_two_turns(client: anthropic.AsyncAnthropic) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    options: Any = {**BRIEF, "max_tokens": 200, "tools": [TOOL], "tool_choice": choice}
    async with client.messages.stream(**options) as stream:
        first = await stream.get_final_message()
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert call.name == "weather"
    assert call.input in ({"city": "Oslo"}, {"city": "Rome"})
    turns: Any = [
        *QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]},
    ]
    second = await client.messages.create(**{**options, "messages": turns, "tool_choice": {"type": "none"}})
    assert second.usage.output_tokens > 0
