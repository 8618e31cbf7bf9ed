"""Finds the model that a benchmark loads by itself. Imports jax."""

from __future__ import annotations

from penstock.cli.shared.errors import USAGE, CommandFailed
from penstock.engine import CheckpointError, ConfigError
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.loading.naming.resolving import resolve
from penstock.local.progress import shown
from penstock.tools.bench.errors import ImpossibleLoad
from penstock.tools.bench.presets import PREFIX, preset_dir, preset_root
from penstock.worker.settings import DEMO_MODEL, Settings
from penstock.worker.settings_loading import flag


def resolved(settings: Settings) -> tuple[Settings, int, str]:
    """Returns the settings with a folder as their model, the vocabulary size, and the model's name for people.

    Raises:
        CommandFailed: no model is named, or it can't be loaded.
    """
    model, dtype = settings.model, settings.engine_config().dtype
    if model is None:
        raise CommandFailed(
            f"no model is given: {flag('model')} needs a checkpoint, {DEMO_MODEL} or {PREFIX}tiny", USAGE
        )
    try:
        if model.startswith(PREFIX):
            written = "float32" if dtype == "auto" else dtype
            with shown("writing a random model"):
                directory = preset_dir(model.removeprefix(PREFIX), written, preset_root())
        else:
            directory = resolve(model)
        config = read_model_config(directory, dtype)
    except (ImpossibleLoad, CheckpointError, ConfigError) as error:
        raise CommandFailed(str(error), USAGE) from error
    return settings.model_copy(update={"model": str(directory)}), config.vocab_size, f"{model} {config.dtype}"
