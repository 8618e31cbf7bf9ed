"""Options of a load that go together, and those that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.tools.bench.errors import ImpossibleLoad
from penstock.tools.bench.options import LoadOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arrivals": "uniform"}, "--arrivals must be one of burst, constant, poisson, closed, not 'uniform'"),
        ({"arrivals": "poisson"}, "--arrivals poisson needs --rate"),
        ({"arrivals": "closed"}, "--arrivals closed needs --concurrency"),
        ({"rate": 3.0}, "--rate 3 has no effect with --arrivals burst"),
        ({"arrivals": "poisson", "rate": 3.0, "concurrency": 2}, "--concurrency 2 has no effect"),
        ({"arrivals": "constant", "rate": 0.0}, "--rate must be above 0, not 0"),
        ({"dataset": "nowhere.jsonl"}, "--dataset must be random, shared-prefix or a JSONL file, not 'nowhere.jsonl'"),
        ({"prefix_length": 3}, "--prefix-length 3 has no effect with --dataset random"),
        ({"prompt_length": "many"}, "--prompt-length must be N, uniform"),
        ({"requests": 0}, "--requests must be 1 or more, not 0"),
        ({"seed": -1}, "--seed must be 0 or more, not -1"),
        ({"temperature": -1.0}, "--temperature must be 0 to 100, not -1"),
        ({"slo_ttft_ms": 0.0}, "--slo-ttft-ms must be above 0, not 0"),
        ({"slo_itl_ms": -2.0}, "--slo-itl-ms must be above 0, not -2"),
    ],
)
def test_impossible_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ImpossibleLoad, match=message):
        LoadOptions(**options)


def test_options_that_mean_nothing_to_a_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "fine"}\n')
    with pytest.raises(ImpossibleLoad, match="--prompt-length 3 has no effect with --dataset"):
        LoadOptions(dataset=str(path), prompt_length="3")
