"""Traces are read line by line; an error names its line and value."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.errors import ConfigError
from penstock.tools.plan.traces import Trace, TracedRequest, read_trace

PLAIN: dict[str, Any] = {"arrival_s": 0.5, "prompt_tokens": 20, "output_tokens": 8}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_requests_are_in_the_order_in_which_they_come(tmp_path: Path) -> None:
    late = {**PLAIN, "arrival_s": 3, "max_tokens": 100}
    trace = read_trace(written(tmp_path / "trace.jsonl", late, "", PLAIN))
    assert trace.requests == (TracedRequest(0.5, 20, 8, 8, line=3), TracedRequest(3.0, 20, 8, 100, line=1))


def test_prompts_of_one_prefix_begin_alike_and_go_on_differently(tmp_path: Path) -> None:
    shared = {**PLAIN, "prefix_id": "a", "prefix_tokens": 12}
    lines = [shared, {**shared, "prefix_tokens": 5}, {**shared, "prefix_id": "b"}, PLAIN]
    requests = read_trace(written(tmp_path / "trace.jsonl", *lines)).requests
    first, second, other, alone = (request.prompt_ids(number) for number, request in enumerate(requests))
    assert [len(ids) for ids in (first, second, other, alone)] == [20] * 4
    assert first[:5] == second[:5]
    assert first[12:] != second[12:]
    assert not set(first) & set(other)
    assert not set(alone) & (set(first) | set(second) | set(other))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON: '{'"),
        ("[" * 100_000, "not JSON: "),
        ([1], r"not a JSON object: \[1\]"),
        ({"arrival_s": 1, "prompt_tokens": 2}, "output_tokens is missing"),
        ({**PLAIN, "arival_s": 1}, "unknown field 'arival_s'; there are arrival_s, prompt_tokens"),
        ({**PLAIN, "arrival_s": -1}, "arrival_s must be a number from 0 to 1e.09, not -1"),
        ({**PLAIN, "arrival_s": float("nan")}, "arrival_s .* not nan"),
        ({**PLAIN, "arrival_s": 10**400}, "arrival_s .* not 1000"),
        ({**PLAIN, "arrival_s": "0"}, "arrival_s .* not '0'"),
        ({**PLAIN, "prompt_tokens": 0}, "prompt_tokens must be a whole number from 1 to 16777216, not 0"),
        ({**PLAIN, "prompt_tokens": True}, "prompt_tokens .* not True"),
        ({**PLAIN, "output_tokens": 2.5}, "output_tokens .* not 2.5"),
        ({**PLAIN, "output_tokens": 2**40}, "output_tokens .* not 1099511627776"),
        ({**PLAIN, "max_tokens": 7}, "max_tokens must be a whole number from 8 to 16777216, not 7"),
        ({**PLAIN, "prefix_tokens": 7}, "prefix_tokens 7 needs both"),
        ({**PLAIN, "prefix_id": "a"}, "prefix_id 'a' needs both"),
        ({**PLAIN, "prefix_id": 3, "prefix_tokens": 7}, "prefix_id must be a text that is not empty, not 3"),
        ({**PLAIN, "prefix_id": "a", "prefix_tokens": 21}, "prefix_tokens .* from 1 to 20, not 21"),
    ],
    ids=str,
)
def test_a_line_that_is_not_understood_is_named(tmp_path: Path, line: Any, complaint: str) -> None:
    path = written(tmp_path / "trace.jsonl", PLAIN, line)
    with pytest.raises(ConfigError, match=f"--trace .*trace.jsonl, line 2: {complaint}") as raised:
        read_trace(path)
    assert len(str(raised.value)) < 600


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with pytest.raises(ConfigError, match=r"trace.jsonl is not a file"):
        read_trace(path)
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"trace.jsonl is not a file"):
        read_trace(path)
    path.unlink()
    path.write_text("\n \n")
    with pytest.raises(ConfigError, match=r"trace.jsonl holds no requests"):
        read_trace(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"trace.jsonl cannot be read"):
        read_trace(path)


def test_a_request_that_never_fits_is_refused_with_its_line() -> None:
    trace = Trace((TracedRequest(0.0, 60, 4, 4, line=1), TracedRequest(0.0, 60, 5, 900, line=7)), "--trace x")
    trace.check(65)
    with pytest.raises(ConfigError, match=r"--trace x, line 7: 60 prompt tokens and 5 output tokens never fit .* 64"):
        trace.check(64)
