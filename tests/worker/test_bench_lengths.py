"""How long prompts and answers are."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.worker.bench.errors import ImpossibleLoad
from penstock.worker.bench.lengths import Lengths


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("7", 7, 7), ("uniform:3:9", 3, 9), ("loguniform:16:512", 16, 512), ("normal:2:9", 1, 100)],
)
def test_lengths_stay_in_their_range(text: str, low: int, high: int) -> None:
    drawn = Lengths.parse(text, "--prompt-length").draw(np.random.default_rng(1), 500)
    assert low <= min(drawn)
    assert max(drawn) <= high
    assert str(Lengths.parse(text, "--prompt-length")) == text


@pytest.mark.parametrize("text", ["", "0", "-1", "uniform:5", "uniform:9:3", "loguniform:0:3", "zipf:1:2", "fixed:1:2"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ImpossibleLoad, match="--output-length"):
        Lengths.parse(text, "--output-length")
