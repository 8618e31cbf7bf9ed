"""Runs `penstock bench`: turns options into a load, measures it, and reports the figures."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from penstock.cli.shared.errors import USAGE, CommandFailed
from penstock.cli.shared.programs import load_settings
from penstock.cli.shared.redis import connected
from penstock.cli.shared.waiting import wait_until_served
from penstock.engine.progress import ReportProgress
from penstock.local.console import console
from penstock.local.embedded import EmbeddedServer, EmbeddedServerError
from penstock.local.progress import shown
from penstock.local.worker_process import WorkerEnded, local_worker, wait_joined
from penstock.producer import AsyncClient, PenstockError
from penstock.protocol.queue.load import query_load
from penstock.protocol.wire import ModelCard
from penstock.serving import garbage
from penstock.serving.setting_fields import group_of
from penstock.tools.bench.errors import ImpossibleLoad, NotServed, WrongModel
from penstock.tools.bench.machine import describe_machine
from penstock.tools.bench.on_service import run_on_service
from penstock.tools.bench.options import LoadOptions
from penstock.tools.bench.recorder import Recorder
from penstock.tools.bench.report import Report
from penstock.tools.bench.serving import require_served, served_model, while_served
from penstock.tools.bench.summary import Summary
from penstock.tools.bench.traffic import punctual
from penstock.tools.bench.traffic.load import Load
from penstock.worker.logs import configure_logs
from penstock.worker.settings import Settings
from penstock.worker.settings_loading import flag

DEFAULT_VOCAB_SIZE = 1024


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Number of measurements, and where else figures go."""

    repeats: int
    json: Path | None
    plot: Path | None

    def check(self) -> None:
        """Raises CommandFailed now if a file could not be written after minutes of measuring."""
        require_folders(json=self.json, plot=self.plot)

    def write(self, report: Report) -> None:
        console().print(report.tables())
        if self.json is not None:
            report.write_json(self.json)
        if self.plot is not None:
            from penstock.tools.bench.plot import write_plot  # needs matplotlib

            write_plot(report, self.plot)


def bench_service(
    flags: Mapping[str, str],
    load_flags: Mapping[str, Any],
    output: ReportOptions,
    *,
    embedded: bool,
    waits: bool,
    num_clients: int,
    timeout_s: float | None,
) -> None:
    """Sends a load through Redis and measures the replies.

    Raises:
        CommandFailed: an option is impossible, every request failed, or what `embedded` starts failed to start; or no
            worker serves the queue (unless `waits`), or none with the model in `flags`.
        SettingsError: a setting is impossible.
        PenstockError: Redis can't be reached.
    """
    options = load_options(load_flags)
    output.check()
    configure_logs("info", "auto", sys.stderr)
    _refuse_strangers(flags, embedded=embedded, waits=waits)
    settings = load_settings(flags)
    client = _Client(options, output, num_clients, timeout_s)
    if not embedded:
        try:
            punctual.run(_with_workers(settings, client, flags.get("model"), waits=waits))
        except (NotServed, WrongModel) as error:
            hint = "; --wait waits for one" if isinstance(error, NotServed) else ""
            raise CommandFailed(f"{error}{hint}") from error
        return
    from penstock.cli.bench.checkpoint import resolved  # loads jax

    settings, vocab_size, name = resolved(settings)
    try:
        with EmbeddedServer() as server:
            punctual.run(_with_worker(server.url, settings, client, options.vocab_size or vocab_size, name))
    except (EmbeddedServerError, WorkerEnded) as error:
        raise CommandFailed(str(error)) from error


def _refuse_strangers(flags: Mapping[str, str], *, embedded: bool, waits: bool) -> None:
    own = ("redis_url", "queue", "model")  # without --embedded, the model that the workers must serve
    strangers = [flag(name) for name in flags if (name == "redis_url" if embedded else name not in own)]
    if embedded and waits:
        strangers.append("--wait")
    if strangers:
        raise CommandFailed(f"{strangers[0]} has no effect {'with' if embedded else 'without'} --embedded", USAGE)


async def _with_workers(settings: Settings, client: _Client, model: str | None, *, waits: bool) -> None:
    """Measures workers. `model` is not from the settings: those are the caller's, not the workers'."""
    queue = settings.queue
    async with AsyncClient(settings.redis_url, queue=queue) as asking:
        if waits:
            await wait_until_served(asking, queue)
        else:
            await require_served(asking, queue)
        card = await served_model(asking, queue, model)
        described = {**_described(card), **await _fleet(settings)}
        of_card = None if card is None else card.vocab_size
        vocab_size = client.options.vocab_size or of_card or DEFAULT_VOCAB_SIZE
        work = client.measure(settings.redis_url, queue, vocab_size, described)
        await (work if waits else while_served(asking, queue, work))


def _described(card: ModelCard | None) -> dict[str, Any]:
    """Returns what is measured, as far as the workers publish it."""
    names = ("model", "weights", "dtype", "max_model_len", "version")
    return {} if card is None else card.model_dump(include=set(names), exclude_none=True)


async def _fleet(settings: Settings) -> dict[str, Any]:
    """Returns the number of workers, if it is known."""
    with suppress(PenstockError, ValueError):
        async with connected(settings.redis_url) as redis:
            load = await query_load(redis.execute_command, settings.queue)
            return {} if load is None else {"workers": load.num_workers}
    return {}


async def _with_worker(url: str, settings: Settings, client: _Client, vocab_size: int, model_name: str) -> None:
    name = f"bench-{secrets.token_hex(4)}"
    values = {
        **engine_settings(settings), "model": settings.model, "queue": settings.queue, "name": name,
        "compile_cache_dir": settings.compile_cache_dir,
        "health_port": None, "log_level": "warning", "drain_timeout_s": 1,
    }  # fmt: skip
    async with local_worker(url, values) as process:
        structlog.get_logger().info("starting a worker")  # which shows its own progress
        await wait_joined(process, url, settings.queue, name)
        await client.measure(url, settings.queue, vocab_size, {"model": model_name, **engine_settings(settings)})


@dataclass(frozen=True, slots=True)
class _Client:
    options: LoadOptions
    output: ReportOptions
    num_clients: int
    timeout_s: float | None

    def __post_init__(self) -> None:
        if self.num_clients < 1:
            raise CommandFailed(f"--clients must be 1 or more, not {self.num_clients}", USAGE)
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise CommandFailed(f"--timeout must be above 0, not {self.timeout_s:g}", USAGE)

    async def measure(self, url: str, queue: str, vocab_size: int, described: dict[str, Any]) -> None:
        async def measure(load: Load, progress: ReportProgress) -> Recorder:
            return await run_on_service(
                url, queue, load, progress, num_clients=self.num_clients, timeout_s=self.timeout_s
            )

        loads = drawn(self.options, vocab_size, self.output.repeats)
        if described.get("max_model_len"):
            require_fits(loads, described["max_model_len"])
        described = {**described, "clients": self.num_clients, **self.options.given()}
        await measure_runs(
            f"service, {described.get('model', 'queue ' + queue)}", described, loads, self.output, measure
        )


def require_folders(**paths: Path | None) -> None:
    """Raises CommandFailed if an output file's folder does not exist; keywords are the options' names."""
    for name, path in paths.items():
        if path is not None and not path.absolute().parent.is_dir():
            raise CommandFailed(f"{flag(name)} {path}: there is no folder {path.absolute().parent}", USAGE)


async def measure_runs(
    what: str,
    described: dict[str, Any],
    loads: Sequence[Load],
    output: ReportOptions,
    measure: Callable[[Load, ReportProgress], Awaitable[Recorder]],
) -> None:
    """Measures each of `loads` and reports.

    Raises:
        CommandFailed: no request succeeded.
    """
    machine = describe_machine()
    runs = []
    garbage.settle()  # a collection during the run would look like a gap in the replies
    for place, load in enumerate(loads, start=1):
        with shown(f"measuring, {place} of {len(loads)}", "replies") as report:
            before_s = time.process_time()
            recorder = await measure(load, report)
            cpu_s = time.process_time() - before_s
        runs.append((Summary.of(recorder, load.target), recorder, cpu_s))
    title = f"{what}, {len(loads[0].requests)} requests, {loads[0].arrivals}"
    result = Report.of(title, described, runs, machine, loads[0])
    output.write(result)
    if all(summary.num_failed == summary.num_requests for summary in result.runs):
        raise CommandFailed(f"every request failed: {result.to_json()['errors'][0]}")


def engine_settings(settings: Settings) -> dict[str, Any]:
    """Returns the settings that a figure depends on."""
    names = [name for name, field in Settings.model_fields.items() if group_of(field) == "Engine"]
    return {name: getattr(settings, name) for name in names if name not in ("model", "compile_cache_dir")}


def load_options(given: Mapping[str, Any]) -> LoadOptions:
    try:
        return LoadOptions(**given)
    except ImpossibleLoad as error:
        raise CommandFailed(str(error), USAGE) from error


def drawn(options: LoadOptions, vocab_size: int, count: int) -> list[Load]:
    """Draws `count` similar loads."""
    try:
        return [options.load(vocab_size, turn) for turn in range(count)]
    except ImpossibleLoad as error:
        raise CommandFailed(str(error), USAGE) from error


def require_fits(loads: Sequence[Load], max_model_len: int) -> None:
    """Raises CommandFailed, before anything is sent, if a traced request is longer than the model's sequences."""
    try:
        loads[0].check_fits(max_model_len)
    except ImpossibleLoad as error:
        raise CommandFailed(str(error), USAGE) from error
