"""`penstock bench engine`, and what the model is that a benchmark loads by itself. Imports jax."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from penstock.engine import CheckpointError, ConfigError, RequestError
from penstock.engine.demo import MODEL_DIR
from penstock.engine.loading.checkpoint import read_model_config, resolve
from penstock.worker.bench.errors import ImpossibleLoad
from penstock.worker.bench.load import Load
from penstock.worker.bench.on_engine import run_on_engine
from penstock.worker.bench.presets import PREFIX, preset_dir, preset_root
from penstock.worker.bench.recorder import Recorder
from penstock.worker.cli.bench_run import USAGE, Output, drawn, engine_settings, load_options, measure_runs
from penstock.worker.cli.errors import CommandFailed
from penstock.worker.cli.progress import shown
from penstock.worker.cli.serve import load_model
from penstock.worker.logs import configure_logs
from penstock.worker.progress import Progress
from penstock.worker.settings import DEMO_MODEL, Settings, flag, load_settings


def bench_engine(flags: Mapping[str, str], load_flags: Mapping[str, Any], output: Output) -> None:
    """Loads and warms up a model, and measures it.

    Raises:
        CommandFailed: an option is impossible, or the requests do not fit the model.
        SettingsError: a setting is.
    """
    options = load_options(load_flags)
    output.check()
    configure_logs("info", "auto", sys.stderr)
    settings, vocab_size, name = resolved(load_settings(flags))
    loads = drawn(options, vocab_size, output.repeats)
    model = load_model(str(settings.model), settings.engine_config())

    async def measure(load: Load, progress: Progress) -> Recorder:
        return run_on_engine(model.engine, model.text, load, progress)

    described = {"model": name, **engine_settings(settings), **options.given()}
    try:
        asyncio.run(measure_runs(f"engine, {name}", described, loads, output, measure))
    except RequestError as error:
        raise CommandFailed(f"the model cannot serve this load: {error}", USAGE) from error


def resolved(settings: Settings) -> tuple[Settings, int, str]:
    """The settings with a folder as their model, the size of its vocabulary, and its name for people.

    Raises:
        CommandFailed: no model is named, or it can't be loaded.
    """
    model = settings.model
    if model is None:
        raise CommandFailed(
            f"no model is given: {flag('model')} wants a checkpoint, {DEMO_MODEL} or {PREFIX}tiny", USAGE
        )
    try:
        if model.startswith(PREFIX):
            dtype = "float32" if settings.dtype == "auto" else settings.dtype
            with shown("writing a random model"):
                directory = preset_dir(model.removeprefix(PREFIX), dtype, preset_root())
        else:
            directory = MODEL_DIR if model == DEMO_MODEL else resolve(model)
        config = read_model_config(directory, settings.dtype)
    except (ImpossibleLoad, CheckpointError, ConfigError) as error:
        raise CommandFailed(str(error), USAGE) from error
    return settings.model_copy(update={"model": str(directory)}), config.vocab_size, f"{model} {config.dtype}"
