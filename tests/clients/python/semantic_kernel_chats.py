"""Checks semantic-kernel, as it is installed, against a gateway. Usage: semantic_kernel_chats.py URL KEY"""

import asyncio
from enum import Enum
from typing import Annotated, Any, Literal

from checks import ASKED, BASE, KEY, MODEL, NO_THINKING, TERSE, Api, Turns, run
from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]


class City(Enum):
    OSLO = "Oslo"
    ROME = "Rome"


class Plugin:
    def __init__(self) -> None:
        self.cities: list[City] = []

    @kernel_function
    def weather(self, city: Annotated[City, "Where."]) -> str:
        """Tells the weather."""
        self.cities.append(city)
        return f"rain in {city}"


def settings(**more: Any) -> OpenAIChatPromptExecutionSettings:
    asked = {"max_tokens": 200, "temperature": 1.0, "seed": 5, "extra_body": NO_THINKING}
    return OpenAIChatPromptExecutionSettings(**{**asked, **more})


def service() -> OpenAIChatCompletion:
    return OpenAIChatCompletion(MODEL, async_client=AsyncOpenAI(base_url=BASE, api_key=KEY))


def history(turns: Turns) -> ChatHistory:
    asked = ChatHistory()
    for role, text in turns:
        (asked.add_user_message if role == "user" else asked.add_assistant_message)(text)
    return asked


def chat(turns: Turns, limit: int) -> str:
    return str(asyncio.run(service().get_chat_message_content(history(turns), settings(max_tokens=limit))))


def chat_stream(turns: Turns, limit: int) -> str:
    async def streamed() -> str:
        parts = service().get_streaming_chat_message_content(history(turns), settings(max_tokens=limit))
        return "".join([str(part) async for part in parts])

    return asyncio.run(streamed())


async def with_calls(plugin: Plugin, attempts: int, limit: int) -> str:
    kernel = Kernel()
    kernel.add_plugin(plugin, "sky")
    choice = FunctionChoiceBehavior.Required(maximum_auto_invoke_attempts=attempts)
    more = {"function_choice_behavior": choice, "max_tokens": limit, "logit_bias": TERSE}
    return str(await service().get_chat_message_content(history(ASKED), settings(**more), kernel=kernel))


def tool_loop() -> None:
    plugin = Plugin()
    asyncio.run(with_calls(plugin, 3, 200))
    assert len(plugin.cities) >= 3


def conversation_after_a_call_that_was_cut_off() -> None:
    asyncio.run(with_calls(Plugin(), 1, 20))  # the call comes back as it is: a refusal would raise


def structured_output() -> None:
    answer = asyncio.run(service().get_chat_message_content(history(ASKED), settings(response_format=Weather)))
    Weather.model_validate_json(str(answer))


run({"chat": Api(chat, chat_stream)}, tool_loop, conversation_after_a_call_that_was_cut_off, structured_output)
