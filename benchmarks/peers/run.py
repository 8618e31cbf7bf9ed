"""Penstock's engine beside other engines: the same checkpoint and requests, in turn, in one run.

    PEERS_HOME=~/peers python -m benchmarks.peers.run --model tiny --dtype float32

An engine takes part if its virtual environment is there: $PEERS_HOME/vllm and $PEERS_HOME/openvino; transformers may be
installed in this one. docs/performance.md says how to make them. All are loaded first, then each round measures one
after the other. Prints a table and appends a line to `benchmarks/results/peers.jsonl`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.engine import RESULTS
from benchmarks.peers.protocol import KV_CACHE_GIB
from benchmarks.tables import table_of
from penstock.worker.bench.arrivals import Arrivals
from penstock.worker.bench.datasets import random_requests
from penstock.worker.bench.presets import GEOMETRIES, preset_dir, preset_root
from penstock.worker.bench.recorder import Recorder, end, note
from penstock.worker.bench.report import append_result
from penstock.worker.bench.summary import Summary

ROOT = Path(__file__).parents[2]
PENSTOCK = "penstock"
ADAPTERS = {
    PENSTOCK: "penstock_engine", "transformers": "transformers_batching", "vllm": "vllm_cpu",
    "openvino": "openvino_genai",
}  # fmt: skip


CORES = sorted(os.sched_getaffinity(0))
BUSY = 1.5  # load per core, of which the engine's own threads are 1
# What keeps them off the network, vLLM in one process, and each on all cores: left to itself, vLLM serves with fewer
# threads than there are cores.
ENVIRONMENT = {
    "OMP_NUM_THREADS": str(len(CORES)), "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, CORES)),
    "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
}  # fmt: skip


class PeerFailed(Exception):
    """An adapter ended; its log says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    version: str
    process: subprocess.Popen[str]
    log: Path

    def run(self, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Tokens and their times, for each request."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(wanted) + "\n")
        self.process.stdin.flush()
        found: list[dict[str, Any]] = read_line(self.process, self.name, self.log)
        return found


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    model = preset_dir(arguments.model, arguments.dtype, preset_root())
    wanted = workload(arguments)
    with contextlib.ExitStack() as stack:
        reference = expected_tokens(model, wanted[: arguments.checked], console)
        peers = []
        for name in [PENSTOCK, *(peer for peer in arguments.peers if peer != PENSTOCK)]:
            python = python_of(name, console)
            if python is not None:
                try:
                    peers.append(stack.enter_context(started(name, python, ADAPTERS[name], model, arguments.dtype)))
                except PeerFailed as error:
                    console.print(f"[yellow]{error}[/]")
        runs = measure(peers, wanted, arguments.rounds)
    rows = [row(peer, runs, reference) for peer in peers if runs[peer.name]]
    title = f"{arguments.model} {arguments.dtype}, {len(wanted)} requests, {arguments.rounds} rounds, medians"
    is_busy = max(run["load"] for name in runs for run in runs[name]) > len(CORES) * BUSY
    if is_busy:
        title += " (busy machine: no ranking)"
        console.print("[yellow]Others used the processor: engines whose threads wait for one another lost most.[/]")
    console.print(table_of(title, rows))
    append_result(RESULTS / "peers.jsonl", {"title": title, "options": vars(arguments), "rows": rows})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(GEOMETRIES), default="tiny")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, help="Poisson arrivals per second; all at once without it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="+", choices=list(ADAPTERS), default=list(ADAPTERS), metavar="PEER")
    parser.add_argument("--checked", type=int, default=8, help="requests whose tokens are compared with transformers'")
    return parser.parse_args()


def workload(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    requests = random_requests(arguments.requests, GEOMETRIES[arguments.model].vocab_size, seed=arguments.seed)
    arrivals = Arrivals() if arguments.rate is None else Arrivals("poisson", arguments.rate)
    times_s = arrivals.times_s(len(requests), arguments.seed + 1)
    return [
        {"prompt": list(request.prompt), "num_tokens": request.max_tokens, "time_s": time_s}
        for request, time_s in zip(requests, times_s, strict=True)
    ]


def python_of(name: str, console: Console) -> str | None:
    """The interpreter that has this engine; None, and a line that says so, if there is none."""
    home = os.environ.get("PEERS_HOME")
    own = None if home is None else Path(home).expanduser() / name / "bin" / "python"
    if name == PENSTOCK:
        return sys.executable
    if own is not None and own.exists():
        return str(own.absolute())
    if name == "transformers" and importlib.util.find_spec("torch") is not None:
        return sys.executable
    where = "PEERS_HOME is not set" if own is None else f"there is no {own}"
    console.print(f"[yellow]{name} is left out: {where}[/]")
    return None


@contextlib.contextmanager
def started(name: str, python: str, adapter: str, model: Path, dtype: str) -> Iterator[Peer]:
    """An adapter that has loaded the model.

    Raises:
        PeerFailed: it has not.
    """
    log = preset_root() / f"{name}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [python, "-m", f"benchmarks.peers.{adapter}", str(model), dtype],
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


def read_line(process: subprocess.Popen[str], name: str, log: Path) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        last = " | ".join(log.read_text(errors="replace").splitlines()[-3:])
        raise PeerFailed(f"{name} ended with status {process.wait()} (log: {log}): {last}")
    return json.loads(line)


def expected_tokens(model: Path, wanted: list[dict[str, Any]], console: Console) -> list[list[int]]:
    """In f32 alone: in half precision two right engines may differ."""
    if not wanted or not model.name.endswith("float32"):
        return []
    python = python_of("transformers", console)
    if python is None:
        return []
    with started("reference", python, "reference", model, "float32") as peer:
        return [got["tokens"] for got in peer.run(wanted)]


def measure(peers: list[Peer], wanted: list[dict[str, Any]], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Each peer's runs. One that fails has none."""
    runs: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in peers}
    failed = set()
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring", total=rounds * len(peers))
        for _ in range(rounds):
            for peer in [each for each in peers if each.name not in failed]:
                bar.update(task, description=peer.name)
                load = os.getloadavg()[0]
                try:
                    got = peer.run(wanted)
                except (PeerFailed, BrokenPipeError) as error:
                    bar.console.print(f"[yellow]{error}[/]")
                    failed.add(peer.name)
                    runs[peer.name] = []
                else:
                    tokens = [each["tokens"] for each in got]
                    runs[peer.name].append({"summary": summary(wanted, got), "tokens": tokens, "load": load})
                bar.advance(task)
    return runs


def summary(wanted: list[dict[str, Any]], got: list[dict[str, Any]]) -> Summary:
    recorder = Recorder()
    for request, answer in zip(wanted, got, strict=True):
        if len(answer["tokens"]) != request["num_tokens"]:
            raise PeerFailed(f"{len(answer['tokens'])} tokens came instead of {request['num_tokens']}")
        line = recorder.arrive(request["time_s"])
        by_stamp: dict[float, list[int]] = {}
        for token, stamp_s in zip(answer["tokens"], answer["stamps_s"], strict=True):
            by_stamp.setdefault(recorder.start_s + stamp_s, []).append(token)
        for stamp_s, tokens in by_stamp.items():
            note(line, len(tokens), stamp_s)
        end(line, "length", len(request["prompt"]), line.stamps_s[-1])
    return Summary.of(recorder)


def row(peer: Peer, runs: dict[str, list[dict[str, Any]]], reference: list[list[int]]) -> dict[str, Any]:
    """Medians over the rounds, and the median of the rounds' ratios: Penstock's rate to this engine's."""
    own = runs[peer.name]
    ours = runs[PENSTOCK]
    ratios = [
        mine["summary"].output_tokens_per_s / theirs["summary"].output_tokens_per_s
        for mine, theirs in zip(ours, own, strict=False)
    ]
    same = sum(expected == tokens for expected, tokens in zip(reference, own[0]["tokens"], strict=False))
    spreads = {name: [dataclasses.asdict(run["summary"])[name] for run in own] for name in ("ttft_ms", "itl_ms")}
    return {
        "engine": f"{peer.name} {peer.version}".strip(),
        "output tok/s": statistics.median(run["summary"].output_tokens_per_s for run in own),
        "penstock's, times": round(statistics.median(ratios), 2) if ratios else None,
        "TTFT p50, ms": statistics.median(spread["p50"] for spread in spreads["ttft_ms"]),
        "ITL p50, ms": statistics.median(spread["p50"] for spread in spreads["itl_ms"]),
        "ITL p99, ms": statistics.median(spread["p99"] for spread in spreads["itl_ms"]),
        "tokens as reference": f"{same}/{len(reference)}" if reference else "not compared",
        "load": f"{min(run['load'] for run in own):.1f}-{max(run['load'] for run in own):.1f}",
    }


if __name__ == "__main__":
    main()
