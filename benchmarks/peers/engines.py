"""The engines that can take part, and the process of each."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.checkpoints import gguf_file, w8a8
from benchmarks.peers.protocol import KV_CACHE_GIB, Setup
from penstock.tools.bench.presets import preset_root

ROOT = Path(__file__).parents[2]
CORES = sorted(os.sched_getaffinity(0))
# Keeps the engines off the network, vLLM in one process, and each on all cores: by default, vLLM serves with fewer
# threads than there are cores.
ENVIRONMENT = {
    "OMP_NUM_THREADS": str(len(CORES)), "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, CORES)),
    "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
}  # fmt: skip


class PeerFailed(Exception):
    """An adapter ended; its log says why."""


@dataclass(frozen=True, slots=True)
class Kind:
    """An engine at one precision."""

    adapter: str  # a module in this folder
    environment: str | None  # a folder in $PEERS_HOME; None: this interpreter
    is_int8: bool = False
    checkpoint: Callable[[Path, str], Path] | None = None  # made from the preset and its dtype; None: the preset itself


PENSTOCK = "penstock"
SET = "penstock set"
"""Penstock with the options of the command line, beside the one without."""

REFERENCE = "reference"
KINDS = {
    PENSTOCK: Kind("penstock_engine", None),
    SET: Kind("penstock_engine", None),
    REFERENCE: Kind("reference", "transformers"),
    "transformers": Kind("transformers_batching", "transformers"),
    "vllm": Kind("vllm_cpu", "vllm"),
    "vllm-int8": Kind("vllm_cpu", "vllm", True, lambda model, dtype: w8a8(model)),
    "openvino": Kind("openvino_genai", "openvino"),
    "openvino-int8": Kind("openvino_genai", "openvino", is_int8=True),
    "llamacpp": Kind("llamacpp", "llamacpp", False, gguf_file),
    "llamacpp-int8": Kind("llamacpp", "llamacpp", True, lambda model, dtype: gguf_file(model, "int8")),
}
PEERS = [name for name in KINDS if name not in (PENSTOCK, SET, REFERENCE)]


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    version: str
    process: subprocess.Popen[str]
    log: Path

    def run(self, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns tokens and their times, for each request."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(wanted) + "\n")
        self.process.stdin.flush()
        found: list[dict[str, Any]] = read_line(self.process, self.name, self.log)
        return found


def python_of(name: str) -> str:
    """Returns the interpreter that has this engine.

    Raises:
        PeerFailed: there is none.
    """
    environment = KINDS[name].environment
    if environment is None:
        return sys.executable
    home = os.environ.get("PEERS_HOME")
    own = None if home is None else Path(home).expanduser() / environment / "bin" / "python"
    if own is not None and own.exists():
        return str(own.absolute())
    if environment == "transformers" and importlib.util.find_spec("torch") is not None:
        return sys.executable
    where = "PEERS_HOME is not set" if own is None else f"there is no {own}"
    raise PeerFailed(f"{name} is left out: {where}")


@contextlib.contextmanager
def started(name: str, setup: Setup) -> Iterator[Peer]:
    """Starts an adapter that loads the model.

    Raises:
        PeerFailed: it did not load the model, or its engine is not installed.
    """
    kind, python = KINDS[name], python_of(name)
    setup = dataclasses.replace(setup, model=str(converted(kind, setup)), is_int8=kind.is_int8)
    log = preset_root() / f"{name.replace(' ', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as errors:
        process = subprocess.Popen(
            [python, "-m", f"benchmarks.peers.{kind.adapter}", json.dumps(dataclasses.asdict(setup))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
            env={**ENVIRONMENT, **os.environ},
        )  # fmt: skip
    try:
        yield Peer(name, read_line(process, name, log)["version"], process, log)
    finally:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def converted(kind: Kind, setup: Setup) -> Path:
    """Returns what an engine of this kind loads; a file is in the engine's own format already."""
    model = Path(setup.model)
    return model if kind.checkpoint is None or model.is_file() else kind.checkpoint(model, setup.dtype)


def read_line(process: subprocess.Popen[str], name: str, log: Path) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        last = " | ".join(log.read_text(errors="replace").splitlines()[-3:])
        raise PeerFailed(f"{name} ended with status {process.wait()} (log: {log}): {last}")
    return json.loads(line)
