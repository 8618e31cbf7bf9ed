"""The model to plan for: a preset's name, a checkpoint's folder or file, or a config.json alone."""

from __future__ import annotations

from penstock.engine.errors import ConfigError
from penstock.engine.formats.detection import read_format
from penstock.engine.formats.kv_cache import read_kv_cache_scheme
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.loading.files import CONFIG_FILE, expanded, read_json
from penstock.engine.loading.headers import INDEX_FILE, WEIGHTS_FILE
from penstock.engine.loading.kv_scales import with_kv_scales
from penstock.engine.loading.naming.resolving import local
from penstock.engine.loading.packed import expected_packings
from penstock.engine.models import ModelConfig, family_of
from penstock.engine.models.hf.config import checked_dtype
from penstock.tools.plan.presets import PRESETS, preset


def planned_model(model: str, dtype: str = "auto", weights: str = "auto") -> ModelConfig:
    """Returns the configuration of the model to plan for.

    Weights need not be there, not even in a folder; if they are, their headers say which are quantized.

    Raises:
        ConfigError: there is no such preset, folder or file, or the model is not supported.
        CheckpointError: a file is not readable.
    """
    of_preset = preset(model, "bfloat16" if dtype == "auto" else checked_dtype(dtype), weights)
    if of_preset is not None:
        return of_preset
    path = local(model) or expanded(model)
    has_weights = not path.is_dir() or any((path / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE))
    if local(path) is not None and has_weights:
        return read_model_config(path, dtype, weights)
    if path.is_dir():
        path /= CONFIG_FILE
    if not path.exists():
        raise ConfigError(
            f"{model!r} is not a preset ({', '.join(PRESETS)}), a checkpoint's folder, a GGUF file or a config.json"
        )
    fields = read_json(path)
    declared = str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    family = family_of(fields)
    config = family.config(fields, checked_dtype(declared if dtype == "auto" else dtype))
    config = with_kv_scales(config, family, read_kv_cache_scheme(fields), {})
    return expected_packings(read_format(fields), family, config, weights)
