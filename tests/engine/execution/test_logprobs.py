"""Log-probabilities as values."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from penstock.engine.execution.sampling.logprobs import Logprobs
from penstock.engine.logprobs import PromptLogprobs, logprob_at
from penstock.engine.request import Request, SamplingParams, TokenLogprob, TopLogprob
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.tokenizers_for_tests import byte_level

SPELL = Tokenizer(byte_level()).spell


def test_they_are_those_of_the_row_and_as_many_as_asked_for() -> None:
    found = Logprobs(
        sampled=jnp.array([-1.0, -2.0], jnp.float32),
        top_ids=jnp.array([[5, 6, 7], [264, 8, 3]], jnp.int32),
        top=jnp.array([[-0.5, -1.0, -3.0], [-0.25, -2.0, -4.0]], jnp.float32),
    )
    assert logprob_at(found, 1, 8, 2, SPELL) == TokenLogprob(
        8, ")", b")", -2.0, (TopLogprob(264, "<|end|>", b"<|end|>", -0.25), TopLogprob(8, ")", b")", -2.0))
    )
    assert logprob_at(found, 0, 9, 0, SPELL) == TokenLogprob(9, "*", b"*", -1.0, ())


def test_chunks_of_a_prompt_that_overlap_count_once() -> None:
    def rows(*values: float) -> Logprobs:
        nothing = np.zeros((len(values), 0))
        return Logprobs(np.array(values, np.float32), nothing, nothing)  # type: ignore[arg-type]

    request = Request("r", (4, 5, 6, 7, 8), SamplingParams(prompt_logprobs=0))
    prompt = PromptLogprobs(request, SPELL)
    prompt.take(rows(-9.0, -1.0, -2.0), place=1, start=0, count=2)
    prompt.take(rows(-1.0, -2.0, -3.0), place=0, start=0, count=3)  # computed again after a preemption
    prompt.take(rows(-4.0), place=0, start=3, count=1)
    first, *rest = prompt.all()
    assert first is None
    assert [(entry.token_id, entry.logprob) for entry in rest if entry] == [(5, -1.0), (6, -2.0), (7, -3.0), (8, -4.0)]
