"""Checks pydantic-ai, as it is installed, against a gateway. Usage: pydantic_ai_chats.py URL KEY"""

import asyncio
from typing import Any, Literal

from checks import BASE, KEY, MODEL, NO_THINKING, QUESTION, URL, Api, Turns, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, UserPromptPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

OPENAI = OpenAIProvider(base_url=BASE, api_key=KEY)
MODELS: dict[str, Any] = {
    "chat": OpenAIChatModel(MODEL, provider=OPENAI),
    "responses": OpenAIResponsesModel(MODEL, provider=OPENAI),
    "messages": AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY)),
}
SETTINGS: Any = {"temperature": 1.0, "extra_body": {"seed": 5, **NO_THINKING}}


class Weather(BaseModel, extra="forbid"):
    """What to know of it."""

    city: Literal["Oslo", "Rome"]


def agent(model: Any, limit: int = 120, **options: Any) -> Agent[Any, Any]:
    return Agent(model, model_settings={**SETTINGS, "max_tokens": limit}, retries=0, **options)


def history_of(turns: Turns) -> list[ModelMessage]:
    return [
        ModelRequest([UserPromptPart(text)]) if role == "user" else ModelResponse([TextPart(text)])
        for role, text in turns
    ]


def api_of(model: Any) -> Api:
    def ask(turns: Turns, limit: int) -> str:
        asked = {"message_history": history_of(turns[:-1])}
        return str(agent(model, limit).run_sync(turns[-1][1], **asked).output)

    async def streamed(turns: Turns, limit: int) -> str:
        async with agent(model, limit).run_stream(turns[-1][1], message_history=history_of(turns[:-1])) as result:
            return str(await result.get_output())

    return Api(ask, lambda turns, limit: asyncio.run(streamed(turns, limit)))


def tool_loop() -> None:
    for model in MODELS.values():
        history: Any = None
        for _ in range(3):  # the output is the argument of a call that is required
            result = agent(model, output_type=ToolOutput(Weather)).run_sync(QUESTION, message_history=history)
            assert isinstance(result.output, Weather)
            history = result.all_messages()


def structured_output() -> None:
    for model in (MODELS["chat"], MODELS["responses"]):
        assert isinstance(agent(model, output_type=NativeOutput(Weather)).run_sync(QUESTION).output, Weather)


run({name: api_of(model) for name, model in MODELS.items()}, tool_loop, structured_output)
