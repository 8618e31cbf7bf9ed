"""The best prebuilt kernels that the processor can run are loaded, without a compiler."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.engine import processors
from penstock.engine.kernels.cpu import compilation, kind_here, processor_kinds, shipping
from penstock.engine.kernels.cpu.compilation import NativeUnavailableError
from penstock.engine.kernels.cpu.library import load_library
from penstock.engine.kernels.cpu.processor_kinds import TARGETS, kinds_here
from penstock.engine.kernels.cpu.shipping import build_all, shipped_library
from tests.support.packages import ROOT

V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
ICE_LAKE = f"{V4} avx512_vnni avx512vbmi"
SAPPHIRE_RAPIDS = f"{ICE_LAKE} avx512_bf16 amx_tile amx_bf16 amx_int8"
INTEL, AMD = "GenuineIntel", "AuthenticAMD"
PROCESSORS = [  # vendor and features in /proc/cpuinfo, and the name of what is taken
    (INTEL, SAPPHIRE_RAPIDS, "amx"),
    (AMD, f"{ICE_LAKE} avx512_bf16", "avx512-bf16"),
    (INTEL, f"{ICE_LAKE} avx512_bf16", "avx512-vbmi"),  # where VDPBF16PS is slower than FMA
    (INTEL, f"{V4} avx512_vnni avx512_bf16", "avx512-vnni"),
    (INTEL, f"{V4} avx512_vnni", "avx512-vnni"),
    (AMD, f"{V4} avx512_bf16", "avx512"),
    (INTEL, f"{V3} avx_vnni", "avx-vnni"),
    (AMD, V3, "avx2"),
    (INTEL, "sse2 avx", "x86-64"),
]


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


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def describe(features: str, vendor: str = INTEL, *, may_use_tiles: bool = True) -> None:
        fields = {"processor": "0", "vendor_id": vendor, "model name": "some", "flags": features}
        (tmp_path / "cpuinfo").write_text("".join(f"{name}\t: {value}\n" for name, value in fields.items()))
        monkeypatch.setattr(processors, "_CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(processor_kinds, "may_use_tiles", lambda: may_use_tiles)

    return describe


@pytest.mark.parametrize(("vendor", "features", "name"), PROCESSORS)
def test_the_best_that_the_processor_runs_is_taken(
    vendor: str, features: str, name: str, shipped: Path, processor: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    processor(features, vendor)
    found = shipped_library(shipped)
    assert found is not None
    assert found.name.startswith(f"kernels-{name}-")
    monkeypatch.setattr(shipping, "fingerprint", lambda *_, **__: "of other sources")
    assert shipped_library(shipped) is None


def test_tiles_that_the_system_refuses_are_done_without(processor: Callable[..., None], shipped: Path) -> None:
    processor(SAPPHIRE_RAPIDS, may_use_tiles=False)
    found = shipped_library(shipped)
    assert found is not None
    assert found.name.startswith("kernels-avx512-vbmi-")
    assert kind_here() == "avx512-vbmi; this system refuses AMX tiles"


@pytest.mark.parametrize(
    ("knows_tiles", "flags"),
    [(True, "-march=native -DPENSTOCK_TILES=1 -mno-avx512bf16"), (False, "-march=native -mno-avx512bf16")],
)
def test_a_build_here_follows_the_table_as_far_as_the_compiler_knows_it(
    knows_tiles: bool, flags: str, processor: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\n[ "$1" != -c ] || {str(knows_tiles).lower()}\n')
    compiler.chmod(0o755)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    processor(SAPPHIRE_RAPIDS)
    assert " ".join(compilation._native_flags(str(compiler))) == flags
    processor(f"{ICE_LAKE} avx512_bf16", AMD)
    assert compilation._native_flags(str(compiler)) == ("-march=native",)


@pytest.mark.parametrize(("running", "is_found"), [((0, 99), True), ((0, 0), False), ((99, 99), False)])
def test_a_library_serves_every_jax_whose_interface_is_as_new(
    running: tuple[int, int], is_found: bool, shipped: Path, processor: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    processor("")
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
            earlier = [each for each in targets[:place] if not each.vendors]
            assert not any(target.features > each.features for each in earlier)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_what_was_shipped_serves_without_a_compiler(tmp_path: Path) -> None:
    """The library for this processor stands where an installed one would."""
    target = kinds_here()[0]
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
