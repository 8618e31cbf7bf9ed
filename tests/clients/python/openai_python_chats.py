"""Checks openai, as it is installed, against a gateway. Usage: openai_python_chats.py URL KEY"""

from typing import Any, Literal

from checks import BASE, CITIES, KEY, MODEL, NO_THINKING, QUESTION, SCHEMA, Api, Turns, as_messages, run
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=BASE, api_key=KEY)
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
SAID: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "temperature": 1.0, "seed": 5, "extra_body": NO_THINKING}
MADE: dict[str, Any] = {
    "model": MODEL, "max_output_tokens": 40, "temperature": 1.0, "extra_body": {"seed": 5, **NO_THINKING},
}  # fmt: skip
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "+" WORD ("," WORD)~1..2\nWORD: /[ab]{1,3}/'}


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]


def chat(turns: Turns, limit: int) -> str:
    answer = client.chat.completions.create(messages=as_messages(turns), **{**SAID, "max_tokens": limit})
    return answer.choices[0].message.content or ""


def chat_stream(turns: Turns, limit: int) -> str:
    parts = client.chat.completions.create(messages=as_messages(turns), stream=True, **{**SAID, "max_tokens": limit})
    return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


def response(turns: Turns, limit: int) -> str:
    return client.responses.create(input=as_messages(turns), **{**MADE, "max_output_tokens": limit}).output_text


def response_stream(turns: Turns, limit: int) -> str:
    with client.responses.stream(input=as_messages(turns), **{**MADE, "max_output_tokens": limit}) as stream:
        text = "".join(each.delta for each in stream if each.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text
    return text


def tool_loop() -> None:
    messages: list[Any] = [*ASKED]
    for _ in range(3):
        asked = {**SAID, "max_tokens": 200, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        message = client.chat.completions.create(messages=messages, **asked).choices[0].message
        (call,) = message.tool_calls or ()
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert client.chat.completions.create(messages=messages, **SAID).choices[0].message.content


def built_in_and_custom_tools() -> None:
    custom: Any = {"type": "custom", "name": "letters", "format": LARK}
    for tool, kind in (
        (custom, "custom"),
        ({"type": "local_shell"}, "local_shell"),
        ({"type": "apply_patch"}, "apply_patch"),
    ):
        choice = {"type": "custom", "name": "letters"} if kind == "custom" else {"type": kind}
        asked = {**MADE, "max_output_tokens": 400, "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
        answer = client.responses.create(input=ASKED, **asked)
        (item,) = [each for each in answer.output if each.type.endswith("_call")]
        assert item.type == ("custom_tool_call" if kind == "custom" else f"{kind}_call"), item
        if kind == "custom":
            assert item.input.startswith("+"), item
        output: Any = {"type": f"{item.type}_output", "call_id": item.call_id, "output": "done", "status": "completed"}
        again = client.responses.create(input=[output], previous_response_id=answer.id, **MADE)
        assert again.output_text


def structured_output() -> None:
    asked = {**SAID, "max_tokens": 200}
    chat = client.chat.completions.parse(messages=ASKED, response_format=Weather, **asked)
    assert chat.choices[0].message.parsed is not None
    assert client.responses.parse(input=ASKED, text_format=Weather, **MADE).output_parsed.city in CITIES


def continued_in_place() -> None:
    cut = client.chat.completions.create(messages=ASKED, **{**SAID, "max_tokens": 3}).choices[0]
    assert cut.finish_reason == "length"
    more = {"continue_final_message": True, "add_generation_prompt": False, **NO_THINKING}
    begun: list[Any] = [*ASKED, {"role": "assistant", "content": cut.message.content or "It"}]
    assert client.chat.completions.create(messages=begun, **{**SAID, "extra_body": more}).choices[0].message.content
    short = client.responses.create(input=ASKED, **{**MADE, "max_output_tokens": 3})
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert client.responses.create(input="Go on.", previous_response_id=short.id, **MADE).output


APIS = {"chat": Api(chat, chat_stream), "responses": Api(response, response_stream)}
run(APIS, tool_loop, built_in_and_custom_tools, structured_output, continued_in_place)
