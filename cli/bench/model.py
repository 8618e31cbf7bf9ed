"""`penstock bench engine`. Imports jax."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from penstock.cli.bench.checkpoint import resolved
from penstock.cli.bench.run import ReportOptions, drawn, engine_settings, load_options, measure_runs, require_fits
from penstock.cli.shared.errors import USAGE, CommandFailed
from penstock.cli.shared.programs import load_settings
from penstock.cli.shared.serve import load_model
from penstock.engine import RequestError
from penstock.engine.progress import ReportProgress
from penstock.tools.bench.on_engine import run_on_engine
from penstock.tools.bench.recorder import Recorder
from penstock.tools.bench.traffic.load import Load
from penstock.worker.logs import configure_logs


def bench_engine(flags: Mapping[str, str], load_flags: Mapping[str, Any], output: ReportOptions) -> None:
    """Loads and warms up a model, and measures it.

    Raises:
        CommandFailed: an option is impossible, or the requests do not fit the model.
        SettingsError: a setting is impossible.
    """
    options = load_options(load_flags)
    output.check()
    configure_logs("info", "auto", sys.stderr)
    settings, vocab_size, name = resolved(load_settings(flags))
    loads = drawn(options, vocab_size, output.repeats)
    model = load_model(str(settings.model), settings.engine_config())
    if model.info is not None:
        require_fits(loads, model.info.max_model_len)

    async def measure(load: Load, progress: ReportProgress) -> Recorder:
        return run_on_engine(model.engine, model.text, load, progress)

    described = {"model": name, **engine_settings(settings), **options.given()}
    try:
        asyncio.run(measure_runs(f"engine, {name}", described, loads, output, measure))
    except RequestError as error:
        raise CommandFailed(f"the model cannot serve this load: {error}", USAGE) from error
