"""Checks instructor, as it is installed, against a gateway. Usage: instructor_chats.py URL KEY"""

from typing import Any, Literal

import instructor
from checks import BASE, KEY, MODEL, NO_THINKING, QUESTION, TERSE, Api, Turns, as_messages, run
from openai import OpenAI
from pydantic import BaseModel, field_validator

ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
SAID: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "temperature": 1.0, "seed": 5, "extra_body": NO_THINKING}


class Weather(BaseModel, extra="forbid"):
    """What to know of it."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2]


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(OpenAI(base_url=BASE, api_key=KEY), mode=mode)


def chat(turns: Turns, limit: int) -> str:
    asked = {**SAID, "messages": as_messages(turns), "max_tokens": limit}
    return str(
        client(instructor.Mode.TOOLS).chat.completions.create(response_model=None, **asked).choices[0].message.content
    )


def chat_stream(turns: Turns, limit: int) -> str:
    asked = {**SAID, "messages": as_messages(turns), "max_tokens": limit, "stream": True}
    parts = client(instructor.Mode.TOOLS).chat.completions.create(response_model=None, **asked)
    return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


def made(mode: instructor.Mode) -> None:
    single = {} if mode is instructor.Mode.JSON_SCHEMA else {"parallel_tool_calls": False}
    asked = {"response_model": Weather, "messages": ASKED, "max_retries": 0, **SAID, **single}
    assert isinstance(client(mode).chat.completions.create(**asked), Weather)


def tools() -> None:
    made(instructor.Mode.TOOLS)


def strict_tools() -> None:
    made(instructor.Mode.TOOLS_STRICT)


def structured_output() -> None:
    made(instructor.Mode.JSON_SCHEMA)


def partial_objects() -> None:
    parts = client(instructor.Mode.TOOLS).chat.completions.create_partial(
        response_model=Weather, messages=ASKED, max_retries=0, parallel_tool_calls=False, **SAID
    )
    assert list(parts)[-1].city in ("Oslo", "Rome")


def tool_loop() -> None:
    """The program sends its objections back as results of calls."""
    seen: list[str] = []

    class Objected(BaseModel, extra="forbid"):
        """What to know of it."""

        city: Literal["Oslo", "Rome"]

        @field_validator("city")
        @classmethod
        def third(cls, city: str) -> str:
            seen.append(city)
            if len(seen) < 3:
                raise ValueError("Ask again.")
            return city

    asked = {"response_model": Objected, "messages": ASKED, "max_retries": 3, **SAID, "logit_bias": TERSE}
    assert isinstance(
        client(instructor.Mode.TOOLS).chat.completions.create(parallel_tool_calls=False, **asked), Objected
    )
    assert len(seen) == 3


run({"chat": Api(chat, chat_stream)}, tool_loop, tools, strict_tools, structured_output, partial_objects)
