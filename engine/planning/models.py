"""The model that a plan is made for: a preset's name, a checkpoint's folder or file, or a config.json alone."""

from __future__ import annotations

from pathlib import Path

from penstock.engine.errors import ConfigError
from penstock.engine.formats.reading import read_format
from penstock.engine.loading.checkpoint import local, read_model_config
from penstock.engine.loading.files import read_json
from penstock.engine.models import ModelConfig, family_of
from penstock.engine.models.hf_config import checked_dtype
from penstock.engine.planning.presets import PRESETS, preset


def planned_model(model: str, dtype: str = "auto") -> ModelConfig:
    """Weights need not be there, not even for a folder.

    Raises:
        ConfigError: there is no such preset, folder or file, or the model is not supported.
        CheckpointError: a file is not readable.
    """
    of_preset = preset(model, "bfloat16" if dtype == "auto" else checked_dtype(dtype))
    if of_preset is not None:
        return of_preset
    here = local(model)
    if here is not None:
        return read_model_config(here, dtype)
    path = Path(model).expanduser()
    if not path.exists():
        raise ConfigError(
            f"{model!r} is no preset ({', '.join(PRESETS)}), no folder of a checkpoint, no GGUF file and no config.json"
        )
    fields = read_json(path)
    declared = str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if read_format(fields) is not None:
        raise ConfigError(f"{path} is of a quantized checkpoint: give the folder, whose files say how it is")
    return family_of(fields).config(fields, declared if dtype == "auto" else checked_dtype(dtype))
