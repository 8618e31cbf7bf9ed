"""Checks litellm, as it is installed, against a gateway. Usage: litellm_chats.py URL"""

import asyncio
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it looks for one on the internet

import litellm

WHERE = {"api_base": f"{sys.argv[1]}/v1", "api_key": "none", "num_retries": 0}
BRIEF = {**WHERE, "model": "openai/chats", "max_tokens": 60, "temperature": 1.0, "seed": 5}
NO_THINKING = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
QUESTION = [{"role": "user", "content": "Is it noon?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def joined(stream: Iterable[Any]) -> Any:
    return litellm.stream_chunk_builder(list(stream)).choices[0].message


def texts() -> None:
    asked = {"messages": QUESTION, **BRIEF, **NO_THINKING}
    whole = litellm.completion(**asked)
    assert whole.usage.completion_tokens > 0
    streamed = joined(litellm.completion(stream=True, stream_options={"include_usage": True}, **asked))
    assert streamed.content == whole.choices[0].message.content != ""
    assert asyncio.run(litellm.acompletion(**asked)).choices[0].message.content == streamed.content


def reasoning() -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "<think>It is"}]
    more = {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}}
    assert litellm.completion(messages=begun, **BRIEF, **more).choices[0].message.reasoning_content
    assert joined(litellm.completion(messages=begun, stream=True, **BRIEF, **more)).reasoning_content


def options() -> None:
    assert len(litellm.completion(messages=QUESTION, n=3, **BRIEF).choices) == 3
    told = litellm.completion(messages=QUESTION, logprobs=True, top_logprobs=5, **{**BRIEF, "max_tokens": 5})
    assert len(told.choices[0].logprobs.content) == 5
    form = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA}}
    said = litellm.completion(messages=QUESTION, response_format=form, **BRIEF, **NO_THINKING)
    assert json.loads(said.choices[0].message.content)["city"] in ("Oslo", "Rome")


def tools() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
    asked = {**BRIEF, **NO_THINKING, "max_tokens": 200, "tools": [tool], "tool_choice": "required"}
    asked["parallel_tool_calls"] = False
    message = litellm.completion(messages=QUESTION, **asked).choices[0].message
    (call,) = message.tool_calls
    answered = [*QUESTION, message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert litellm.completion(messages=answered, **asked).choices[0].finish_reason == "tool_calls"
    (streamed,) = joined(litellm.completion(messages=QUESTION, stream=True, **asked)).tool_calls
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
            litellm.completion(**{"messages": QUESTION, **BRIEF, **wrong})
        except kind:
            continue
        raise AssertionError(f"{wrong} raises no {kind.__name__}")


for check in (texts, reasoning, options, tools, completions, errors):
    check()
    print("passed:", check.__name__)
