"""Checks semantic-kernel, as it is installed, against a gateway. Usage: semantic_kernel_chats.py URL"""

import asyncio
from typing import Annotated, Any, Literal

from checks import BASE, KEY, MODEL, NO_THINKING, QUESTION, run
from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]


class Plugin:
    @kernel_function
    def weather(self, city: Annotated[str, "Where."]) -> str:
        """Tells the weather."""
        return f"rain in {city}"


def settings(**more: Any) -> OpenAIChatPromptExecutionSettings:
    asked = {"max_tokens": 200, "temperature": 1.0, "seed": 5, "extra_body": NO_THINKING}
    return OpenAIChatPromptExecutionSettings(**{**asked, **more})


def service() -> OpenAIChatCompletion:
    return OpenAIChatCompletion(MODEL, async_client=AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0))


def history() -> ChatHistory:
    asked = ChatHistory()
    asked.add_user_message(QUESTION)
    return asked


def chat_and_stream() -> None:
    async def both() -> tuple[str, str]:
        whole = await service().get_chat_message_content(history(), settings())
        parts = service().get_streaming_chat_message_content(history(), settings())
        return str(whole), "".join([str(part) async for part in parts])

    whole, streamed = asyncio.run(both())
    assert streamed == whole != ""


def conversation_after_a_call_that_was_cut_off() -> None:
    async def answered() -> str:
        kernel = Kernel()
        kernel.add_plugin(Plugin(), "sky")
        choice = FunctionChoiceBehavior.Required(maximum_auto_invoke_attempts=1)
        more = {"function_choice_behavior": choice, "max_tokens": 20}
        return str(await service().get_chat_message_content(history(), settings(**more), kernel=kernel))

    asyncio.run(answered())  # the call comes back as it is: a refusal would raise


def structured_output() -> None:
    answer = asyncio.run(service().get_chat_message_content(history(), settings(response_format=Weather)))
    Weather.model_validate_json(str(answer))


run(chat_and_stream, conversation_after_a_call_that_was_cut_off, structured_output)
