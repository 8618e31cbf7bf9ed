"""Loads from trace files send what they say at its time, and share the prefixes that they share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.tools.bench.errors import ImpossibleLoad
from penstock.tools.bench.on_service import run_on_service
from penstock.tools.bench.options import LoadOptions
from penstock.tools.bench.summary import Summary
from penstock.tools.bench.traffic.block_prompts import BlockPrompt
from penstock.tools.bench.traffic.datasets import BenchRequest
from penstock.tools.bench.traffic.load import Load
from penstock.tools.chaos.fake_engine import FakeEngine
from penstock.tools.plan import traces as of_plans
from tests.support.programs.worker_harness import running_worker

MOONCAKE = """\
{"timestamp": 3052, "input_length": 1100, "output_length": 20, "hash_ids": [0, 7, 8]}
{"timestamp": 52, "input_length": 1024, "output_length": 3, "hash_ids": [0, 1]}
{"timestamp": 2052, "input_length": 513, "output_length": 5, "hash_ids": [0, 1]}
"""


def written(folder: Path, text: str, name: str = "trace.jsonl") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def load_of(folder: Path, text: str, name: str = "trace.jsonl", **options: Any) -> Load:
    return LoadOptions(trace=written(folder, text, name), **options).load(1000)


def ids(request: BenchRequest) -> tuple[int, ...]:
    said = request.said()
    assert isinstance(said, tuple)
    return tuple(part for part in said if isinstance(part, int))


def test_mooncake_s_blocks_are_shared_prefixes(tmp_path: Path) -> None:
    load = load_of(tmp_path, MOONCAKE)
    assert load.times_s() == [0.0, 2.0, 3.0]
    assert [(len(ids(each)), each.max_tokens) for each in load.requests] == [(1024, 3), (513, 5), (1100, 20)]
    first, second, third = map(ids, load.requests)
    assert first[:513] == second
    assert first[:512] == third[:512]
    assert first[512:1024] != third[512:1024]
    assert all(250 <= each < 936 for each in first + second + third)
    assert [ids(each) for each in load_of(tmp_path, MOONCAKE).requests] == [first, second, third]
    assert all(each.ignore_eos for each in load.requests)


def test_a_repetition_and_another_seed_share_as_before_with_other_ids(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE)
    before = [ids(each) for each in LoadOptions(trace=path).load(1000).requests]
    for load in (LoadOptions(trace=path).load(1000, turn=1), LoadOptions(trace=path, seed=1).load(1000)):
        first, second, third = map(ids, load.requests)
        assert first[:513] == second
        assert first[:512] == third[:512]
        assert sum(one == other for one, other in zip(first, before[0], strict=True)) < 20  # by chance, of 1024


def test_prompts_of_a_long_trace_take_no_memory_before_they_are_sent(tmp_path: Path) -> None:
    lines = [{"timestamp": place, "input_length": 10**6, "output_length": 1, "hash_ids": []} for place in range(500)]
    load = load_of(tmp_path, "\n".join(map(json.dumps, lines)))
    assert len(load.requests) == 500
    assert all(isinstance(each.prompt, BlockPrompt) for each in load.requests)


def test_bailian_s_times_are_seconds_and_its_blocks_small(tmp_path: Path) -> None:
    lines = [
        {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 40, "output_length": 2, "turn": 1,
         "type": "text", "hash_ids": [5, 6, 7]},
        {"chat_id": 2, "parent_chat_id": 1, "timestamp": 62.0, "input_length": 33, "output_length": 4, "turn": 2,
         "type": "text", "hash_ids": [5, 6, 9]},
    ]  # fmt: skip
    load = load_of(tmp_path, "\n".join(map(json.dumps, lines)))
    assert load.times_s() == [0.0, 0.5]
    first, second = map(ids, load.requests)
    assert first[:32] == second[:32]
    assert first[32] != second[32] or first[32:40] != second[32:]


AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = AZURE.replace("6805900", "680590+00:00").replace("9951690", "995169+00:00")
BURST_GPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,230,1317,API log
"""


@pytest.mark.parametrize(
    ("text", "times_s", "lengths"),
    [
        (AZURE, [0.0, 4.314579], [(374, 44), (396, 109)]),
        (AZURE_2024, [0.0, 4.314579], [(374, 44), (396, 109)]),
        (BURST_GPT, [0.0, 40.5], [(472, 18), (1087, 230)]),
    ],
)
def test_public_csv_traces(tmp_path: Path, text: str, times_s: list[float], lengths: list[tuple[int, int]]) -> None:
    load = load_of(tmp_path, text, "trace.csv")
    assert load.times_s() == pytest.approx(times_s, abs=1e-5)
    assert [(len(ids(each)), each.max_tokens) for each in load.requests] == lengths


def test_what_was_planned_for_can_be_sent(tmp_path: Path) -> None:
    """Both read the same file, and share the same prefixes."""
    text = """\
{"arrival_s": 0.35, "prompt_tokens": 812, "output_tokens": 120, "max_tokens": 200}
{"arrival_s": 0.41, "prompt_tokens": 930, "output_tokens": 64, "prefix_id": "support", "prefix_tokens": 700}
{"arrival_s": 0.45, "prompt_tokens": 800, "output_tokens": 6, "prefix_id": "support", "prefix_tokens": 600}
"""
    load = load_of(tmp_path, text)
    planned = of_plans.read_trace(tmp_path / "trace.jsonl").requests
    assert [len(each.prompt_ids(place)) for place, each in enumerate(planned)] == [
        len(ids(each)) for each in load.requests
    ]
    assert [each.num_output for each in planned] == [each.max_tokens for each in load.requests]
    _, second, third = map(ids, load.requests)
    assert second[:600] == third[:600]
    assert second[600:610] != third[600:610]


def test_a_trace_can_be_faster_and_shorter(tmp_path: Path) -> None:
    load = load_of(tmp_path, MOONCAKE, requests=2, trace_speed=4.0)
    assert load.times_s() == [0.0, 0.5]
    assert str(load.arrivals) == "as traced over 0.5 s at 4 times the speed"
    assert LoadOptions(trace=written(tmp_path, MOONCAKE)).given().keys() == {"trace", "seed", "temperature"}


async def test_a_trace_is_replayed_with_whose_its_requests_are(redis_url: str, tmp_path: Path) -> None:
    text = """\
{"timestamp": 0, "input_length": 30, "output_length": 4, "tenant": "acme", "priority": 3, "affinity": "a"}
{"timestamp": 20, "input_length": 31, "output_length": 5, "hash_ids": ["x1"]}
"""
    load = load_of(tmp_path, text, trace_speed=2.0)
    assert [each.whose() for each in load.requests] == [{"tenant": "acme", "priority": 3, "affinity": "a"}, {}]
    engine = FakeEngine()
    async with running_worker(redis_url, engine):
        recorder = await run_on_service(redis_url, "q", load)
    run = Summary.of(recorder)
    assert (run.num_failed, run.prompt_tokens, run.output_tokens) == (0, 61, 9)
    assert recorder.timelines[1].arrival_s - recorder.timelines[0].arrival_s == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2: not JSON: 'nonsense'"),
        ("[3]", r"line 2: not a JSON object: \[3\]"),
        ('{"timestamp": 1, "output_length": 2}', "line 2: prompt_tokens is missing"),
        ('{"timestamp": 1, "input_length": 5}', "line 2: output_tokens is missing"),
        ('{"input_length": 5, "output_length": 2}', "line 2: timestamp is missing"),
        ('{"timestamp": 1, "arrival_s": 1, "input_length": 5, "output_length": 2}', "both give its arrival time"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 2}', "timestamp must be a number from 0, not -1"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 2}', "prompt_tokens must be .* from 1 to .*, not 0"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 2.5}', "output_tokens must be .*, not 2.5"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 2, "delay": 3}', "line 2: unknown field 'delay'"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 2, "hash_ids": [1, 2]}', "2 blocks of 512 tokens"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 2, "hash_ids": [[]]}', r"hash_ids must .* not \[\[\]\]"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 2, "prefix_id": "a"}', "need each other"),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": 2, "prefix_id": "a", "prefix_tokens": 6}',
            "at most .* 5",
        ),
        ('{"timestamp": 1, "input_length": 5, "output_length": 2, "priority": 2000}', "priority must .* not 2000"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 2, "tenant": "a b"}', "tenant must .* not 'a b'"),
    ],
)
def test_a_wrong_line_is_named_with_its_file_and_value(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ImpossibleLoad, match=message) as refused:
        load_of(tmp_path, '{"timestamp": 0, "input_length": 5, "output_length": 2}\n' + line)
    assert str(refused.value).startswith(f"--trace {tmp_path / 'trace.jsonl'}, line 2: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE.replace("2023-11-16 18:15:50.9951690", "yesterday"), "line 3: TIMESTAMP must .* not 'yesterday'"),
        (AZURE.replace(",109", ""), "line 3: 2 values, not 3"),
        (AZURE.replace(",109", ",many"), "line 3: output_tokens must be .*, not 'many'"),
        ("a,b\n1,2\n", "line 2: unknown field 'a'"),
        ("", "holds 0 requests, fewer than the 1"),
    ],
)
def test_a_wrong_line_of_a_csv_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ImpossibleLoad, match=message):
        load_of(tmp_path, text, "trace.csv")


def test_a_request_that_never_fits_is_named_by_its_line(tmp_path: Path) -> None:
    load = load_of(tmp_path, MOONCAKE)
    load.check_fits(1120)
    with pytest.raises(
        ImpossibleLoad, match="line 1: 1100 prompt tokens and 20 output tokens never fit max_model_len 1119"
    ):
        load.check_fits(1119)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 3.0}, "--rate 3.0 has no effect with --trace .*, which gives it itself"),
        ({"arrivals": "poisson", "rate": 3.0}, "--rate 3.0 has no effect with --trace"),
        ({"arrivals": "closed", "concurrency": 3}, "--concurrency 3 has no effect with --trace"),
        ({"dataset": "shared-prefix"}, "--dataset shared-prefix has no effect with --trace"),
        ({"output_length": "3"}, "--output-length 3 has no effect with --trace"),
        ({"trace_speed": 0.0}, "--trace-speed must be above 0, not 0"),
        ({"trace_block": 0}, "--trace-block must be 1 or more, not 0"),
        ({"requests": 4}, "holds 3 requests, fewer than the 4"),
    ],
)
def test_options_that_a_trace_says_itself_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ImpossibleLoad, match=message):
        load_of(tmp_path, MOONCAKE, **options)


def test_a_trace_s_options_need_a_trace_and_that_a_file() -> None:
    with pytest.raises(ImpossibleLoad, match="--trace-speed 2 has no effect without --trace"):
        LoadOptions(trace_speed=2.0)
    with pytest.raises(ImpossibleLoad, match=r"--trace nowhere\.jsonl is not a file"):
        LoadOptions(trace="nowhere.jsonl")
