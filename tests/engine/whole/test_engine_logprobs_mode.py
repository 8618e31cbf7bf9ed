"""With `raw_logprobs`, log-probabilities are the model's own, whatever adjusts what tokens are drawn from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.engine import Engine, Request, SamplingParams, TokenLogprob
from penstock.engine.text.response.grammar.reply_grammar import reply_grammar
from penstock.engine.text.response.grammar.rules import RegexText
from tests.engine.engines import SMALL, drive

PROMPT = tuple(range(40, 50))
ADJUSTED = SamplingParams(
    temperature=0.7, seed=3, max_tokens=9, logprobs=3, repetition_penalty=1.5, presence_penalty=1.0,
    logit_bias={45: 3.0}, bad_token_ids=(46, 47), min_tokens=4, top_k=20, stop_token_ids=(50,),
)  # fmt: skip


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_they_are_those_of_the_same_tokens_as_a_prompt(tiny_model: Path, decode_steps: int) -> None:
    engine = Engine.from_checkpoint(tiny_model, replace(SMALL, logprobs_mode="raw_logprobs", decode_steps=decode_steps))
    source = reply_grammar(None, text=RegexText("[a-z]{6}"))
    assert source is not None
    constrained = replace(ADJUSTED, min_tokens=0, stop_token_ids=())
    requests = [
        Request("adjusted", PROMPT, ADJUSTED),
        Request("constrained", PROMPT, constrained, grammar=engine.grammars.compile(source)),
        Request("plain", PROMPT, SamplingParams(temperature=0.0, max_tokens=9, logprobs=3)),
    ]
    for (name, _), result in drive(engine, requests).items():
        answer = result.token_ids[: len(result.logprobs)]
        assert len(answer) > 3, name
        for found, expected in zip(result.logprobs, scored(engine, (*PROMPT, *answer)), strict=True):
            assert found.logprob == pytest.approx(expected.logprob, abs=1e-4), name
            assert [top.token_id for top in found.top] == [top.token_id for top in expected.top], name


def scored(engine: Engine, prompt: tuple[int, ...]) -> list[TokenLogprob]:
    """Returns the log-probabilities of the tokens behind PROMPT, as those of a prompt."""
    engine.add(Request("scored", prompt, SamplingParams(max_tokens=1, prompt_logprobs=3)))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    found = next(output.prompt_logprobs for output in outputs if output.prompt_logprobs)
    return [each for each in found[len(PROMPT) :] if each is not None]
