"""Plans count attention by its schedule, and say what others reached of the same bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.parts.tpu_kernels import KERNELS
from penstock.engine.config import EngineConfig
from penstock.engine.deployment.deployment import Deployment, deploy
from penstock.engine.models import ModelConfig
from penstock.tools.plan import PUBLISHED, preset
from penstock.tools.plan.device.attention_schedule import AttentionSchedule
from penstock.tools.plan.device.chips import Chip
from penstock.tools.plan.device.hlo import Traffic
from penstock.tools.plan.device.kernel_work import Basis
from penstock.tools.plan.device.published import Published, expected_s
from penstock.tools.plan.device.roofline import decode_step
from penstock.tools.plan.device.topology import chip_of, devices_of
from penstock.tools.plan.models import planned_model
from penstock.tools.plan.presets import PRESETS
from penstock.tools.plan.schedules import table
from penstock.tools.plan.schedules.scaling import cycles_of
from penstock.tools.plan.schedules.table import Row
from tests.support.needs import needs_libtpu

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
    assert Row("0", "v6e", "draw", {}, 1, 0, 0, 0, 0, {"filtered": 7}).at("filtered") == 7


def test_a_row_that_is_read_again_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    old, new = (Row("0", "v6e", "draw", {"rows": 8}, 1, 0, 0, 0, 0, {"greedy": cycles}) for cycles in (7, 5))
    other = Row("1", "v6e", "draw", {"rows": 8}, 1, 0, 0, 0, 0, {"greedy": 6})
    for rows in ([old, other], [new]):
        table.keep(rows, path)
    assert table.rows(path) == [new, other]


def test_no_kernel_of_the_table_takes_no_cycles() -> None:
    assert all(cycles > 0 for row in table.rows() for cycles in row.cycles.values())


def rows_of(kind: str, *geometries: dict[str, object], **cycles: float) -> list[Row]:
    """Returns rows whose cycles are some multiple of their number, from 1 on."""
    return [
        Row("9", "v6e", kind, of, 1, 0, 0, 0, 0, {point.lstrip("_"): number * count for point, count in cycles.items()})
        for number, of in enumerate(geometries, 1)
    ]


@pytest.fixture
def _libtpu_9(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tools.plan.schedules.scaling.version", lambda _: "9")


WEIGHT = {"form": "mxfp4", "out": 1000}
SCALED: dict[str, tuple[list[dict[str, object]], list[tuple[dict[str, object], float]]]] = {
    # By kind: two geometries with 100 and 200 cycles, and others with what the rule says.
    "decode attention": (
        [
            {"heads": 8, "kv_heads": 2, "head_dim": 128, "kv": "int8"},
            {"heads": 8, "kv_heads": 6, "head_dim": 128, "kv": "int8"},
        ],
        [
            ({"heads": 4, "kv_heads": 4, "head_dim": 128, "kv": "int8"}, 150),
            ({"heads": 2, "kv_heads": 1, "head_dim": 128, "kv": "int8"}, 50),
        ],
    ),
    "prefill attention": (
        [
            {"heads": 8, "kv_heads": 2, "head_dim": 128, "kv": "int8"},
            {"heads": 16, "kv_heads": 2, "head_dim": 128, "kv": "int8"},
        ],
        [({"heads": 32, "kv_heads": 1, "head_dim": 128, "kv": "int8"}, 400)],
    ),
    "quantized matmul": ([{**WEIGHT, "in": 1000}, {**WEIGHT, "in": 3000}], [({**WEIGHT, "in": 1500}, 125)]),
    "experts": ([{**WEIGHT, "in": 1000}, {**WEIGHT, "in": 3000}], [({**WEIGHT, "in": 500}, 50)]),
    "delta rule": (
        [{"key_heads": 4, "value_heads": 8, "head_dim": 128}, {"key_heads": 4, "value_heads": 16, "head_dim": 128}],
        [({"key_heads": 4, "value_heads": 12, "head_dim": 128}, 150)],
    ),
    "draw": (
        [{"rows": 8, "vocab": 1000}, {"rows": 8, "vocab": 3000}],
        [({"rows": 3, "vocab": 2000}, 150), ({"rows": 33, "vocab": 3000}, 1000)],
    ),
    "adjust": ([{"rows": 8, "vocab": 1000}, {"rows": 16, "vocab": 1000}], [({"rows": 12, "vocab": 1000}, 200)]),
}


@pytest.mark.usefixtures("_libtpu_9")
@pytest.mark.parametrize("kind", KERNELS)
def test_geometries_that_are_not_in_the_table_follow_the_size_of_their_work(kind: str) -> None:
    known, others = SCALED[kind]
    rows = rows_of(kind, *known, _1=100.0)
    for cycles, of in zip((100, 200), known, strict=True):
        found = cycles_of("v6e", kind, of, rows)
        assert found is not None
        assert (found.at("1"), found.is_exact) == (cycles, True)
    for of, expected in others:
        found = cycles_of("v6e", kind, of, rows)
        assert found is not None
        assert (found.at("1"), found.is_exact) == (expected, False)
        assert cycles_of("v5e", kind, of, rows) is None
        for name in ("form", "kv", "head_dim"):
            if name in of:
                assert cycles_of("v6e", kind, {**of, name: 0}, rows) is None


@needs_libtpu
@pytest.mark.usefixtures("_libtpu_9")
def test_attention_counts_by_its_schedule_or_by_that_of_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    llama, gemma, oss = preset("Llama-3.1-8B"), preset("Gemma-3-27B"), preset("gpt-oss-20b")
    assert llama is not None
    assert gemma is not None
    assert oss is not None
    deployment, chip = deployed(llama, "v6e:2x2", 4)
    geometry = {"heads": 8, "kv_heads": 2, "head_dim": 128, "kv": "bfloat16"}
    rows = rows_of("decode attention", geometry, _65=130.0, _1000=2000.0)
    rows += rows_of("prefill attention", geometry, _0=30_000.0, _512=60_000.0)
    monkeypatch.setattr(table, "shipped", lambda: tuple(rows))
    known = AttentionSchedule(deployment, chip)
    assert known.work([(1000, 1)] * 3, 0, 0).cycles == 32 * 3 * 2000
    assert known.work([(0, 768), (1000, 1)], 0, 0).cycles == 32 * (30_000 + 60_000 / 2 + 2000)

    printed = Traffic(read_bytes=1, cycles=1)
    step = decode_step(deployment, chip, 128, 1000, printed, printed)
    assert [(kernel.name, kernel.basis) for kernel in step.kernels] == [("attention", Basis.SCHEDULE)]
    assert step.time.kernels_s == pytest.approx(128 * 32 * 2000 / chip.clock_hz)  # longer than its bytes
    assert step.expected_s[0] >= step.seconds >= step.bound_s

    windows = AttentionSchedule(*deployed(gemma, "v6e:2x2", 4)).work([(8000, 1)], 0, 0)
    full = 4 / 2 * (2000 + 7000 * (2000 - 130) / 935)
    seen = 4 / 2 * (2000 + 24 * (2000 - 130) / 935)  # windows of 1,024 keys
    assert windows.cycles == pytest.approx(10 * full + 52 * seen)
    assert windows.basis is Basis.SCALED
    unknown = AttentionSchedule(*deployed(oss, "v6e:2x2", 1)).work([(1000, 1)], 0, 0)  # head_dim 64
    assert (unknown.cycles, unknown.basis) == (0, Basis.NONE)
