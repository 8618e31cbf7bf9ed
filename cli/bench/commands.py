"""Options of `penstock bench`. Its work is in `run.py`, `model.py` and `compare.py` here, which need numpy."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.shared.errors import CommandFailed, require_worker_extra
from penstock.cli.shared.options import gathers, option
from penstock.installed import how_to_install
from penstock.serving.setting_fields import default_text, group_of
from penstock.worker.settings import Settings
from penstock.worker.settings_loading import flag

app = typer.Typer(
    name="bench",
    help="Benchmark an engine by itself, or the workers of a queue, and compare the results.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_LOAD: dict[str, tuple[Any, str, str]] = {
    "dataset": (
        str,
        "random|shared-prefix|FILE",
        "Where requests come from; FILE has one JSON object a line. [random]",
    ),
    "requests": (int, "NUMBER", "How many; from a trace, the first ones. [64, or all of FILE]"),
    "prompt_length": (str, "LENGTHS", "Tokens of a prompt (after its shared prefix). [loguniform:16:512]"),
    "output_length": (str, "LENGTHS", "Tokens of an answer; for FILE, if a line does not say. [uniform:16:128]"),
    "prefix_length": (int, "NUMBER", "Tokens of a shared prefix. [256]"),
    "prefix_count": (int, "NUMBER", "How many shared prefixes. [4]"),
    "vocab_size": (int, "NUMBER", "Random prompts have token ids below it. [the model's, where it is known; 1024]"),
    "trace": (
        str,
        "FILE",
        "Recorded requests: Mooncake's JSONL, Azure's or BurstGPT's CSV, or the format of `penstock plan`.",
    ),
    "trace_speed": (float, "NUMBER", "Replay the trace this many times as fast. [1]"),
    "trace_block": (int, "NUMBER", "Prompt tokens for each of a trace's hash_ids. [512; Qwen-Bailian's: 16]"),
    "seed": (int, "NUMBER", "The same seed gives the same requests and arrivals. [0]"),
    "arrivals": (str, "burst|constant|poisson|closed", "All at once, at --rate, or --concurrency at a time. [burst]"),
    "rate": (float, "NUMBER", "Requests a second, for constant and poisson."),
    "concurrency": (int, "NUMBER", "Requests in flight, for closed."),
    "temperature": (float, "NUMBER", "Sampling temperature; 0 is greedy. [0]"),
    "slo_ttft_ms": (
        float,
        "NUMBER",
        "Goodput counts requests with a time to first token within this many milliseconds.",
    ),
    "slo_itl_ms": (
        float,
        "NUMBER",
        "Goodput counts requests whose p99 gap between chunks is within this many milliseconds.",
    ),
}
_LENGTHS_NOTE = "LENGTHS: N, uniform:LOW:HIGH, loguniform:LOW:HIGH, normal:MEAN:DEVIATION or lognormal:MEDIAN:LOW:HIGH."
_ENGINE = [name for name, field in Settings.model_fields.items() if group_of(field) == "Engine"]

Json = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.", metavar="FILE")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Write a picture (PNG) to this file.", metavar="FILE")]
Repeats = Annotated[int, typer.Option(help="How many times to measure.", min=1, metavar="NUMBER")]


def _load_options(*without: str) -> list[Any]:
    return [
        option(name, kind, flag(name), help=_dimmed(text), metavar=metavar, rich_help_panel="Load")
        for name, (kind, metavar, text) in _LOAD.items()
        if name not in without
    ]


def _dimmed(text: str) -> str:
    """Dims the default, in brackets at the end, as `penstock worker --help` shows it."""
    body, bracket, default = text.rpartition(" [")
    return f"{body} [dim]\\[{default}[/]" if bracket else text


def _setting_options(names: list[str], panel: str) -> list[Any]:
    return [
        option(
            name,
            str,
            flag(name),
            help=f"{Settings.model_fields[name].description} [dim]\\[{default_text(Settings.model_fields[name])}][/]",
            metavar="TEXT",
            rich_help_panel=panel,
        )
        for name in names
    ]


@app.command(epilog=_LENGTHS_NOTE)
@gathers("flags", _setting_options(_ENGINE, "Engine settings"), lambda given: given)
@gathers("load", _load_options("vocab_size"), lambda given: given)
def engine(
    *, flags: dict[str, str], load: dict[str, Any], repeats: Repeats = 1, json: Json = None, plot: Plot = None
) -> None:
    """Benchmark an engine by itself: no Redis, no worker, one process.

    --model may also be random:tiny, random:qwen06 or random:llama8: random weights of that size (31M, 474M, 8G), in
    --dtype float32 or bfloat16.
    """
    require_worker_extra()
    _require_plotting(plot)
    from penstock.cli.bench.model import bench_engine  # loads jax
    from penstock.cli.bench.run import ReportOptions

    bench_engine(flags, load, ReportOptions(repeats, json, plot))


@app.command(epilog=_LENGTHS_NOTE)
@gathers(
    "flags",
    [
        *_setting_options(["redis_url", "queue"], "Redis settings"),
        *_setting_options(_ENGINE, "Engine settings, for the worker of --embedded"),
    ],
    lambda given: given,
)
@gathers("load", _load_options(), lambda given: given)
def serve(
    *,
    flags: dict[str, str],
    load: dict[str, Any],
    embedded: Annotated[
        bool, typer.Option("--embedded", help="Start a Redis server and a worker with --model, and stop them.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for a worker if none serves the queue.")] = False,
    clients: Annotated[int, typer.Option(help="Clients that share the requests.", metavar="NUMBER")] = 1,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds after which a reply counts as failed.", metavar="NUMBER")
    ] = None,
    repeats: Repeats = 1,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Benchmark the workers of a queue: requests go through Redis, and replies are streamed back.

    Without --embedded, it measures all workers of the queue together; --model then says what they must serve.

    Exit status: 1 if no worker serves the queue, the last one leaves meanwhile, or they serve another model.
    """
    if embedded:
        require_worker_extra()
    if importlib.util.find_spec("numpy") is None:
        raise CommandFailed(f"numpy is not installed; install it with: {how_to_install('bench')}")
    _require_plotting(plot)
    from penstock.cli.bench.run import ReportOptions, bench_service

    output = ReportOptions(repeats, json, plot)
    bench_service(flags, load, output, embedded=embedded, waits=wait, num_clients=clients, timeout_s=timeout)


@app.command()
def compare(
    files: Annotated[
        list[Path],
        typer.Argument(help="Two files from --json, or pairs in the order of the runs.", metavar="FIRST SECOND"),
    ],
    *,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Compare even if model, load or machine differ, and name them.")
    ] = False,
    fail_above: Annotated[
        float | None,
        typer.Option(
            help="Exit with 1 if the whole interval of a figure is worse in SECOND by more than this.",
            metavar="PERCENT",
        ),
    ] = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Compare two results of `bench engine` or `bench serve`, figure by figure, with 95 % intervals.

    For several pairs, intervals and p-values come from a paired t-test: other work on the machine affects both files of
    a pair alike. For one pair with --repeats they come from Welch's t-test over the runs. Otherwise the intervals come
    from a bootstrap over the requests.

    Exit status: 1 if --fail-above says so; 2 if a file is not a result, or the files cannot be compared.
    """
    if importlib.util.find_spec("numpy") is None or importlib.util.find_spec("scipy") is None:
        raise CommandFailed(f"numpy or scipy is not installed; install them with: {how_to_install('bench')}")
    _require_plotting(plot)
    from penstock.cli.bench.compare import compare_files

    compare_files(files, anyway=anyway, fail_above=fail_above, json_path=json, plot=plot)


def _require_plotting(plot: Path | None) -> None:
    for name in ("matplotlib", "scipy"):
        if plot is not None and importlib.util.find_spec(name) is None:
            raise CommandFailed(f"--plot needs {name}, which is not installed: {how_to_install('bench')}")
