"""Compilations are counted, kept on disk, and done with the options that a device's compiler knows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from penstock.engine.execution.compilation import CompileWatch, compiled, keep_compilations, printed

pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("as_shipped")]


def lowered_step() -> jax.stages.Lowered:
    return jax.jit(lambda x: x * 2 + 1).lower(jnp.int32(1))


def test_a_watch_counts_from_its_start_on() -> None:
    watch = CompileWatch()
    lowered_step().compile()
    assert watch.count == 0
    watch.start()
    assert watch.count == 0
    lowered_step().compile()
    assert watch.count == 1
    later = CompileWatch()
    later.start()
    lowered_step().compile()
    assert (watch.count, later.count) == (2, 1)


def test_every_compilation_is_kept_however_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(jax.config, "update", found.__setitem__)  # otherwise that of the whole process
    keep_compilations(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert found == {
        "jax_compilation_cache_dir": str(tmp_path / "a" / "b"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_persistent_cache_enable_xla_caches": "none",
    }


def test_a_compiler_that_does_not_know_our_options_compiles_without_them() -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jnp.int32(1))
    device: Any = SimpleNamespace(platform="tpu", device_kind="TPU7x")  # the CPU's compiler refuses its options
    assert compiled(lowered, device)(jnp.int32(1)) == 2


def test_a_compilers_own_failure_is_raised_and_not_tried_again_without_options() -> None:
    class Failing:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def compile(self, compiler_options: Any = None) -> None:
            self.calls.append(compiler_options)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    failing: Any = Failing()
    device: Any = SimpleNamespace(platform="tpu", device_kind="TPU v5e")
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compiled(failing, device)
    assert len(failing.calls) == 1


def test_the_text_of_a_program_is_its_optimised_hlo() -> None:
    lowered = lowered_step()
    compiled = lowered.compile()
    found = printed(lowered, compiled, jax.devices()[0])
    assert found.text.startswith("HloModule")
    assert found.is_as_run

    class Unprintable:
        def as_text(self) -> str:
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED")

    unprintable: Any = Unprintable()
    retried: Any = SimpleNamespace(compile=lambda compiler_options: compiled)
    device: Any = SimpleNamespace(platform="tpu", device_kind="TPU7x")
    assert printed(retried, unprintable, device) == (found.text, False)
