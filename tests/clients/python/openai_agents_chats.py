"""Checks openai-agents, as it is installed, against a gateway. Usage: openai_agents_chats.py URL"""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import BASE, KEY, MODEL, NO_THINKING, QUESTION, run
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
BRIEF: dict[str, Any] = {"max_tokens": 120, "temperature": 1.0, "extra_body": {"seed": 5, **NO_THINKING}}
KINDS: tuple[Callable[..., Model], ...] = (OpenAIChatCompletionsModel, OpenAIResponsesModel)
cities: list[str] = []


@function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Tells the weather."""
    cities.append(city)
    return "rain"


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]


def agent(kind: Callable[..., Model], *, settings: dict[str, Any] | None = None, **options: Any) -> Agent[Any]:
    model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0))
    return Agent(name="a", model=model, model_settings=ModelSettings(**BRIEF, **(settings or {})), **options)


def chat_and_stream() -> None:
    async def streamed(kind: Callable[..., Model]) -> str:
        result = Runner.run_streamed(agent(kind), QUESTION)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    for kind in KINDS:
        whole = Runner.run_sync(agent(kind), QUESTION).final_output
        assert asyncio.run(streamed(kind)) == whole != ""


def tool_loop() -> None:
    for kind in KINDS:
        cities.clear()
        forced = agent(kind, settings={"tool_choice": "required", "parallel_tool_calls": False}, tools=[weather])
        history: Any = QUESTION
        for _ in range(3):
            result = Runner.run_sync(forced, history)
            history = [*result.to_input_list(), {"role": "user", "content": "Again."}]
        assert len(cities) >= 3


def structured_output() -> None:
    for kind in KINDS:
        assert isinstance(Runner.run_sync(agent(kind, output_type=Weather), QUESTION).final_output, Weather)


run(chat_and_stream, tool_loop, structured_output)
