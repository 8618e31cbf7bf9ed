"""All that follows from the declared parameters agrees with them: wire, engine, HTTP, `penstock send`, the page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import typer

from docs.scripts.parameters_table import PAGE, meaning, page
from penstock.cli import app
from penstock.engine import InvalidRequest, SamplingParams
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.gateway.anthropic.request import MessageBody, read_message
from penstock.gateway.openai.chat_request import ChatBody, read_chat
from penstock.gateway.openai.completion_request import CompletionBody, read_completion
from penstock.gateway.responses.request import RESPONSE_POLICY, read_response
from penstock.parameters import Parameter, SamplingParameters, Taker, declared
from penstock.producer import RequestRefused
from penstock.producer.request import build_request
from penstock.protocol.wire import PARAMETERS, GenerateRequest, parse_request
from penstock.worker.intake.admission import to_engine_request
from penstock.worker.intake.preparation import Preparation
from tests.support.packages import ROOT
from tests.support.parameter_values import a_value, beyond, the_edges
from tests.support.programs.gateway_harness import CARD

CHAT = [{"role": "user", "content": "x"}]
SAMPLING = declared(SamplingParameters)
RANGED = [name for name, each in PARAMETERS.items() if each.range and name != "logit_bias"]
CHECKED_BY_ENGINE = [name for name in RANGED if name in SAMPLING]


def wire(name: str, value: Any) -> GenerateRequest:
    return build_request(CHAT, {name: value}, fresh_id="r")  # type: ignore[misc]


def taken(fields: dict[str, Any]) -> GenerateRequest:
    """Returns what a worker reads of an entry with these fields."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    entry = {name.encode(): value.encode() for name, value in texts.items()}
    return parse_request("1-0", entry, max_body_bytes=10_000)


@pytest.mark.parametrize(("name", "each"), PARAMETERS.items(), ids=list(PARAMETERS))
def test_a_row_says_what_it_means_and_how_the_wire_begins(name: str, each: Parameter) -> None:
    assert each.text.endswith(".")
    assert each.default is None or each.otherwise == "none"
    default = GenerateRequest.model_fields[name].get_default(call_default_factory=True)
    assert default == each.default or (default, each.default) == ({}, None)
    assert type(default) is type(each.default) or default == {}


def test_the_wire_has_a_field_for_each_and_else_only_prompts() -> None:
    of_the_prompt = {"v", "prompt", "messages", "prompt_token_ids"}
    assert GenerateRequest.model_fields.keys() - of_the_prompt == PARAMETERS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_value_travels_as_a_document_and_as_a_flat_field(name: str) -> None:
    request = wire(name, a_value(name))
    assert getattr(request, name) != PARAMETERS[name].default
    trace = {"traceparent": a_value("traceparent")}  # else there is no `tracestate`
    document = {"request": json.dumps({"messages": CHAT, **trace, name: a_value(name)})}
    for read in (taken(document), taken({"messages": CHAT, **trace, name: a_value(name)})):
        assert getattr(read, name) == getattr(request, name)


@pytest.mark.parametrize("name", RANGED)
def test_the_wire_refuses_by_name_what_is_out_of_range(name: str) -> None:
    for value in the_edges(PARAMETERS[name]):
        assert getattr(wire(name, int(value)), name) == value
    for value in beyond(PARAMETERS[name]):
        with pytest.raises(RequestRefused, match=f" {name}: Input should be .*, not "):
            wire(name, value)


def test_the_engine_has_each_that_it_honours_with_its_default() -> None:
    neutral = {each.name: getattr(SamplingParams(), each.name) for each in fields(SamplingParams)}
    assert neutral.keys() == SAMPLING.keys()
    stated = {name: each.default for name, each in SAMPLING.items() if each.default is not None}
    assert {name: neutral[name] for name in stated} == stated


def test_the_engine_reads_each() -> None:
    """One that only travels would change nothing."""
    sources = "\n".join(path.read_text() for path in (ROOT / "engine").rglob("*.py"))
    assert [name for name in SAMPLING if not re.search(rf"\.{name}\b", sources)] == []


@pytest.mark.parametrize("name", CHECKED_BY_ENGINE)
def test_the_engine_refuses_by_name_what_is_out_of_range(name: str) -> None:
    for value in the_edges(SAMPLING[name]):
        params: dict[str, Any] = {"max_tokens": 10, name: value}
        assert getattr(SamplingParams(**params), name) == value
    for value in beyond(SAMPLING[name]):
        wrong: dict[str, Any] = {name: value}
        with pytest.raises(InvalidRequest, match=f"^{name} must be {re.escape(SAMPLING[name].range)}, not "):
            SamplingParams(**wrong)


@pytest.mark.parametrize("name", SAMPLING)
def test_a_value_reaches_the_engine(name: str) -> None:
    request = wire(name, a_value(name))
    reached = to_engine_request(request, Preparation((1,)), GenerationDefaults(())).sampling
    assert getattr(reached, name) == getattr(request, name) != getattr(SamplingParams(), name)
    assert reached == replace(SamplingParams(), **{name: getattr(request, name)})


def completion(body: dict[str, Any]) -> GenerateRequest:
    return read_completion({"prompt": "x", **body}).requests()[0]


READS: dict[Taker, Callable[[dict[str, Any]], GenerateRequest]] = {
    "chat": lambda body: read_chat({"messages": CHAT, **body}).request(CARD),
    "completions": completion,
    "responses": lambda body: read_response({"input": "x", **body}).request(CHAT, CARD),
    "messages": lambda body: read_message({"messages": CHAT, "max_tokens": 9, **body}).request(),
}
FIELDS: dict[Taker, frozenset[str]] = {
    "chat": frozenset(ChatBody.model_fields),
    "completions": frozenset(CompletionBody.model_fields),
    "responses": RESPONSE_POLICY.honoured,
    "messages": frozenset(MessageBody.model_fields),
}
OF_ANOTHER_FORM: dict[Taker, set[str]] = {
    "responses": {"tools", "tool_choice"},
    "messages": {"tools", "tool_choice"},
}
TAKEN = [(api, name) for api in READS for name, each in PARAMETERS.items() if api in each.takers]


@pytest.mark.parametrize("api", READS)
def test_an_api_takes_what_the_rows_say(api: Taker) -> None:
    taken = {name for taker, name in TAKEN if taker == api}
    assert FIELDS[api] & PARAMETERS.keys() == taken | OF_ANOTHER_FORM.get(api, set())


@pytest.mark.parametrize(("api", "name"), TAKEN)
def test_a_value_over_http_reaches_the_queue(api: Taker, name: str) -> None:
    value: Any = True if (api, name) == ("chat", "logprobs") else a_value(name)
    body: dict[str, Any] = (
        {"model": "tiny", "tools": a_value("tools")} if name == "parallel_tool_calls" else {"model": "tiny"}
    )
    if api == "responses" and "tools" in body:
        body["tools"] = [{"type": "function", "name": "noon"}]
    request = READS[api]({**body, name: value})
    kept = getattr(request, name)
    assert kept == getattr(wire(name, value), name) or kept.items() > value.items()  # a form may add variables


def test_the_command_has_an_option_for_each_that_it_sends() -> None:
    send = typer.main.get_command(app).commands["send"]  # type: ignore[attr-defined]  # of a click that is typer's own
    options = {each.name: each.help for each in send.params}
    sent = {name: each.text for name, each in PARAMETERS.items() if "send" in each.takers}
    assert {name: options.get(name, "").removesuffix(" May be repeated.") for name in sent} == sent
    assert options.keys() & PARAMETERS.keys() == sent.keys()


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run `make docs`"


def test_the_page_says_since_when_a_later_one_is_there() -> None:
    assert meaning(Parameter("It helps.", more="A lot.", since="0.2")) == "It helps. A lot. Since 0.2."
    assert meaning(Parameter("It helps.")) == "It helps."
