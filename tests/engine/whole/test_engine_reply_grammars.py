"""Tool calls of a model with random weights, at a high temperature, are what was asked for if they end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from penstock.engine import Engine, EngineConfig, Output, Request, SamplingParams
from penstock.engine.request import ResponseSpec, Tool
from penstock.engine.text.response.formats import FORMATS
from penstock.engine.text.response.grammar.reply_grammar import reply_grammar
from penstock.engine.text.response.grammar.rules import CallRule
from tests.engine.checkpoints import write_checkpoint
from tests.engine.text.reply_walks import EOS, chat_tokenizer

PROMPT = (70, 71, 72)
CONFIG = EngineConfig(
    max_num_seqs=16, max_batch_tokens=64, page_size=16, num_pages=1400, max_model_len=640, decode_steps=1
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}, "on": {"type": "boolean"}},
    "required": ["city"],
}
TOOLS = (Tool("weather", json.dumps(PARAMETERS), strict=True), Tool("stop"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    tokenizer = chat_tokenizer()
    eos = tokenizer.convert_tokens_to_ids(EOS)
    directory = write_checkpoint(
        tmp_path_factory.mktemp("chat"),
        "qwen3",
        vocab_size=len(tokenizer) + 5,  # models pad theirs
        eos_token_id=eos,
        bos_token_id=None,
        head_dim=16,
        num_hidden_layers=1,
        max_position_embeddings=1024,
    )
    tokenizer.save_pretrained(directory)
    return Engine.from_checkpoint(directory, CONFIG)


class Reply:
    """All outputs of one choice, joined."""

    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.calls: list[list[str]] = []  # name and arguments of each
        self.finish_reason: str | None = None
        self.error: str | None = None

    def take(self, output: Output) -> None:
        self.text += output.text
        self.reasoning += output.reasoning
        self.finish_reason, self.error = output.finish_reason, output.error
        for call in output.tool_calls:
            if call.name is not None:
                self.calls.append([call.name, ""])
            self.calls[call.index][1] += call.arguments


def generate(engine: Engine, requests: Sequence[Request]) -> dict[str, Reply]:
    replies = {request.id: Reply() for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for output in engine.step():
            replies[output.request_id].take(output)
    return replies


def hot(engine: Engine, seed: int, max_tokens: int = 400) -> SamplingParams:
    """Returns random sampling, biased to tokens that end strings and brackets: otherwise few replies would end."""
    closing = {engine.tokenizer.encode(sign)[0]: 4.0 for sign in '"}]<)'}
    return SamplingParams(temperature=1.5, seed=seed, max_tokens=max_tokens, logit_bias=closing)


def request_of(engine: Engine, name: str, seed: int, spec: ResponseSpec, calls: CallRule) -> Request:
    source = reply_grammar(spec, calls=calls, special_token_ids=engine.tokenizer.special_token_ids)
    assert source is not None
    return Request(name, PROMPT, hot(engine, seed), response=spec, grammar=engine.grammars.compile(source))


@pytest.mark.parametrize("format_", FORMATS)
def test_required_calls_are_made_with_and_without_reasoning(engine: Engine, format_: str) -> None:
    reasoning = FORMATS[format_].reasoning
    prefixes = ["", reasoning.begin, reasoning.begin + reasoning.end] if reasoning else [""]
    if FORMATS[format_].next_part:
        prefixes = ["", "<|channel|>analysis<|message|>"]
    rules = (CallRule(required=True), CallRule(required=True, at_most_one=True))
    requests = [
        request_of(engine, f"{prefix}/{seed}", seed, ResponseSpec(format_, prefix, TOOLS), rules[seed % 2])
        for prefix in prefixes
        for seed in range(6)
    ]
    schemas_by_name: dict[str, dict[str, Any]] = {"weather": PARAMETERS, "stop": {"type": "object", "maxProperties": 0}}
    replies = generate(engine, requests)
    ended = {name: reply for name, reply in replies.items() if reply.finish_reason != "length"}
    assert len(ended) >= 3
    for name, reply in ended.items():
        assert reply.finish_reason == "tool_calls", (name, reply.error)
        assert reply.calls
        assert not reply.text.strip()
        assert len(reply.calls) == 1 or not int(name.rpartition("/")[2]) % 2
        for called, arguments in reply.calls:
            jsonschema.validate(json.loads(arguments), schemas_by_name[called])
    for name, reply in replies.items():
        begun = name.rpartition("/")[0]
        if reasoning and begun and not begun.endswith(reasoning.end):
            assert reply.reasoning or reply.calls  # of what the prompt opened
