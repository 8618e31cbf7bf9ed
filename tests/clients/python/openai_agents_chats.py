"""Checks openai-agents, as it is installed, against a gateway. Usage: openai_agents_chats.py URL KEY"""

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
from checks import BASE, KEY, MODEL, NO_THINKING, QUESTION, Api, Turns, as_messages, run
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
BRIEF: dict[str, Any] = {"max_tokens": 120, "temperature": 1.0, "extra_body": {"seed": 5, **NO_THINKING}}
KINDS: dict[str, Callable[..., Model]] = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
cities: list[str] = []


@function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Tells the weather."""
    cities.append(city)
    return "rain"


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]


def agent(kind: Callable[..., Model], *, settings: dict[str, Any] | None = None, **options: Any) -> Agent[Any]:
    model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=BASE, api_key=KEY))
    return Agent(name="a", model=model, model_settings=ModelSettings(**{**BRIEF, **(settings or {})}), **options)


def api_of(kind: Callable[..., Model]) -> Api:
    def ask(turns: Turns, limit: int) -> str:
        return str(Runner.run_sync(agent(kind, settings={"max_tokens": limit}), as_messages(turns)).final_output)

    async def streamed(turns: Turns, limit: int) -> str:
        result = Runner.run_streamed(agent(kind, settings={"max_tokens": limit}), as_messages(turns))
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    return Api(ask, lambda turns, limit: asyncio.run(streamed(turns, limit)), kind is OpenAIChatCompletionsModel)


def tool_loop() -> None:
    for kind in KINDS.values():
        cities.clear()
        forced = agent(kind, settings={"tool_choice": "required", "parallel_tool_calls": False}, tools=[weather])
        history: Any = QUESTION
        for _ in range(3):
            result = Runner.run_sync(forced, history)
            history = [*result.to_input_list(), {"role": "user", "content": "Again."}]
        assert len(cities) >= 3


def structured_output() -> None:
    for kind in KINDS.values():
        assert isinstance(Runner.run_sync(agent(kind, output_type=Weather), QUESTION).final_output, Weather)


run({name: api_of(kind) for name, kind in KINDS.items()}, tool_loop, structured_output)
