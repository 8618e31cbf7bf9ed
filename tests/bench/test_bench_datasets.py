"""Prompts that are sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.tools.bench.errors import ImpossibleLoad
from penstock.tools.bench.options import LoadOptions
from penstock.tools.bench.traffic.datasets import BenchRequest, random_requests


def test_the_shared_workload_is_what_other_engines_were_measured_with() -> None:
    rng = np.random.default_rng(0)
    prompts = np.exp(rng.uniform(np.log(16), np.log(512), 64)).round().astype(int)
    outputs = rng.integers(16, 129, 64)
    requests = random_requests(64, 8192)
    assert [len(request.prompt) for request in requests] == prompts.tolist()
    assert [request.max_tokens for request in requests] == outputs.tolist()
    assert requests[0].prompt == tuple(rng.integers(300, 8128, prompts[0]).tolist())


def ids_of(request: BenchRequest) -> tuple[Any, ...]:
    assert isinstance(request.prompt, tuple)
    return request.prompt


def test_shared_prefixes_take_turns() -> None:
    options = LoadOptions(
        dataset="shared-prefix", requests=6, prefix_length=50, prefix_count=2, prompt_length="8", output_length="4"
    )
    requests = options.load(1000).requests
    assert {len(request.prompt) for request in requests} == {58}
    assert ids_of(requests[0])[:50] == ids_of(requests[2])[:50] == ids_of(requests[4])[:50]
    assert ids_of(requests[0])[:50] != ids_of(requests[1])[:50]
    assert ids_of(requests[0])[50:] != ids_of(requests[2])[50:]


def test_a_repetition_has_the_same_lengths_and_prefixes_but_other_ids() -> None:
    options = LoadOptions(dataset="shared-prefix", requests=4, prefix_length=20, prefix_count=1)
    first, second = options.load(1000, 0).requests, options.load(1000, 1).requests
    assert [len(request.prompt) for request in first] == [len(request.prompt) for request in second]
    assert ids_of(second[0])[:20] == ids_of(second[3])[:20]
    assert not set(zip(ids_of(first[0]), ids_of(second[0]), strict=True)) & {(id_, id_) for id_ in range(1000)}
    assert all(isinstance(id_, int) and 250 <= id_ < 936 for request in second for id_ in ids_of(request))


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
        ("{}", "line 2: needs exactly one of"),
        ('{"prompt": "a", "messages": []}', "line 2: needs exactly one of"),
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


def test_a_tiny_vocabulary_is_refused() -> None:
    with pytest.raises(ImpossibleLoad, match="--vocab-size 8 is too small"):
        LoadOptions().load(8)
