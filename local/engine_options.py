"""Options of an engine in this process: the worker's engine settings, taken only from the caller."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypedDict, cast

from pydantic import TypeAdapter, ValidationError

from penstock.engine import ConfigError, EngineConfig, kept_files
from penstock.worker.settings import Settings
from penstock.worker.settings_loading import nearest


class EngineOptions(TypedDict, total=False):
    """Engine settings of the worker, with their names, defaults and ranges: docs/configuration.md."""

    dtype: str
    weights: str
    activations: str
    max_model_len: int | None
    max_num_seqs: int
    max_batch_tokens: int
    page_size: int | None
    num_pages: int | None
    kv_cache_bytes: int | str | None
    state_slots: int | None
    kv_cache_dtype: str
    prefix_caching: bool
    decode_steps: int | None
    same_tokens: bool
    prefill_share: float
    logprobs_mode: str
    speculation: str
    max_draft_tokens: int
    tensor_parallel: int
    expert_parallel: int
    attention: str
    matmul: str
    chat_format: str
    split_special_tokens: bool
    compile_cache_dir: Path | str | None


def engine_config(options: EngineOptions) -> EngineConfig:
    """Checks options as the worker checks its settings.

    Raises:
        ConfigError: an option is unknown or out of range; the message names it.
    """
    values: dict[str, Any] = {}
    for name, value in {"compile_cache_dir": _default("compile_cache_dir"), **options}.items():
        if name not in EngineOptions.__annotations__:
            raise ConfigError(f"unknown option {name!r}{nearest(name, EngineOptions.__annotations__)}")
        values[name] = _checked(name, value)
    directory: Path | None = values["compile_cache_dir"]
    try:
        values["compile_cache_dir"] = None if directory is None else directory.expanduser()
    except RuntimeError as error:  # this user has no home folder
        kept_files.say_unkept(Path("~"), error)
        values["compile_cache_dir"] = None
    return EngineConfig(**values)


def _default(name: str) -> Any:
    return Settings.model_fields[name].get_default(call_default_factory=True)


def _checked(name: str, value: object) -> Any:
    field = Settings.model_fields[name]
    try:
        return TypeAdapter[Any](cast("Any", Annotated[field.annotation, field])).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{name}: {error.errors()[0]['msg']}, not {value!r}") from None
