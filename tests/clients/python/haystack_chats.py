"""Checks haystack, as it is installed, against a gateway. Usage: haystack_chats.py URL"""

import os
from typing import Any

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from checks import BASE, CITIES, KEY, MODEL, NO_THINKING, QUESTION, SCHEMA, run
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
    asked = {"generation_kwargs": {**SAID, **more.pop("asked", {})}, "max_retries": 0, **more}
    return OpenAIChatGenerator(api_key=Secret.from_token(KEY), model=MODEL, api_base_url=BASE, **asked)


def chat_and_stream() -> None:
    parts: list[str] = []
    whole = generator().run(ASKED)["replies"][0].text
    generator(streaming_callback=lambda part: parts.append(part.content)).run(ASKED)
    assert "".join(parts) == whole != ""


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


run(chat_and_stream, tool_loop, structured_output)
