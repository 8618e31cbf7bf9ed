"""Checks instructor, as it is installed, against a gateway. Usage: instructor_chats.py URL"""

from typing import Any, Literal

import instructor
from checks import ASKED, BASE, KEY, MODEL, NO_THINKING, run
from openai import OpenAI
from pydantic import BaseModel

SAID: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "temperature": 1.0, "seed": 5, "extra_body": NO_THINKING}


class Weather(BaseModel, extra="forbid"):
    """What to know of it."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2]


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(OpenAI(base_url=BASE, api_key=KEY, max_retries=0), mode=mode)


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


def stream() -> None:
    parts = client(instructor.Mode.TOOLS).chat.completions.create_partial(
        response_model=Weather, messages=ASKED, max_retries=0, parallel_tool_calls=False, **SAID
    )
    assert list(parts)[-1].city in ("Oslo", "Rome")


run(tools, strict_tools, structured_output, stream)
