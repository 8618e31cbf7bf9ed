from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.engine.planning import has_libtpu
from penstock.worker.cli import run

TINY = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 1024,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
}  # fmt: skip
SMALL = ["--max-num-seqs", "16", "--max-batch-tokens", "16"]

pytestmark = pytest.mark.usefixtures("own_logs")


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def test_an_unknown_chip_and_an_unknown_model_are_named(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", tiny, "--topology", "a100:8", "--tensor", "1"]) == 1
    assert "'a100:8' is of no known chip (v5e, v6e, tpu7x)" in capsys.readouterr().err
    assert run(["plan", "--model", "gpt-5", "--topology", "v5e:2x2", "--tensor", "1"]) == 1
    assert "'gpt-5' is no preset" in capsys.readouterr().err


def test_a_hostile_config_is_refused(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(tiny).write_text(json.dumps({**TINY, "rope_theta": float("nan")}))
    assert run(["plan", "--model", tiny, "--topology", "v5e:2x2", "--tensor", "1"]) == 1
    assert "rope_theta must be a number above 0, not nan" in capsys.readouterr().err
    Path(tiny).unlink()
    os.mkfifo(tiny)
    assert run(["plan", "--model", tiny, "--topology", "v5e:2x2", "--tensor", "1"]) == 1
    assert "is a FIFO" in capsys.readouterr().err


def test_without_a_model_it_is_wrong_usage(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_MODEL", raising=False)
    assert run(["plan", "--topology", "v5e:2x2"]) == 2
    assert "no model is set" in capsys.readouterr().err


def test_without_libtpu_it_says_what_to_install(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.planning.topology.has_libtpu", lambda: False)
    assert run(["plan", "--model", tiny, "--topology", "v5e:2x2", *SMALL]) == 1
    assert "needs libtpu, which is not installed here: pip install" in capsys.readouterr().err


@pytest.mark.skipif(not has_libtpu(), reason="libtpu is not installed: it is for Linux on x86-64")
def test_a_plan_is_printed_as_json(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--kv-cache-dtype", "float8_e4m3fn", "--decode-steps", "2"]
    assert run(["plan", "--model", tiny, "--topology", "v5e:2x2", "--tensor", "4", "--json", *SMALL, *more]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["attention"] == "fused"
    assert document["pages"]["aliased_and_never_copied"] is True
    assert document["pages"]["dtype"] == "float8_e4m3fn"
    assert {bucket["kind"] for bucket in document["buckets"]} == {"backbone", "head", "head, all options", "loop"}
