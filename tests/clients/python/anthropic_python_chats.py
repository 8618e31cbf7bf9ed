"""Checks anthropic, as it is installed, against a gateway. Usage: anthropic_python_chats.py URL KEY"""

from typing import Any, Literal

from anthropic import Anthropic
from checks import CITIES, KEY, MODEL, QUESTION, SCHEMA, URL, Api, Turns, as_messages, run
from pydantic import BaseModel

client = Anthropic(base_url=URL, api_key=KEY)
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
SAID: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "extra_body": {"seed": 5}}
TOOL: Any = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA, "strict": True}


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def message(turns: Turns, limit: int) -> str:
    return text_of(client.messages.create(messages=as_messages(turns), **{**SAID, "max_tokens": limit}))


def message_stream(turns: Turns, limit: int) -> str:
    with client.messages.stream(messages=as_messages(turns), **{**SAID, "max_tokens": limit}) as stream:
        text = "".join(stream.text_stream)
        assert text_of(stream.get_final_message()) == text
    return text


def tool_loop() -> None:
    messages: list[Any] = [*ASKED]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    for _ in range(3):
        answer = client.messages.create(
            messages=messages, tools=[TOOL], tool_choice=choice, **{**SAID, "max_tokens": 200}
        )
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        assert (answer.stop_reason, call.input["city"] in CITIES) == ("tool_use", True)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert text_of(client.messages.create(messages=messages, tools=[TOOL], tool_choice={"type": "none"}, **SAID))


def structured_output() -> None:
    parsed = client.messages.parse(messages=ASKED, output_format=Weather, **{**SAID, "max_tokens": 200})
    assert parsed.parsed_output.city in CITIES


def continued_in_place() -> None:
    cut = client.messages.create(messages=ASKED, **{**SAID, "max_tokens": 3})
    assert cut.stop_reason == "max_tokens"
    begun: list[Any] = [*ASKED, {"role": "assistant", "content": text_of(cut).strip() or "It"}]
    assert client.messages.create(messages=begun, **SAID).usage.output_tokens > 0


def tokens_counted() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens > 0


run({"messages": Api(message, message_stream)}, tool_loop, structured_output, continued_in_place, tokens_counted)
