"""A later start loads an engine's steps: it traces nothing, computes the same, and trusts only files of its own."""

from __future__ import annotations

import logging
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from penstock.engine import kept_files
from penstock.engine.execution import compilation, kept_keys, kept_steps
from penstock.engine.execution.compilation import no_kept_compilations
from penstock.engine.execution.kept_steps import KeptSteps
from penstock.engine.execution.steps import Step
from tests.engine.loading.harms import HARMS
from tests.engine.second_starts import config_in, start
from tests.engine.sharding.devices import said_by

pytestmark = pytest.mark.versions

NUM_STEPS = 1 + 1 + 1 + 1 + 1  # of SMALL with loops: backbone, head, head with all options, filling a slot, loop


@dataclass
class OneStep:
    """Stands in for Steps: counts what it compiles."""

    structure: str = "model"
    compiled: int = 0
    devices: list[jax.Device] = field(default_factory=lambda: jax.devices()[:1])

    def compile(self, step: Step, lowered: jax.stages.Lowered | None = None) -> jax.stages.Compiled:
        self.compiled += 1
        return (lowered or step.lower()).compile()


def step_of(name: str = "double", shape: tuple[int, ...] = (4,), dtype: str = "float32") -> Step:
    return Step(name, jax.jit(lambda x: (2 * x, {"sum": x.sum()})), (jnp.ones(shape, dtype),))


def compilations(folder: Path | None, step: Step | None = None, steps: Any = None, facts: object = "facts") -> int:
    """Returns how often a start had to compile a step, which then computes what it should."""
    step, steps = step or step_of(), steps or OneStep()
    doubled, more = KeptSteps(folder, facts).compiled(steps, step)(*step.arguments)
    assert doubled.tolist() == (2 * step.arguments[0]).tolist()
    assert more["sum"] == step.arguments[0].sum()
    return int(steps.compiled)


def test_a_second_start_traces_nothing_and_draws_the_same(tiny_model: Path, tmp_path: Path) -> None:
    drawn, traced = start(tiny_model, config_in(tmp_path))
    assert {"_compute_hidden", "_sample_rows", "_sample_extended_rows", "_decode", "filled"} <= set(traced)
    assert len(list((tmp_path / "steps").iterdir())) == NUM_STEPS
    assert start(tiny_model, config_in(tmp_path)) == (drawn, [])
    shutil.rmtree(tmp_path / "steps")  # jax's own cache has them still, and XLA does not write what it has loaded
    again, traced = start(tiny_model, config_in(tmp_path))
    assert (again, "_compute_hidden" in traced) == (drawn, True)
    assert start(tiny_model, config_in(tmp_path)) == (drawn, [])
    tmp_path.rename(tmp_path.with_name("moved"))
    assert start(tiny_model, config_in(tmp_path.with_name("moved"))) == (drawn, [])


def test_so_does_one_on_two_of_eight_devices(tiny_model: Path, tmp_path: Path) -> None:
    (drawn, traced), again = said_by("tests.engine.second_starts", str(tiny_model), str(tmp_path), "2")
    assert "_compute_hidden" in traced
    assert again == [drawn, []]


@pytest.mark.parametrize("harm", HARMS)
def test_a_harmed_step_is_passed_over_and_kept_anew(
    harm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, kept_steps.__name__)
    assert [compilations(tmp_path) for _ in range(2)] == [1, 0]
    (file,) = (tmp_path / "steps").iterdir()
    HARMS[harm](file)
    assert [compilations(tmp_path) for _ in range(2)] == [1, 0]
    assert ("kept_step_passed_over" in caplog.text) == (harm != "gone")


@pytest.mark.parametrize("content", [b"", b"no program", None])
def test_a_whole_file_that_holds_something_else_is_passed_over(content: bytes | None, tmp_path: Path) -> None:
    compilations(tmp_path)
    (file,) = (tmp_path / "steps").iterdir()
    if content is None:  # what another step's name would stand for
        compilations(tmp_path, step_of("other"))
        (other,) = {*(tmp_path / "steps").iterdir()} - {file}
        other.replace(file)
    else:
        kept_files.keep(file, file.name.encode() + content)
    assert [compilations(tmp_path) for _ in range(2)] == [1, 0]


def test_everything_that_shapes_a_step_is_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[dict[str, Any]] = [
        {}, {"step": step_of("other")}, {"step": step_of(shape=(5,))}, {"step": step_of(shape=(4, 1))},
        {"step": step_of(dtype="bfloat16")}, {"facts": "others"}, {"steps": OneStep("another model")},
    ]  # fmt: skip
    assert [compilations(tmp_path, **other) for other in others] == [1] * len(others)
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.setenv(name, "--xla_other=1")
        assert [compilations(tmp_path) for _ in range(2)] == [1, 0]
    for name in ("_software", "processor_name", "vector_features", "num_processors"):
        monkeypatch.setattr(kept_keys, name, lambda: "another")
        assert [compilations(tmp_path) for _ in range(2)] == [1, 0]
    with jax.numpy_dtype_promotion("strict"), no_kept_compilations():
        assert compilations(tmp_path) == 1
    assert compilations(None) == 1


def test_a_folder_that_takes_nothing_costs_the_next_start_its_time(tmp_path: Path) -> None:
    (tmp_path / "steps").write_text("no folder")
    assert [compilations(tmp_path) for _ in range(2)] == [1, 1]


def test_a_program_that_cannot_be_written_is_compiled_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, kept_steps.__name__)

    def refuse(*_: object) -> None:
        raise ValueError("Compilation does not support serialization")

    monkeypatch.setattr(kept_steps, "_serialized", refuse)
    assert [compilations(tmp_path) for _ in range(2)] == [1, 1]
    assert "step_not_kept: double: ValueError" in caplog.text


def test_what_another_cache_had_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA would write it without its functions."""
    compilations(None)

    def get(cache: Any, key: str) -> bytes | None:
        return kept_files.recall(cache._path / f"{key}-program")

    monkeypatch.setattr(compilation._CheckedCache, "get", get)
    assert [compilations(tmp_path) for _ in range(3)] == [1, 1, 1]


def test_what_the_process_had_compiled_before_is_not_kept(tmp_path: Path) -> None:
    """It may have been loaded: jax says nothing where its memory has the program of a function."""
    step = step_of()
    assert [compilations(tmp_path / name, step) for name in ("a", "b", "c", "a")] == [1, 1, 1, 0]
    assert [compilations(tmp_path / "b", step_of()) for _ in range(2)] == [1, 0]


def test_steps_that_nobody_loads_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compilations(tmp_path, step_of("first"))
    (first,) = (tmp_path / "steps").iterdir()
    compilations(tmp_path, step_of("second"))
    (second,) = {*(tmp_path / "steps").iterdir()} - {first}
    for age_s, file in enumerate((second, first), 1000):  # a file system's clock ticks seldom
        os.utime(file, (time.time() - age_s,) * 2)
    compilations(tmp_path, step_of("first"))  # now the one that was used last
    assert first.stat().st_mtime_ns > second.stat().st_mtime_ns
    monkeypatch.setattr(kept_steps, "_MAX_BYTES", int(2.5 * first.stat().st_size))
    compilations(tmp_path, step_of("third"))
    assert first.exists()
    assert not second.exists()
    assert len(list((tmp_path / "steps").iterdir())) == 2
