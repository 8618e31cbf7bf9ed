"""The official client, a gateway, and a worker with a real model that was not trained for tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx2
import openai
import pytest
import pytest_asyncio
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.support.patience import WAIT_S
from tests.support.programs.gateway_client import openai_client
from tests.support.programs.gateway_model import QUEUE, serving_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUESTION: Any = [{"role": "user", "content": "Is it noon?"}]
BRIEF: Any = {"model": QUEUE, "messages": QUESTION, "max_tokens": 12, "temperature": 2.0, "seed": 7}
OF_VLLM = ("add_generation_prompt", "continue_final_message")
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    openai: openai.AsyncOpenAI
    http: httpx2.AsyncClient

    async def post(self, path: str, body: Any) -> Any:
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, compile_cache: Path) -> AsyncIterator[Served]:
    async with (
        serving_model(tmp_path_factory.mktemp("model"), compile_cache) as gateway,
        openai_client(gateway.url) as client,
        httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        yield Served(gateway.url, client, http)


async def streamed(served: Served, **asked: Any) -> list[ChatCompletionChunk]:
    return [chunk async for chunk in await served.openai.chat.completions.create(stream=True, **asked)]


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


async def test_the_same_seed_gives_the_same_answers_streamed_or_not(served: Served) -> None:
    first, second = [await served.openai.chat.completions.create(n=3, **BRIEF) for _ in range(2)]
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) == 3
    chunks = await streamed(served, n=3, stream_options={"include_usage": True}, **BRIEF)
    assert [text_of(chunks, index) for index in range(3)] == texts
    assert chunks[-1].usage is not None
    assert first.usage is not None
    assert chunks[-1].usage.completion_tokens == first.usage.completion_tokens


async def test_the_client_for_threads_gets_the_same(served: Served) -> None:
    def ask() -> str | None:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            content: str | None = client.chat.completions.create(**BRIEF).choices[0].message.content
            return content

    completion = await served.openai.chat.completions.create(**BRIEF)
    assert await asyncio.to_thread(ask) == completion.choices[0].message.content


async def test_a_stop_string_ends_the_text_before_it(served: Served) -> None:
    body = {**BRIEF, "regex": "one two three", "stop": ["two"], **NO_THINKING}
    (choice,) = (await served.post("/v1/chat/completions", body))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("one ", "stop", "two")


async def test_five_log_probabilities_come_with_each_token(served: Served) -> None:
    body = {**BRIEF, "logprobs": True, "top_logprobs": 5}
    response = await served.http.post("/v1/chat/completions", json=body)
    choice = ChatCompletion.model_validate_json(response.text, strict=True).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 12
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 5
        assert token.logprob <= max(top.logprob for top in token.top_logprobs) <= 0
    chunks = await streamed(served, logprobs=True, top_logprobs=5, **BRIEF)
    streamed_tokens = [
        token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content or ()
    ]
    assert [token.token for token in streamed_tokens] == [token.token for token in choice.logprobs.content]


class Answer(BaseModel):
    """A schema that the client makes."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2]


async def test_an_answer_follows_a_schema(served: Served) -> None:
    asked: Any = {**BRIEF, "max_tokens": 100, "extra_body": NO_THINKING}
    completion = await served.openai.chat.completions.parse(response_format=Answer, **asked)
    assert isinstance(completion.choices[0].message.parsed, Answer)
    async with served.openai.chat.completions.stream(response_format=Answer, **asked) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == completion.choices[0].message.parsed


async def test_tools_are_called_over_two_turns(served: Served) -> None:
    tool = openai.pydantic_function_tool(Answer, name="weather", description="It.")
    asked: Any = {**BRIEF, "tools": [tool], "tool_choice": "required", "max_tokens": 200, "parallel_tool_calls": False}
    asked["extra_body"] = NO_THINKING
    first = await served.openai.chat.completions.create(**asked)
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    Answer.model_validate_json(call.function.arguments)
    assert choice.message.content is None

    chunks = await streamed(served, **asked)
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(delta.function.arguments or "" for delta in deltas if delta.function) == call.function.arguments
    assert [delta.function.name for delta in deltas if delta.id and delta.function] == ["weather"]

    asked["messages"] = [
        *QUESTION,
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    second = await served.openai.chat.completions.create(**asked)
    assert second.choices[0].finish_reason == "tool_calls"
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


async def test_an_answer_goes_on_to_the_end_of_the_context(served: Served) -> None:
    (model,) = (await served.openai.models.list()).data
    body = {"model": model.id, "messages": QUESTION, "ignore_eos": True}
    completion = await served.post("/v1/chat/completions", body)
    assert completion["choices"][0]["finish_reason"] == "length"
    assert completion["usage"]["total_tokens"] == (model.model_extra or {})["max_model_len"]


async def test_an_echoed_prompt_has_the_tokens_that_its_text_consists_of(served: Served) -> None:
    body = {"model": QUEUE, "prompt": "What is 12 + 30? é", "echo": True, "logprobs": 2, "max_tokens": 4}
    body["skip_special_tokens"] = False  # otherwise they have a place in the text, and no text
    completion = await served.post("/v1/completions", body)
    (choice,) = completion["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(body["prompt"])
    assert len(logprobs["tokens"]) == completion["usage"]["total_tokens"]
    assert logprobs["token_logprobs"][0] is None
    ends = [*logprobs["text_offset"][1:], len(choice["text"])]
    for token, start, end in zip(logprobs["tokens"], logprobs["text_offset"], ends, strict=True):
        assert token == choice["text"][start:end] or token.startswith("bytes:")


async def test_prompts_may_be_texts_or_tokens(served: Served) -> None:
    text = "Count from 96 to 104."
    tokens = (await served.post("/tokenize", {"model": QUEUE, "prompt": text}))["tokens"]
    completion = await served.openai.completions.create(model=QUEUE, prompt=[tokens, tokens], max_tokens=8)
    single = await served.openai.completions.create(model=QUEUE, prompt=text, max_tokens=8)
    assert isinstance(single, Completion)
    assert {choice.text for choice in completion.choices} == {single.choices[0].text}


async def test_tokens_of_prompt_and_answer_are_those_that_were_counted(served: Served) -> None:
    body = {**BRIEF, "return_token_ids": True, "skip_special_tokens": False}
    completion = await served.post("/v1/chat/completions", body)
    counted = await served.post("/v1/count_tokens", {"model": QUEUE, "messages": QUESTION})
    (choice,) = completion["choices"]
    assert completion["usage"]["prompt_tokens"] == len(completion["prompt_token_ids"]) == counted["count"]
    assert completion["usage"]["completion_tokens"] == len(choice["token_ids"])
    has_reasoned = completion["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert has_reasoned == bool(choice["message"].get("reasoning"))
    text = await served.post("/detokenize", {"model": QUEUE, "tokens": choice["token_ids"]})
    message = choice["message"]
    assert text["prompt"].strip() == (message.get("reasoning", "") + message["content"]).strip()


async def test_reasoning_comes_apart_under_both_names_and_is_counted(served: Served) -> None:
    """The head of the answer is continued, so the model reasons though it was not trained to."""
    begun = [*QUESTION, {"role": "assistant", "content": "<think>It is"}]
    asked = {**BRIEF, "messages": begun, "add_generation_prompt": False, "continue_final_message": True}
    (choice,) = (completion := await served.post("/v1/chat/completions", asked))["choices"]
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"]
    assert completion["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12
    chunks = await streamed(served, extra_body={name: asked.pop(name) for name in OF_VLLM}, **asked)
    deltas = [(chunk.choices[0].delta.model_extra or {}) for chunk in chunks]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == choice["message"]["reasoning"]


async def test_a_prompt_that_is_too_long_is_a_bad_request(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match=r"maximum context length.*tokens") as caught:
        await served.openai.chat.completions.create(
            model=QUEUE, messages=[{"role": "user", "content": json.dumps(list(range(3000)))}]
        )
    assert caught.value.code == "context_length_exceeded"


async def test_a_response_says_what_a_chat_says(served: Served) -> None:
    completion = await served.openai.chat.completions.create(**BRIEF)
    asked: Any = {"model": "chats", "input": "Is it noon?", "max_output_tokens": 12, "temperature": 2.0}
    response = await served.openai.responses.create(**asked, extra_body={"seed": 7})
    message: Any = completion.choices[0].message
    thought = [item.content[0].text for item in response.output if item.type == "reasoning" and item.content]
    assert (response.output_text, "".join(thought)) == (message.content, getattr(message, "reasoning", ""))
    assert response.status == "incomplete"


async def test_a_response_follows_a_schema(served: Served) -> None:
    asked: Any = {"model": "chats", "input": "Is it noon?", "max_output_tokens": 100, "extra_body": NO_THINKING}
    response = await served.openai.responses.parse(text_format=Answer, **asked)
    assert isinstance(response.output_parsed, Answer)


async def test_responses_call_tools_over_two_turns(served: Served) -> None:
    tool = openai.pydantic_function_tool(Answer, name="weather", description="It.")["function"]
    asked: Any = {"model": "chats", "max_output_tokens": 200, "extra_body": NO_THINKING, "tool_choice": "required"}
    asked |= {"tools": [{"type": "function", **tool}], "parallel_tool_calls": False, "temperature": 2.0}
    first = await served.openai.responses.create(input="Is it noon?", **asked)
    (call,) = first.output
    assert call.type == "function_call"
    Answer.model_validate_json(call.arguments)
    said: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    second = await served.openai.responses.create(input=said, previous_response_id=first.id, **asked)
    assert [item.type for item in second.output] == ["function_call"]
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
