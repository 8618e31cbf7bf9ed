"""Plans count attention by its schedule, and say what others reached of the same bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.deployment.deployment import Deployment, deploy
from penstock.engine.models import ModelConfig
from penstock.tools.plan import PUBLISHED, has_libtpu, preset
from penstock.tools.plan.device.attention_schedule import AttentionSchedule
from penstock.tools.plan.device.chips import Chip
from penstock.tools.plan.device.hlo import Traffic
from penstock.tools.plan.device.published import Published, expected_s
from penstock.tools.plan.device.roofline import decode_step
from penstock.tools.plan.device.topology import chip_of, devices_of
from penstock.tools.plan.models import planned_model
from penstock.tools.plan.presets import PRESETS
from penstock.tools.plan.schedules import table
from penstock.tools.plan.schedules.table import Row

needs_libtpu = pytest.mark.skipif(not has_libtpu(), reason="libtpu is not installed: it is for Linux on x86-64")
QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}


def model_of(row: Published, folder: Path) -> ModelConfig:
    if row.model != "Qwen3-8B":
        return planned_model(row.model, weights=row.weights)
    path = folder / "config.json"
    path.write_text(json.dumps({**PRESETS["Qwen3-32B"], **QWEN3_8B, "architectures": ["Qwen3ForCausalLM"]}))
    return planned_model(str(path))


def deployed(model: ModelConfig, topology: str, tensor: int, kv_dtype: str = "auto") -> tuple[Deployment, Chip]:
    config = EngineConfig(tensor_parallel=tensor, kv_cache_dtype=kv_dtype, max_num_seqs=320, max_model_len=2048)
    return deploy(config, model, devices_of(topology)), chip_of(topology)


@needs_libtpu
@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.model}-{row.topology}-{row.batch}")
def test_published_times_are_the_shares_of_our_bound_that_they_are_said_to_be(row: Published, tmp_path: Path) -> None:
    of_row = deployed(model_of(row, tmp_path), row.topology, row.tensor, row.kv_dtype)
    step = decode_step(*of_row, row.batch, row.context, Traffic(), Traffic())
    assert step.bound_s / row.token_s == pytest.approx(row.share, abs=0.006)
    low, high = expected_s(step.bound_s)
    assert low * 0.97 <= row.token_s <= high * 1.03


def test_points_between_those_of_the_table_are_interpolated() -> None:
    row = Row("0", "v6e", "decode attention", {"heads": 8}, 1, 0, 0, 0, 0, {"100": 1000, "200": 2000, "400": 2400})
    assert [row.at(point) for point in (1, 100, 150, 200, 300, 400, 500)] == [
        1000, 1000, 1500, 2000, 2200, 2400, 2600,
    ]  # fmt: skip
    assert table.found("0", "v6e", "decode attention", {"heads": 8}, [row]) is row
    assert table.found("0", "v6e", "decode attention", {"heads": 4}, [row]) is None
    assert table.found("1", "v6e", "decode attention", {"heads": 8}, [row]) is None


def test_a_row_that_is_read_again_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    old, new = (Row("0", "v6e", "draw", {"rows": 8}, 1, 0, 0, 0, 0, {"greedy": cycles}) for cycles in (7, 5))
    other = Row("1", "v6e", "draw", {"rows": 8}, 1, 0, 0, 0, 0, {"greedy": 6})
    for rows in ([old, other], [new]):
        table.keep(rows, path)
    assert table.rows(path) == [new, other]


def test_no_kernel_of_the_table_takes_no_cycles() -> None:
    assert all(cycles > 0 for row in table.rows() for cycles in row.cycles.values())


@needs_libtpu
def test_attention_counts_by_its_schedule_if_its_geometry_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    llama, gemma = preset("Llama-3.1-8B"), preset("Gemma-3-27B")
    assert llama is not None
    assert gemma is not None
    deployment, chip = deployed(llama, "v6e:2x2", 4)
    geometry = {"heads": 8, "kv_heads": 2, "head_dim": 128, "kv": "bfloat16"}
    points = {"decode attention": {"1000": 2000.0}, "prefill attention": {"0": 30_000.0, "512": 60_000.0}}
    rows = [Row("9", "v6e", kind, geometry, 1, 0, 0, 0, 0, cycles) for kind, cycles in points.items()]
    monkeypatch.setattr(table, "_shipped", lambda: tuple(rows))
    monkeypatch.setattr("penstock.tools.plan.device.attention_schedule.version", lambda _: "9")
    known = AttentionSchedule(deployment, chip)
    assert known.cycles([(1000, 1)] * 3) == 32 * 3 * 2000
    assert known.cycles([(0, 768), (1000, 1)]) == 32 * (30_000 + 60_000 / 2 + 2000)

    printed = Traffic(read_bytes=1, cycles=1)
    step = decode_step(deployment, chip, 128, 1000, printed, printed)
    assert step.has_schedule
    assert step.time.kernels_s == pytest.approx(128 * 32 * 2000 / chip.clock_hz)  # longer than its bytes
    assert step.expected_s[0] >= step.seconds >= step.bound_s

    for other in (deployed(gemma, "v6e:2x2", 4), deployed(llama, "v6e:2x2", 2)):  # windows; other shares
        assert AttentionSchedule(*other).cycles([(1000, 1)]) is None
        assert not decode_step(*other, 8, 1000, printed, printed).has_schedule
