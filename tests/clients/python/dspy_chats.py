"""Checks dspy, as it is installed, against a gateway. Usage: dspy_chats.py URL KEY

Programs of dspy know by a catalogue what a model can. Another one is declared: else they ask for any JSON object,
without a schema.
"""

from typing import Any, Literal

import dspy
from checks import BASE, CITIES, KEY, MODEL, QUESTION, TERSE, Api, Turns, as_messages, run
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider

register_provider(
    ProviderDefinition.chat(AccessPolicy(provider="penstock", base_url=BASE), compat=OpenAIChatCompat.preset("vllm")),
    supports=ModelSupport(function_calling=True, response_schema=True),
)
lm = dspy.LM(f"penstock/{MODEL}", api_base=BASE, api_key=KEY, cache=False, temperature=1.0, max_tokens=200, seed=5)


class Weather(dspy.Signature):
    """Tell of the weather."""

    question: str = dspy.InputField()
    city: Literal["Oslo", "Rome"] = dspy.OutputField()


def chat(turns: Turns, limit: int) -> str:
    (answer,) = lm(messages=as_messages(turns), max_tokens=limit)
    return str(answer)


def structured_output() -> None:
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Weather)(question=QUESTION).city in CITIES


class Called(dspy.Signature):
    """Ask for the weather."""

    history: dspy.History = dspy.InputField()
    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Tells the weather."""
    return f"rain in {city}"


def tool_loop() -> None:
    turns: list[Any] = []
    predict = dspy.Predict(Called, tool_choice="required", logit_bias=TERSE)
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter(use_native_function_calling=True)):
        for _ in range(3):
            asked = {"history": dspy.History(messages=turns), "question": QUESTION, "tools": [dspy.Tool(weather)]}
            (call, *_) = predict(**asked).calls.tool_calls
            assert call.args["city"] in CITIES
            turns += [{"question": QUESTION, "calls": call.name}, {"question": weather(**call.args)}]


run({"chat": Api(chat, None)}, tool_loop, structured_output)
