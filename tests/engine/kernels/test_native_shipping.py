"""The best prebuilt kernels that the processor can run are loaded, without a compiler."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engine import processors
from penstock.engine.kernels.cpu import compilation, shipping
from penstock.engine.kernels.cpu.compilation import NativeUnavailableError
from penstock.engine.kernels.cpu.library import load_library
from penstock.engine.kernels.cpu.shipping import TARGETS, build_all, shipped_library
from tests.support.packages import ROOT

V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
FEATURES = {  # in /proc/cpuinfo
    "avx512-bf16": f"{V4} avx512_vnni avx512vbmi avx512_bf16",
    "avx512-vnni": f"{V4} avx512_vnni",
    "avx512": f"{V4} avx512_bf16",
    "avx-vnni": f"{V3} avx_vnni",
    "avx2": V3,
    "x86-64": "sse2 avx",
}


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all libraries for x86-64, from a compiler that records its flags."""
    compiler = tmp_path / "bin/c++"
    compiler.parent.mkdir()
    compiler.write_text('#!/bin/sh\nfor last; do :; done; echo "$@" > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/usr/bin:/bin")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    folder = tmp_path / "shipped"
    assert [path.name.rsplit("-", 1)[0] for path in build_all(folder)] == [
        f"kernels-{target.name}" for target in TARGETS["x86_64"]
    ]
    monkeypatch.setenv("PATH", "/nowhere")
    return folder


def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: some\nflags\t\t: {features}\n")
    monkeypatch.setattr(processors, "_CPUINFO", tmp_path / "cpuinfo")


@pytest.mark.parametrize("name", FEATURES)
def test_the_best_that_the_processor_runs_is_taken(
    name: str, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor(tmp_path, monkeypatch, FEATURES[name])
    found = shipped_library(shipped)
    assert found is not None
    assert found.name.startswith(f"kernels-{name}-")
    monkeypatch.setattr(shipping, "fingerprint", lambda *_, **__: "of other sources")
    assert shipped_library(shipped) is None


@pytest.mark.parametrize(("running", "is_found"), [((0, 99), True), ((0, 0), False), ((99, 99), False)])
def test_a_library_serves_every_jax_whose_interface_is_as_new(
    running: tuple[int, int], is_found: bool, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor(tmp_path, monkeypatch, "")
    monkeypatch.setattr(shipping, "ffi_version", lambda: running)
    assert (shipped_library(shipped) is not None) == is_found


def test_where_nothing_was_shipped_it_is_built_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(shipping, "SHIPPED_DIR", tmp_path / "shipped")
    assert shipped_library() is None
    with pytest.raises(NativeUnavailableError, match="there is no C\\+\\+ compiler"):
        load_library(tmp_path)
    with pytest.raises(NativeUnavailableError, match="there is no C\\+\\+ compiler"):
        list(build_all(tmp_path))


def test_every_processor_runs_the_last_of_its_machine() -> None:
    assert all(targets[-1].features == frozenset() for targets in TARGETS.values())
    for targets in TARGETS.values():
        for place, target in enumerate(targets):
            assert not any(target.features > earlier.features for earlier in targets[:place])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_what_was_shipped_serves_without_a_compiler(tmp_path: Path) -> None:
    """The library for this processor stands where an installed one would."""
    target = next(t for t in shipping._targets(platform.machine()) if t.features <= shipping._features())
    library = shipping._place(tmp_path, target)
    compilation.compile_library(compilation.find_compiler(), target.flags, library)
    assert ctypes.CDLL(str(library)).PenstockRaggedAttention
    code = f"""
from pathlib import Path
from penstock import LLM
from penstock.engine.kernels.cpu import shipping
shipping.SHIPPED_DIR = Path({str(tmp_path)!r})
with LLM("demo", attention="native", matmul="native", compile_cache_dir=None) as llm:
    print(llm.generate("What is 12 + 30?", temperature=0).text)
"""
    environment = {"PATH": "/nowhere", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert "12 + 30 = 42" in told.stdout
