"""Checks langchain-openai, as it is installed, against a gateway. Usage: langchain_chats.py URL KEY"""

import asyncio
from typing import Any, Literal

from checks import BASE, KEY, MODEL, NO_THINKING, QUESTION, Api, Turns, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

WHERE: dict[str, Any] = {"base_url": BASE, "api_key": KEY, "model": MODEL}
BRIEF: dict[str, Any] = {**WHERE, "temperature": 1.0, "max_tokens": 60, "extra_body": {"seed": 5, **NO_THINKING}}


class Weather(BaseModel):
    """What to know of it."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2]


def model_up_to(limit: int, api: str) -> ChatOpenAI:
    return ChatOpenAI(**{**BRIEF, "max_tokens": limit}, use_responses_api=api == "responses")


def api_of(name: str) -> Api:
    def ask(turns: Turns, limit: int) -> str:
        return model_up_to(limit, name).invoke(turns).text

    def stream(turns: Turns, limit: int) -> str:
        return "".join(part.text for part in model_up_to(limit, name).stream(turns))

    return Api(ask, stream)


def usage_and_without_threads() -> None:
    model = ChatOpenAI(**BRIEF, stream_usage=True)
    whole = model.invoke(QUESTION)
    (usage,) = [part.usage_metadata for part in model.stream(QUESTION) if part.usage_metadata]
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
    said = ChatOpenAI(**BRIEF).invoke(QUESTION)
    first = said.content[3]
    assert ChatOpenAI(**BRIEF).invoke(QUESTION, stop=[first]).content == said.content.split(first)[0]


def structured_output() -> None:
    model = ChatOpenAI(**{**BRIEF, "max_tokens": 200})
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Weather, method=method, strict=True).invoke(QUESTION), Weather)


def tool_loop() -> None:
    model = ChatOpenAI(**{**BRIEF, "max_tokens": 200})
    bound = model.bind_tools([Weather], tool_choice="required", parallel_tool_calls=False, strict=True)
    turns: list[Any] = [HumanMessage(QUESTION)]
    for _ in range(3):
        called = bound.invoke(turns)
        (call,) = called.tool_calls
        Weather.model_validate(call["args"])
        turns += [called, ToolMessage("rain", tool_call_id=call["id"])]
    streamed: Any = None
    for part in bound.stream(turns[:-2]):
        streamed = part if streamed is None else streamed + part
    assert [each["args"] for each in streamed.tool_calls] == [call["args"]]


def completions() -> None:
    model = OpenAI(**WHERE, max_tokens=10, temperature=0)
    assert "".join(model.stream("Count from 1 to 9.")) == model.invoke("Count from 1 to 9.") != ""
    assert len(model.generate(["Count from 1 to 9.", "What is 1 + 1?"]).generations) == 2


run(
    {name: api_of(name) for name in ("chat", "responses")},
    tool_loop,
    structured_output,
    usage_and_without_threads,
    options,
    completions,
)
