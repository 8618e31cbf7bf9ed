"""`LLM` answers questions about prompts as a client does, and nothing is generated."""

from __future__ import annotations

import pytest

from penstock.producer import RequestRefused
from penstock.tools.chaos.fake_engine import FakeEngine
from penstock.worker.errors import EngineFailed
from tests.local.test_llm import over

CHAT = [{"role": "user", "content": "hi"}]


def test_it_is_told_without_generating() -> None:
    engine = FakeEngine(max_model_len=10)
    with over(engine) as llm:
        assert llm.count_tokens("x" * 100) == 100
        assert llm.count_tokens(CHAT) == len("user:hi")
        assert llm.tokenize("abc") == (97, 98, 99)
        assert llm.detokenize([104, 105]) == "hi"
        assert llm.detokenize([]) == ""
        assert llm.validate("abc", n=64, stop=["x" * 1000]) == 3  # a worker's limits are for strangers
    assert engine.prefilled == []


def test_what_is_wrong_is_refused() -> None:
    with over(FakeEngine(max_model_len=10)) as llm:
        for ask, message in (
            (lambda: llm.validate("x" * 11), "too_long: the prompt has 11 tokens"),
            (lambda: llm.validate("x", temperature=-1), "temperature"),
            (lambda: llm.validate("x", traceparent="00-" + "1" * 32 + "-" + "1" * 16 + "-00"), "traceparent"),
            (lambda: llm.count_tokens([{"role": "system", "content": "x"}]), "must be the user's"),
            (lambda: llm.detokenize([256]), "the vocabulary ends at 255"),
        ):
            with pytest.raises(RequestRefused, match=message):
                ask()


def test_one_that_is_closed_tells_nothing() -> None:
    with over(FakeEngine()) as llm:
        pass
    with pytest.raises(EngineFailed, match="the LLM is closed"):
        llm.count_tokens("x")
