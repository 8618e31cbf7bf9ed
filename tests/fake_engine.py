"""The fake engine is part of the product (`penstock chaos`); tests find it under its short name."""

from worker.chaos.fake_engine import (
    POISON,
    VOCAB_SIZE,
    FakeEngine,
    FakeText,
    expected_text,
    expected_tokens,
    fake_model,
    word,
)

__all__ = ["POISON", "VOCAB_SIZE", "FakeEngine", "FakeText", "expected_text", "expected_tokens", "fake_model", "word"]
