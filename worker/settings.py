"""The settings of a worker that operators can set.

A setting has one name everywhere: `max_num_seqs` in the TOML file is `PENSTOCK_MAX_NUM_SEQS` in the environment and
`--max-num-seqs` on the command line. `EngineConfig` and `WorkerConfig`, which are made from the settings, declare them
and check their ranges.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import structlog
from pydantic import ByteSize, ConfigDict, Field, create_model, field_validator

from penstock.engine import demo
from penstock.engine.config import EngineConfig
from penstock.engine.setting import declared
from penstock.engine.text.response.choice import why_no_format
from penstock.protocol.redis.address import check_files, parse_url
from penstock.protocol.redis.credentials import Rereadable
from penstock.protocol.wire import ID_PATTERN
from penstock.serving.setting_fields import Names, OrNone, setting
from penstock.worker.config import WorkerConfig
from penstock.worker.settings_loading import Program

_log = structlog.get_logger(__name__)

PREFIX = "PENSTOCK_"
DEMO_MODEL = demo.NAME


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "penstock" / "compile"


_CONFIGS = {"Engine": EngineConfig, "Worker": WorkerConfig}
_DECLARED = {name: (group, of) for group, config in _CONFIGS.items() for name, of in declared(config).items()}


def _field(name: str) -> Any:
    """Makes the field of a setting that a configuration declares, with its default."""
    group, of = _DECLARED[name]
    return setting(of.setting.group or group, of.setting.text, of.default)


class _Queue(Rereadable):
    """What a worker serves, and with which model."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())

    redis_url: str = setting(
        "Redis",
        "URL of Redis: redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://. Where it is "
        "set nowhere, REDIS_URL is taken.",
        "redis://localhost:6379/0",
        repr=False,
    )
    queue: str = _field("queue")

    model: str | None = setting(
        "Engine",
        "A checkpoint or GGUF file: its path, its id on the Hugging Face Hub or its URL; or `demo`, or `smollm2`.",
        None,
    )


def _as_written(name: str, kind: Any) -> Any:
    """Widens a type: `none` is written for None, and a number of bytes may have a unit."""
    may_be_none = type(None) in get_args(kind)
    if kind == tuple[str, ...]:
        return Names
    if name.endswith("_bytes"):
        kind = ByteSize | None if may_be_none else ByteSize
    return Annotated[kind, OrNone] if may_be_none else kind


if TYPE_CHECKING:  # the fields are made at runtime; type checkers see those of the configurations
    _Declared = _Queue
else:
    _made = {name: (_as_written(name, of.type), _field(name)) for name, (_, of) in _DECLARED.items()}
    _Declared = create_model("_Declared", __base__=_Queue, __module__=__name__, **_made)


class Settings(_Declared):
    """All settings, made by `load_settings` and immutable."""

    chat_format: str = setting(
        "Engine",
        declared(EngineConfig)["chat_format"].setting.text,
        declared(EngineConfig)["chat_format"].default,
    )
    compile_cache_dir: Annotated[Path | None, OrNone] = Field(  # a service keeps what it compiles
        default_factory=_cache_dir,
        description=declared(EngineConfig)["compile_cache_dir"].setting.text,
        json_schema_extra={"group": "Engine", "default": "~/.cache/penstock/compile"},
    )

    name: str | None = _field("name")
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "Health and logs", "Lowest level that is logged.", "info"
    )
    log_format: Literal["auto", "json", "console"] = setting(
        "Health and logs", "Form of the log lines; auto: console on a terminal, JSON elsewhere.", "auto"
    )
    otel: bool = setting(
        "Health and logs",
        "Send traces and metrics by OpenTelemetry, as the OTEL_* variables say; needs the extra otel.",
        False,
    )

    @field_validator("redis_url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        check_files(parse_url(value))
        return value

    @field_validator("queue")
    @classmethod
    def _check_queue(cls, value: str) -> str:
        if not ID_PATTERN.fullmatch(value):
            raise ValueError("a queue's name has 1 to 128 of the characters A-Z a-z 0-9 _ . : -")
        return value

    @field_validator("chat_format")
    @classmethod
    def _check_format(cls, value: str) -> str:
        if (why := why_no_format(value)) is not None:
            raise ValueError(why)
        return value

    def check(self) -> None:
        """Checks that all values are in range, and go together.

        Raises:
            BadWorkerConfig, ConfigError: some are not; its `settings` names them.
        """
        self.worker_config()
        EngineConfig(**self._engine_settings())

    def _engine_settings(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(EngineConfig)}

    def worker_config(self) -> WorkerConfig:
        """Returns the service's configuration. `load_settings` has checked it."""
        values = {field.name: getattr(self, field.name) for field in fields(WorkerConfig)}
        # The values go into commands, and the packer accepts only plain ints, no subclass.
        values.update({name: int(value) for name, value in values.items() if isinstance(value, ByteSize)})
        if values["name"] is None:
            del values["name"]
        return WorkerConfig(**values)

    def engine_config(self) -> EngineConfig:
        """Returns the engine's configuration. `load_settings` has checked it."""
        values = self._engine_settings()
        try:
            if self.compile_cache_dir is not None:
                values["compile_cache_dir"] = self.compile_cache_dir.expanduser()
        except RuntimeError as error:  # this user has no home folder
            _log.warning("compilations_not_kept", why=str(error), hint="set compile_cache_dir, or HOME")
            values["compile_cache_dir"] = None
        return EngineConfig(**values)


WORKER = Program(Settings, PREFIX)


def variable(name: str) -> str:
    return WORKER.variable(name)
