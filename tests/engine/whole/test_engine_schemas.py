"""Published kinds of schemas through a whole engine give valid replies, the same whatever happens beside them."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import jsonschema
import pytest
from jsonschema.validators import validator_for

from penstock.engine import Engine, EngineConfig, InvalidRequest, Request, SamplingParams
from penstock.engine.structured import Grammar
from penstock.engine.text.response.grammar.reply_grammar import reply_grammar
from penstock.engine.text.response.grammar.rules import JsonText
from tests.engine.engines import Result, drive, forget_prefixes, write_model
from tests.engine.structured.schema_corpus import Schema, schemas

MIN_ACCEPTED = 0.88
SIZES = EngineConfig(
    max_num_seqs=16, max_batch_tokens=64, page_size=16, num_pages=400, max_model_len=500, decode_steps=1
)
PROMPT = tuple(range(30, 50))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine.from_checkpoint(write_model(tmp_path_factory.mktemp("long"), max_position_embeddings=512), SIZES)


def compiled(engine: Engine, schema: Schema) -> Grammar | None:
    source = reply_grammar(None, text=JsonText(json.dumps(schema)))
    assert source is not None
    try:
        return engine.grammars.compile(source)
    except InvalidRequest:
        return None


def requests_for(engine: Engine, corpus: list[Schema]) -> dict[str, tuple[Schema, Request]]:
    """Makes a request for each accepted schema. Closing tokens are likely, or hardly a reply would end."""
    closing = {engine.tokenizer.encode(sign)[0]: 4.0 for sign in '"]}'}
    found = {}
    for number, schema in enumerate(corpus):
        grammar = compiled(engine, schema)
        if grammar is not None:
            params = SamplingParams(temperature=1.5, seed=number, max_tokens=400, logit_bias=closing)
            found[f"s{number}"] = schema, Request(f"s{number}", PROMPT, params, grammar=grammar)
    return found


def whole(result: Result) -> tuple[list[int], str, str | None]:
    return result.token_ids, result.text, result.finish_reason


def check_valid(engine: Engine, corpus: list[Schema]) -> dict[str, tuple[Request, Result]]:
    """Runs all requests beside each other; checks that replies that end are valid by the schema's own draft. Returns
    them.
    """
    asked = requests_for(engine, corpus)
    assert len(asked) >= MIN_ACCEPTED * len(corpus)
    results = drive(engine, [request for _, request in asked.values()], limit=200_000)
    ended = 0
    for name, (schema, _) in asked.items():
        result = results[name, 0]
        assert result.finish_reason in ("stop", "length"), result.error
        if result.finish_reason == "stop":
            ended += 1
            kind = validator_for(schema, default=jsonschema.Draft202012Validator)
            kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(result.text))
    assert ended > 0.7 * len(asked)  # or this proves little
    return {name: (request, results[name, 0]) for name, (_, request) in asked.items()}


def check_repeats(engine: Engine, found: dict[str, tuple[Request, Result]]) -> None:
    """Checks that replies are the same alone, preempted at random and resumed from a random token."""
    rng = random.Random(1)

    def preempt(_: int) -> None:
        for sequence in engine._scheduler.running:
            if rng.random() < 0.02:
                engine._scheduler._preempt(sequence)

    forget_prefixes(engine)
    preempted = drive(engine, [request for request, _ in found.values()], before_step=preempt, limit=200_000)
    for name, (request, expected) in found.items():
        assert whole(preempted[name, 0]) == whole(expected)
        assert whole(drive(engine, [request])[name, 0]) == whole(expected)
        count = rng.randrange(len(expected.token_ids) + 1)
        rest = drive(engine, [replace(request, generated=(tuple(expected.token_ids[:count]),))])[name, 0]
        assert rest.token_ids == expected.token_ids[count:]
        assert expected.text.endswith(rest.text)
        assert rest.finish_reason == expected.finish_reason


def test_replies_are_valid_and_repeat(engine: Engine) -> None:
    check_repeats(engine, check_valid(engine, schemas(24)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_corpus(engine: Engine) -> None:
    found = check_valid(engine, schemas(1000))
    check_repeats(engine, dict(list(found.items())[:200]))
