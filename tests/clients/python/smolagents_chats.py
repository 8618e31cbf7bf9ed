"""Checks smolagents, as it is installed, against a gateway. Usage: smolagents_chats.py URL KEY"""

from typing import Any

from checks import BASE, CITIES, KEY, MODEL, NO_THINKING, QUESTION, SCHEMA, Api, Turns, run
from smolagents import OpenAIModel, Tool

SAID: dict[str, Any] = {"max_tokens": 200, "temperature": 1.0, "seed": 5, "extra_body": NO_THINKING}
model = OpenAIModel(MODEL, api_base=BASE, api_key=KEY)


def messages_of(turns: Turns) -> list[Any]:
    return [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]


ASKED = messages_of([("user", QUESTION)])


class Weather(Tool):
    name = "weather"
    description = "Tells the weather."
    inputs = {"city": {"type": "string", "description": "Where.", "enum": [*CITIES]}}  # noqa: RUF012
    output_type = "string"

    def forward(self, city: str) -> str:
        return "rain"


def chat(turns: Turns, limit: int) -> str:
    return str(model.generate(messages_of(turns), **{**SAID, "max_tokens": limit}).content)


def chat_stream(turns: Turns, limit: int) -> str:
    parts = model.generate_stream(messages_of(turns), **{**SAID, "max_tokens": limit})
    return "".join(part.content or "" for part in parts)


def tool_loop() -> None:
    messages = [*ASKED]
    for _ in range(3):
        answer = model.generate(messages, tools_to_call_from=[Weather()], **SAID)
        assert answer.tool_calls[0].function.name == "weather"
        messages += [answer, {"role": "tool-response", "content": [{"type": "text", "text": "rain"}]}]


def structured_output() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA}}
    assert "city" in str(model.generate(ASKED, response_format=form, **SAID).content)


run({"chat": Api(chat, chat_stream)}, tool_loop, structured_output)
