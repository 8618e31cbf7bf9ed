"""Checks llama-index, as it is installed, against a gateway. Usage: llama_index_chats.py URL KEY"""

from typing import Any, Literal

from checks import BASE, KEY, MODEL, NO_THINKING, QUESTION, Api, Turns, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


def llm_up_to(limit: int) -> OpenAILike:
    return OpenAILike(
        model=MODEL, api_base=BASE, api_key=KEY, is_chat_model=True, is_function_calling_model=True, max_tokens=limit,
        temperature=1.0, context_window=1024, additional_kwargs={"seed": 5, "extra_body": NO_THINKING},
    )  # fmt: skip


llm = llm_up_to(200)
ASKED = [ChatMessage(role="user", content=QUESTION)]


class Weather(BaseModel):
    """What to know of it."""

    city: Literal["Oslo", "Rome"]


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Tells the weather."""
    return f"rain in {city}"


def messages_of(turns: Turns) -> list[ChatMessage]:
    return [ChatMessage(role=role, content=text) for role, text in turns]


def chat(turns: Turns, limit: int) -> str:
    return str(llm_up_to(limit).chat(messages_of(turns)).message.content)


def chat_stream(turns: Turns, limit: int) -> str:
    return "".join(part.delta or "" for part in llm_up_to(limit).stream_chat(messages_of(turns)))


def tool_loop() -> None:
    tool: Any = FunctionTool.from_defaults(weather)
    history = [*ASKED]
    for _ in range(3):
        answer = llm.chat_with_tools([tool], chat_history=history, tool_required=True)
        (call, *_) = llm.get_tool_calls_from_response(answer)
        said = tool.call(**call.tool_kwargs).content
        result = ChatMessage(role="tool", content=said, additional_kwargs={"tool_call_id": call.tool_id})
        history += [answer.message, result]


def structured_output() -> None:
    made = llm.as_structured_llm(Weather).complete(QUESTION)
    assert isinstance(made.raw, Weather)


run({"chat": Api(chat, chat_stream)}, tool_loop, structured_output)
