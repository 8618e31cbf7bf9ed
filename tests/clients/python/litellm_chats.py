"""Checks litellm, as it is installed, against a gateway. Usage: litellm_chats.py URL KEY"""

import asyncio
import json
import os
from collections.abc import Iterable
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it looks for one on the internet

import litellm
from checks import BASE, CITIES, KEY, NO_THINKING, QUESTION, SCHEMA, Api, Turns, as_messages, run

WHERE: dict[str, Any] = {"api_base": BASE, "api_key": KEY}
BRIEF: dict[str, Any] = {**WHERE, "model": "openai/chats", "max_tokens": 60, "temperature": 1.0, "seed": 5}
THOUGHTLESS: dict[str, Any] = {**BRIEF, "extra_body": NO_THINKING}
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]


def joined(stream: Iterable[Any]) -> Any:
    return litellm.stream_chunk_builder(list(stream)).choices[0].message


def chat(turns: Turns, limit: int) -> str:
    answer = litellm.completion(messages=as_messages(turns), **{**THOUGHTLESS, "max_tokens": limit})
    return str(answer.choices[0].message.content)


def chat_stream(turns: Turns, limit: int) -> str:
    asked = {**THOUGHTLESS, "max_tokens": limit, "stream": True, "stream_options": {"include_usage": True}}
    return str(joined(litellm.completion(messages=as_messages(turns), **asked)).content)


def without_threads() -> None:
    whole = litellm.completion(messages=ASKED, **THOUGHTLESS)
    assert whole.usage.completion_tokens > 0
    same = asyncio.run(litellm.acompletion(messages=ASKED, **THOUGHTLESS))
    assert same.choices[0].message.content == whole.choices[0].message.content


def reasoning() -> None:
    begun = [*ASKED, {"role": "assistant", "content": "<think>It is"}]
    more = {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}}
    assert litellm.completion(messages=begun, **BRIEF, **more).choices[0].message.reasoning_content
    assert joined(litellm.completion(messages=begun, stream=True, **BRIEF, **more)).reasoning_content


def options() -> None:
    assert len(litellm.completion(messages=ASKED, n=3, **BRIEF).choices) == 3
    told = litellm.completion(messages=ASKED, logprobs=True, top_logprobs=5, **{**BRIEF, "max_tokens": 5})
    assert len(told.choices[0].logprobs.content) == 5


def structured_output() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA}}
    said = litellm.completion(messages=ASKED, response_format=form, **THOUGHTLESS)
    assert json.loads(said.choices[0].message.content)["city"] in CITIES


def tool_loop() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
    asked = {**THOUGHTLESS, "max_tokens": 200, "tools": [tool], "tool_choice": "required"}
    asked["parallel_tool_calls"] = False
    messages = [*ASKED]
    for _ in range(3):
        message = litellm.completion(messages=messages, **asked).choices[0].message
        (call,) = message.tool_calls
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    (streamed,) = joined(litellm.completion(messages=messages[:-2], stream=True, **asked)).tool_calls
    assert streamed.function.arguments == call.function.arguments


def completions() -> None:
    asked = {**WHERE, "model": "text-completion-openai/chats", "prompt": "Count from 1 to 9.", "max_tokens": 8}
    streamed = "".join(part.choices[0].text or "" for part in litellm.text_completion(stream=True, **asked))
    assert streamed == litellm.text_completion(**asked).choices[0].text != ""


def errors() -> None:
    for wrong, kind in (
        ({"model": "openai/nobodys"}, litellm.NotFoundError),
        ({"temperature": "hot"}, litellm.BadRequestError),
        ({"messages": [{"role": "user", "content": "1 " * 3000}]}, litellm.ContextWindowExceededError),
    ):
        try:
            litellm.completion(**{"messages": ASKED, **BRIEF, **wrong})
        except kind:
            continue
        raise AssertionError(f"{wrong} raises no {kind.__name__}")


run(
    {"chat": Api(chat, chat_stream)},
    tool_loop,
    structured_output,
    without_threads,
    reasoning,
    options,
    completions,
    errors,
)
