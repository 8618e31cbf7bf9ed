"""Checks pydantic-ai, as it is installed, against a gateway. Usage: pydantic_ai_chats.py URL"""

import asyncio
from typing import Any, Literal

from checks import BASE, KEY, MODEL, NO_THINKING, QUESTION, URL, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

OPENAI = OpenAIProvider(base_url=BASE, api_key=KEY)
MODELS = (
    OpenAIChatModel(MODEL, provider=OPENAI),
    OpenAIResponsesModel(MODEL, provider=OPENAI),
    AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY)),
)
SETTINGS: Any = {"max_tokens": 120, "temperature": 1.0, "extra_body": {"seed": 5, **NO_THINKING}}


class Weather(BaseModel, extra="forbid"):
    """What to know of it."""

    city: Literal["Oslo", "Rome"]


def agent(model: Any, **options: Any) -> Agent[Any, Any]:
    return Agent(model, model_settings=SETTINGS, retries=0, **options)


def chat_and_stream() -> None:
    async def streamed(model: Any) -> str:
        async with agent(model).run_stream(QUESTION) as result:
            return str(await result.get_output())

    for model in MODELS:
        whole = agent(model).run_sync(QUESTION).output
        assert asyncio.run(streamed(model)) == whole != ""


def tool_loop() -> None:
    for model in MODELS:
        history: Any = None
        for _ in range(3):  # the output is the argument of a call that is required
            result = agent(model, output_type=ToolOutput(Weather)).run_sync(QUESTION, message_history=history)
            assert isinstance(result.output, Weather)
            history = result.all_messages()


def structured_output() -> None:
    for model in MODELS[:2]:
        assert isinstance(agent(model, output_type=NativeOutput(Weather)).run_sync(QUESTION).output, Weather)


run(chat_and_stream, tool_loop, structured_output)
