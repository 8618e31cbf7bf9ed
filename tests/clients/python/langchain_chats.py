"""Checks langchain-openai, as it is installed, against a gateway. Usage: langchain_chats.py URL"""

import asyncio
import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

WHERE = {"base_url": f"{sys.argv[1]}/v1", "api_key": "none", "max_retries": 0}
BRIEF = {**WHERE, "model": "chats", "temperature": 1.0, "max_tokens": 60, "seed": 5}
NO_THINKING = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
QUESTION = "Is it noon?"


class Weather(BaseModel):
    """What to know of it."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2]


def texts() -> None:
    model = ChatOpenAI(**BRIEF, **NO_THINKING, stream_usage=True)
    whole = model.invoke(QUESTION)
    parts = list(model.stream(QUESTION))
    assert "".join(part.content for part in parts) == whole.content != ""
    (usage,) = [part.usage_metadata for part in parts if part.usage_metadata]
    assert usage["output_tokens"] == whole.usage_metadata["output_tokens"]

    async def same() -> list[str]:
        return [
            (await model.ainvoke(QUESTION)).content,
            "".join([part.content async for part in model.astream(QUESTION)]),
        ]

    assert asyncio.run(same()) == [whole.content] * 2


def options() -> None:
    model = ChatOpenAI(**{**BRIEF, "temperature": 2.0}, n=3)
    assert len(model.generate([[HumanMessage(QUESTION)]]).generations[0]) == 3
    told = ChatOpenAI(**{**BRIEF, "max_tokens": 5}, logprobs=True, top_logprobs=5).invoke(QUESTION)
    assert len(told.response_metadata["logprobs"]["content"]) == 5
    said = ChatOpenAI(**BRIEF, **NO_THINKING).invoke(QUESTION)
    first = said.content[3]
    assert ChatOpenAI(**BRIEF, **NO_THINKING).invoke(QUESTION, stop=[first]).content == said.content.split(first)[0]


def forms() -> None:
    model = ChatOpenAI(**{**BRIEF, "max_tokens": 200}, **NO_THINKING)
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Weather, method=method, strict=True).invoke(QUESTION), Weather)


def tools() -> None:
    model = ChatOpenAI(**{**BRIEF, "max_tokens": 200}, **NO_THINKING)
    bound = model.bind_tools([Weather], tool_choice="required", parallel_tool_calls=False, strict=True)
    called = bound.invoke(QUESTION)
    (call,) = called.tool_calls
    Weather.model_validate(call["args"])
    turns = [HumanMessage(QUESTION), called, ToolMessage("rain", tool_call_id=call["id"])]
    assert [call["name"] for call in bound.invoke(turns).tool_calls] == ["Weather"]
    streamed: Any = None
    for part in bound.stream(QUESTION):
        streamed = part if streamed is None else streamed + part
    assert [call["args"] for call in streamed.tool_calls] == [call["args"]]


def completions() -> None:
    model = OpenAI(**WHERE, model="chats", max_tokens=10, temperature=0)
    assert "".join(model.stream("Count from 1 to 9.")) == model.invoke("Count from 1 to 9.") != ""
    assert len(model.generate(["Count from 1 to 9.", "What is 1 + 1?"]).generations) == 2


for check in (texts, options, forms, tools, completions):
    check()
    print("passed:", check.__name__)
