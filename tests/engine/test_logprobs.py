"""Log-probabilities as values."""

from __future__ import annotations

import numpy as np
from tokenizers_for_tests import byte_level

from penstock.engine.execution.sampling import Logprobs
from penstock.engine.logprobs import logprob_at
from penstock.engine.request import TokenLogprob, TopLogprob
from penstock.engine.text.tokenizer import Tokenizer

SPELL = Tokenizer(byte_level()).spell


def test_they_are_those_of_the_row_and_as_many_as_asked_for() -> None:
    found = Logprobs(
        sampled=np.array([-1.0, -2.0], np.float32),
        top_ids=np.array([[5, 6, 7], [264, 8, 3]], np.int32),
        top=np.array([[-0.5, -1.0, -3.0], [-0.25, -2.0, -4.0]], np.float32),
    )  # type: ignore[arg-type]
    assert logprob_at(found, 1, 8, 2, SPELL) == TokenLogprob(
        8, ")", b")", -2.0, (TopLogprob(264, "<|end|>", b"<|end|>", -0.25), TopLogprob(8, ")", b")", -2.0))
    )
    assert logprob_at(found, 0, 9, 0, SPELL) == TokenLogprob(9, "*", b"*", -1.0, ())
