from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.cli import run
from penstock.cli.shared.simulated import show_simulated
from penstock.local.console import console
from penstock.tools.plan import Simulated
from penstock.tools.plan.simulation import Figures, Percentiles
from tests.support.needs import needs_libtpu

TINY = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 1024,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
}  # fmt: skip
SMALL = ["--max-num-seqs", "16", "--max-batch-tokens", "16"]


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def test_an_unknown_chip_and_an_unknown_model_are_named(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", tiny, "--topology", "a100:8", "--tensor", "1"]) == 1
    assert "'a100:8' names no known chip (v5e, v6e, tpu7x)" in capsys.readouterr().err
    assert run(["plan", "--model", "gpt-5", "--topology", "v5e:2x2", "--tensor", "1"]) == 1
    assert "'gpt-5' is not a preset" in capsys.readouterr().err


def test_a_hostile_config_is_refused(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(tiny).write_text(json.dumps({**TINY, "rope_theta": float("nan")}))
    assert run(["plan", "--model", tiny, "--topology", "v5e:2x2", "--tensor", "1"]) == 1
    assert "rope_theta must be a number above 0, not nan" in capsys.readouterr().err
    Path(tiny).unlink()
    os.mkfifo(tiny)
    assert run(["plan", "--model", tiny, "--topology", "v5e:2x2", "--tensor", "1"]) == 1
    assert "is a FIFO" in capsys.readouterr().err


def test_slices_mean_nothing_without_a_trace(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", tiny, "--topology", "v5e:2x2", "--slices", "2"]) == 2
    assert "--slices 2 is for --trace" in capsys.readouterr().err


def test_without_a_model_it_is_wrong_usage(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_MODEL", raising=False)
    assert run(["plan", "--topology", "v5e:2x2"]) == 2
    assert "no model is set" in capsys.readouterr().err


def test_without_libtpu_it_says_what_to_install(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tools.plan.device.topology.has_libtpu", lambda: False)
    assert run(["plan", "--model", tiny, "--topology", "v5e:2x2", *SMALL]) == 1
    assert "needs libtpu, which is not installed here (no TPU is needed): pip install" in capsys.readouterr().err


def test_a_trace_that_is_wrong_or_too_long_is_refused_before_anything_is_compiled(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tools.plan.device.topology.has_libtpu", lambda: False)
    trace = tmp_path / "trace.jsonl"
    arguments = ["plan", "--model", tiny, "--topology", "v5e:2x2", *SMALL, "--trace", str(trace)]
    trace.write_text('{"arrival_s": 0, "prompt_tokens": 10, "output_tokens": -3}\n')
    assert run(arguments) == 1
    assert "line 1: output_tokens must be a whole number" in " ".join(capsys.readouterr().err.split())
    trace.write_text('\n{"arrival_s": 0, "prompt_tokens": 2000, "output_tokens": 49}\n')
    assert run(arguments) == 1
    refusal = "line 2: 2000 prompt tokens and 49 output tokens never fit max_model_len 2048"
    assert refusal in " ".join(capsys.readouterr().err.split())


@needs_libtpu
def test_a_plan_is_printed_as_json(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--kv-cache-dtype", "float8_e4m3fn", "--decode-steps", "2"]
    assert run(["plan", "--model", tiny, "--topology", "v5e:2x2", "--tensor", "4", "--json", *SMALL, *more]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "trace" not in document
    assert document["attention"] == "fused"
    assert document["pages"]["aliased_and_never_copied"] is True
    assert document["pages"]["dtype"] == "float8_e4m3fn"
    assert {bucket["kind"] for bucket in document["buckets"]} == {"backbone", "head", "head, all options", "loop"}
    assert "attention" in document["kernels"]["bytes and FLOPs alone"]  # the table has no head_dim of 256
    assert "draw_tokens" in {name for names in document["kernels"].values() for name in names}
    assert document["hidden_links"] == {"backbone of 16": None, "loop of 16": None}


@needs_libtpu
def test_slices_are_simulated_over_a_trace(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There are two slices with two copies of the model each; a prompt of 40 takes three steps of 16."""
    trace = tmp_path / "trace.jsonl"
    one = {"arrival_s": 0, "prompt_tokens": 40, "output_tokens": 5}
    trace.write_text("".join(json.dumps({**one, "arrival_s": i / 1e5}) + "\n" for i in range(6)))
    options = ["--tensor", "2", *SMALL, "--trace", str(trace), "--slices", "2", "--json"]
    assert run(["plan", "--model", tiny, "--topology", "v5e:2x2", *options]) == 0
    found = json.loads(capsys.readouterr().out)["trace"]
    assert (found["total"]["requests"], found["total"]["output_tokens"]) == (6, 30)
    assert [replica["requests"] for replica in found["replicas"]] == [2, 2, 1, 1]
    assert 0 < found["total"]["itl_s"]["p50"] < found["total"]["ttft_s"]["p50"] < found["seconds"]
    assert "None was measured" in found["step_times"]


def test_what_was_simulated_is_shown_in_all_and_for_each_replica(capsys: pytest.CaptureFixture[str]) -> None:
    ms = Percentiles(0.0125, 0.25, 1.5)
    one = Figures(3, 3000, 700, 1500, 150.4, ms, ms, 0.875, 400, 3.75, 2)
    show_simulated(console(), Simulated(10.0, 7, one, (one, one)), "[trace].jsonl")
    printed = " ".join(capsys.readouterr().out.split())
    assert "[trace].jsonl: served in 10.0 s; at most 7 waited at once for a replica with room." in printed
    row = "3 │ 3,000 │ 700 │ 150 │ 12.5 │ 250.0 │ 1,500.0 │ 12.50 │ 1,500.00 │ 3.8 │ 88% │ 2"
    for name in ("total", "replica 1", "replica 2"):
        assert f"{name} │ {row}" in printed
    assert "None was measured, and real steps may be slower" in printed
