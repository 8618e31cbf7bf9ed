"""Lengths of prompts and answers."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.tools.bench.errors import ImpossibleLoad
from penstock.tools.bench.traffic.lengths import Lengths


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("7", 7, 7),
        ("uniform:3:9", 3, 9),
        ("loguniform:16:512", 16, 512),
        ("normal:2:9", 1, 100),
        ("lognormal:180:8:1200", 8, 1200),
    ],
)
def test_lengths_stay_in_their_range(text: str, low: int, high: int) -> None:
    drawn = Lengths.parse(text, "--prompt-length").draw(np.random.default_rng(1), 500)
    assert low <= min(drawn)
    assert max(drawn) <= high
    assert str(Lengths.parse(text, "--prompt-length")) == text


def test_log_normal_lengths_have_their_median_and_reach_to_both_ends() -> None:
    drawn = sorted(Lengths.parse("lognormal:180:8:1200", "").draw(np.random.default_rng(2), 20_000))
    assert drawn[10_000] == pytest.approx(180, rel=0.05)
    assert 0 < drawn.count(1200) < 1000
    assert drawn[0] < 12


REFUSED = ["", "0", "-1", "uniform:5", "uniform:9:3", "loguniform:0:3", "zipf:1:2", "fixed:1:2", "lognormal:5:6:9"]


@pytest.mark.parametrize("text", [*REFUSED, "lognormal:9:3:8"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ImpossibleLoad, match="--output-length"):
        Lengths.parse(text, "--output-length")
