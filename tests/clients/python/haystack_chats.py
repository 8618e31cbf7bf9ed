"""Checks haystack, as it is installed, against a gateway. Usage: haystack_chats.py URL KEY"""

import os
from typing import Any

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from checks import BASE, CITIES, KEY, MODEL, NO_THINKING, QUESTION, SCHEMA, Api, Turns, run
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

SAID: dict[str, Any] = {"max_tokens": 200, "temperature": 1.0, "seed": 5, "extra_body": NO_THINKING}
ASKED = [ChatMessage.from_user(QUESTION)]
TOOL = Tool(
    name="weather", description="Tells the weather.", parameters=SCHEMA, function=lambda city: f"rain in {city}"
)


def generator(**more: Any) -> OpenAIChatGenerator:
    asked = {"generation_kwargs": {**SAID, **more.pop("asked", {})}, **more}
    return OpenAIChatGenerator(api_key=Secret.from_token(KEY), model=MODEL, api_base_url=BASE, **asked)


def messages_of(turns: Turns) -> list[ChatMessage]:
    return [ChatMessage.from_user(text) if role == "user" else ChatMessage.from_assistant(text) for role, text in turns]


def chat(turns: Turns, limit: int) -> str:
    return str(generator(asked={"max_tokens": limit}).run(messages_of(turns))["replies"][0].text)


def chat_stream(turns: Turns, limit: int) -> str:
    parts: list[str] = []
    streaming = generator(asked={"max_tokens": limit}, streaming_callback=lambda part: parts.append(part.content))
    streaming.run(messages_of(turns))
    return "".join(parts)


def tool_loop() -> None:
    messages = [*ASKED]
    for _ in range(3):
        answer = generator(tools=[TOOL], asked={"tool_choice": "required"}).run(messages)["replies"][0]
        messages.append(answer)
        for call in answer.tool_calls:
            assert call.arguments["city"] in CITIES
            messages.append(ChatMessage.from_tool(TOOL.invoke(**call.arguments), origin=call))
    assert generator().run(messages)["replies"][0].text


def structured_output() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA}}
    assert "city" in generator(asked={"response_format": form}).run(ASKED)["replies"][0].text


run({"chat": Api(chat, chat_stream)}, tool_loop, structured_output)
