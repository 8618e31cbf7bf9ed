"""What a benchmark sends, and when."""

from __future__ import annotations

import asyncio
import json
import select
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.worker.bench import punctual
from penstock.worker.bench.arrivals import Arrivals
from penstock.worker.bench.datasets import BenchRequest, random_requests
from penstock.worker.bench.errors import ImpossibleLoad
from penstock.worker.bench.lengths import Lengths
from penstock.worker.bench.options import LoadOptions


def test_the_shared_workload_is_what_other_engines_were_measured_with() -> None:
    rng = np.random.default_rng(0)
    prompts = np.exp(rng.uniform(np.log(16), np.log(512), 64)).round().astype(int)
    outputs = rng.integers(16, 129, 64)
    requests = random_requests(64, 8192)
    assert [len(request.prompt) for request in requests] == prompts.tolist()
    assert [request.max_tokens for request in requests] == outputs.tolist()
    assert requests[0].prompt == tuple(rng.integers(300, 8128, prompts[0]).tolist())


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


def test_shared_prefixes_take_turns() -> None:
    options = LoadOptions(
        dataset="shared-prefix", requests=6, prefix_length=50, prefix_count=2, prompt_length="8", output_length="4"
    )
    requests = options.load(1000).requests
    assert {len(request.prompt) for request in requests} == {58}
    assert requests[0].prompt[:50] == requests[2].prompt[:50] == requests[4].prompt[:50]
    assert requests[0].prompt[:50] != requests[1].prompt[:50]
    assert requests[0].prompt[50:] != requests[2].prompt[50:]


def test_a_repetition_has_the_same_lengths_and_prefixes_but_other_ids() -> None:
    options = LoadOptions(dataset="shared-prefix", requests=4, prefix_length=20, prefix_count=1)
    first, second = options.load(1000, 0).requests, options.load(1000, 1).requests
    assert [len(request.prompt) for request in first] == [len(request.prompt) for request in second]
    assert second[0].prompt[:20] == second[3].prompt[:20]
    assert not set(zip(first[0].prompt, second[0].prompt, strict=True)) & {(id_, id_) for id_ in range(1000)}
    assert all(isinstance(id_, int) and 250 <= id_ < 936 for request in second for id_ in request.prompt)


def test_a_file_brings_prompts_of_all_kinds(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "hello", "max_tokens": 3},
        {"prompt_token_ids": [5, 6]},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    requests = LoadOptions(dataset=str(path), output_length="9").load(1000).requests
    assert requests == (
        BenchRequest("hello", 3, ignore_eos=False),
        BenchRequest((5, 6), 9, ignore_eos=False),
        BenchRequest(({"role": "user", "content": "hi"},), 9, ignore_eos=False),
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2: not JSON"),
        ("[]", "line 2: list"),
        ("{}", "line 2: wants exactly one of"),
        ('{"prompt": "a", "messages": []}', "line 2: wants exactly one of"),
        ('{"prompt": "a", "max_token": 3}', "max_token"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be a number from 1, not 0"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"prompt": ["a"]}', "prompt is list"),
        ('{"prompt_token_ids": "abc"}', "prompt_token_ids is str"),
        ('{"prompt_token_ids": [1, "b"]}', "of the wrong kind"),
        ('{"messages": [{"role": "user"}]}', "of the wrong kind"),
    ],
)
def test_a_line_that_is_not_understood_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ImpossibleLoad, match=message):
        LoadOptions(dataset=str(path)).load(1000)


def test_a_file_too_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "fine"}\n')
    with pytest.raises(ImpossibleLoad, match="holds 1 requests, fewer than the 2"):
        LoadOptions(dataset=str(path), requests=2).load(1000)


def test_arrivals() -> None:
    assert Arrivals().times_s(3, seed=0) == [0.0, 0.0, 0.0]
    assert Arrivals("closed", concurrency=2).times_s(2, seed=0) == [0.0, 0.0]
    assert Arrivals("constant", rate=4.0).times_s(3, seed=0) == [0.0, 0.25, 0.5]
    times_s = Arrivals("poisson", rate=10.0).times_s(5000, seed=3)
    assert times_s == sorted(times_s)
    assert times_s == Arrivals("poisson", rate=10.0).times_s(5000, seed=3)
    assert times_s != Arrivals("poisson", rate=10.0).times_s(5000, seed=4)
    assert 450 < times_s[-1] < 550


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arrivals": "uniform"}, "--arrivals must be one of burst, constant, poisson, closed, not 'uniform'"),
        ({"arrivals": "poisson"}, "--arrivals poisson needs --rate"),
        ({"arrivals": "closed"}, "--arrivals closed needs --concurrency"),
        ({"rate": 3.0}, "--rate 3 means nothing to --arrivals burst"),
        ({"arrivals": "poisson", "rate": 3.0, "concurrency": 2}, "--concurrency 2 means nothing"),
        ({"arrivals": "constant", "rate": 0.0}, "--rate must be above 0, not 0"),
        ({"dataset": "nowhere.jsonl"}, "--dataset must be random, shared-prefix or a JSONL file, not 'nowhere.jsonl'"),
        ({"prefix_length": 3}, "--prefix-length 3 means nothing to --dataset random"),
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
    with pytest.raises(ImpossibleLoad, match="--prompt-length 3 means nothing to --dataset"):
        LoadOptions(dataset=str(path), prompt_length="3")


def test_a_tiny_vocabulary_is_refused() -> None:
    with pytest.raises(ImpossibleLoad, match="--vocab-size 8 is too small"):
        LoadOptions().load(8)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' loops are punctual")
def test_waits_are_not_rounded_to_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s: list[float] = []

    def wait(readable: list[int], writable: list[int], exceptional: list[int], timeout_s: float) -> object:
        waits_s.append(timeout_s)
        return select.select(readable, writable, exceptional, timeout_s)

    async def main() -> str:
        await asyncio.sleep(0.0105)
        return await asyncio.to_thread(lambda: "woken by a thread")

    monkeypatch.setattr(punctual, "select", SimpleNamespace(select=wait))
    assert punctual.run(main()) == "woken by a thread"
    assert 0.010 < max(waits_s) <= 0.0105
