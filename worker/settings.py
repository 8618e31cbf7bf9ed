"""The settings of a worker that operators can set.

A setting has one name everywhere: `max_num_seqs` in the TOML file is `PENSTOCK_MAX_NUM_SEQS` in the environment and
`--max-num-seqs` on the command line. `EngineConfig` declares those of the engine. It and `WorkerConfig`, which are made
from the settings, check ranges.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import structlog
from pydantic import BeforeValidator, ByteSize, ConfigDict, Field, create_model, field_validator
from pydantic.fields import FieldInfo

from penstock.engine.config import EngineConfig
from penstock.engine.setting import declared
from penstock.engine.text.response.formats import FORMATS, why_no_format
from penstock.protocol.redis.address import check_files, parse_url
from penstock.protocol.redis.credentials import Rereadable
from penstock.protocol.wire import ID_PATTERN
from penstock.worker.config import WorkerConfig
from penstock.worker.settings_loading import Program

_log = structlog.get_logger(__name__)

PREFIX = "PENSTOCK_"
DEMO_MODEL = "demo"


def _none(value: object) -> object:
    return None if isinstance(value, str) and value.lower() == "none" else value


_OrNone = BeforeValidator(_none)


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "penstock" / "compile"


def _setting(group: str, text: str, default: Any, **more: Any) -> Any:
    return Field(default, description=text, json_schema_extra={"group": group}, **more)


_ENGINE = declared(EngineConfig)
_DEFAULTS = {field.name: field.default for field in fields(WorkerConfig)}


def _worker(name: str, text: str, group: str = "Worker") -> Any:
    """Makes a field of WorkerConfig, with its default."""
    return _setting(group, text, _DEFAULTS[name])


class _Queue(Rereadable):
    """What a worker serves, and with which model."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())

    redis_url: str = _setting(
        "Redis",
        "Where Redis is: a redis://, rediss://, unix://, redis+cluster:// or redis+sentinel:// URL. "
        "Where it is set nowhere, REDIS_URL is taken.",
        "redis://localhost:6379/0",
        repr=False,
    )
    queue: str = _worker("queue", "The queue that requests are sent to and taken from.", "Redis")

    model: str | None = _setting(
        "Engine",
        "A Hugging Face checkpoint (folder or hub id) or a GGUF file; `demo` is the model that ships with Penstock.",
        None,
    )


def _engine_fields() -> Mapping[str, Any]:
    """Returns the fields that `EngineConfig` declares: of its types, as they are written, and with its defaults."""
    return {
        name: (_as_written(name, field.type), _setting("Engine", field.setting.text, field.default))
        for name, field in _ENGINE.items()
    }


def _as_written(name: str, kind: Any) -> Any:
    """Widens a type: `none` is written for None, and a number of bytes may have a unit."""
    if type(None) not in get_args(kind):
        return kind
    return Annotated[ByteSize | None if name.endswith("_bytes") else kind, _OrNone]


if TYPE_CHECKING:  # the engine's fields are made when the program starts; types know them by `engine_config`
    _WithEngine = _Queue
else:
    _WithEngine = create_model("_WithEngine", __base__=_Queue, __module__=__name__, **_engine_fields())


class Settings(_WithEngine):
    """All settings, made by `load_settings` and immutable."""

    chat_format: str = _setting(
        "Engine",
        _ENGINE["chat_format"].setting.text.replace("the formats", ", ".join(FORMATS)),
        _ENGINE["chat_format"].default,
    )
    compile_cache_dir: Annotated[Path | None, _OrNone] = Field(  # a service keeps what it compiles
        default_factory=_cache_dir,
        description=_ENGINE["compile_cache_dir"].setting.text,
        json_schema_extra={"group": "Engine", "default": "~/.cache/penstock/compile"},
    )

    name: str | None = _setting(
        "Worker",
        "Name of this worker, unique in its queue; none: made of the host's name, the process id and a random part.",
        None,
    )
    flush_interval_ms: int = _worker(
        "flush_interval_ms", "How long tokens are gathered into one chunk; a reply's first text is not held."
    )
    max_flush_interval_ms: int = _worker(
        "max_flush_interval_ms",
        "What flush_interval_ms grows to while engine and worker use up the processors; a lower value: never.",
    )
    drain_timeout_s: float = _worker(
        "drain_timeout_s", "How long running requests may go on after SIGTERM before they are handed to other workers."
    )
    refused_drain_after_s: float = _worker(
        "refused_drain_after_s",
        "How long Redis may refuse a running worker by its password or permissions before it drains and exits with 5; "
        "meanwhile it is not ready, and reads user and password of redis_url anew.",
    )
    heartbeat_ttl_s: float = _worker(
        "heartbeat_ttl_s", "The longest silence of a worker before others take over its requests."
    )
    reclaim_interval_s: float = _worker("reclaim_interval_s", "Time between two looks for dead workers.")
    block_ms: int = _worker("block_ms", "How long one blocking read of the queue lasts at most.")
    steal_after_ms: int = _worker(
        "steal_after_ms",
        "How long a request is left to the worker that has run prompts that begin alike, while that has room.",
    )
    cancel_poll_ms: int = _worker("cancel_poll_ms", "Time between two looks for cancelled requests.")
    allow_other_fleet: bool = _worker(
        "allow_other_fleet",
        "Join a queue whose workers have other weights, another tokenizer or chat template, as in a rolling upgrade. "
        "Half-written replies are left to workers with the model that began them.",
    )
    model_wait_s: float = _worker(
        "model_wait_s",
        "How long a half-written reply waits for a worker with the model that began it once none serves the queue; "
        "then it ends with an error.",
    )
    target_wait_s: float = _worker(
        "target_wait_s",
        "How soon what waits is to begin: the queue asks for as many workers (`penstock_wanted_workers`). "
        "It is to be the same for all workers of a queue.",
    )
    suspect_wait_s: float = _worker(
        "suspect_wait_s",
        "How long a request that was there when two workers in a row died waits for a moment to run alone; "
        "then what runs beside it waits again.",
    )
    max_attempts: int = _worker(
        "max_attempts", "Workers that a request may take down in a row before it goes to the dead-letter stream."
    )
    max_dead_entries: int = _worker(
        "max_dead_entries",
        "Dead letters that a queue keeps, the newest; beside them a tenth as many entries that never were a request.",
    )
    max_dead_bytes: ByteSize = _worker(
        "max_dead_bytes",
        "Bytes of the dead letters that a queue keeps, the newest; a tenth for entries that never were a request.",
    )
    dead_ttl_s: float = _worker(
        "dead_ttl_s",
        "How long a dead letter is kept. The next one removes it; where none comes, it goes after twice the time.",
    )
    reply_ttl_s: float = _worker("reply_ttl_s", "How long an unfinished reply is kept without a refresh.")
    reply_ttl_after_end_s: float = _worker("reply_ttl_after_end_s", "How long a reply is kept after its end.")

    max_body_bytes: ByteSize = _worker("max_body_bytes", "Bytes of one request entry.", "Limits")
    max_prompt_tokens: Annotated[int | None, _OrNone] = _worker(
        "max_prompt_tokens", "Tokens of one prompt; none: what the model and the KV cache can hold.", "Limits"
    )
    max_stop_strings: int = _worker("max_stop_strings", "Stop strings of one request.", "Limits")
    max_stop_chars: int = _worker("max_stop_chars", "Characters of one stop string.", "Limits")
    max_n: int = _worker("max_n", "Choices (`n`) of one request.", "Limits")
    max_keep_s: float = _worker(
        "max_keep_s", "How long after its end a request may have its reply kept (`keep_s`).", "Limits"
    )

    health_host: str = _worker(
        "health_host",
        "Address that /healthz, /readyz and /metrics listen on; *: all of them, of IPv6 and IPv4, as in the image.",
        "Health and logs",
    )
    health_port: Annotated[int | None, _OrNone] = _worker(
        "health_port",
        "Port of /healthz, /readyz and /metrics; 0: any free one, none: no such server.",
        "Health and logs",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "Health and logs", "Lowest level that is logged.", "info"
    )
    log_format: Literal["auto", "json", "console"] = _setting(
        "Health and logs", "Form of the log lines; auto: console on a terminal, JSON elsewhere.", "auto"
    )
    otel: bool = _setting(
        "Health and logs",
        "Send traces and metrics by OpenTelemetry, where and of what the OTEL_* variables say; needs the extra otel.",
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
        EngineConfig(**self._of_the_engine())

    def _of_the_engine(self) -> dict[str, Any]:
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
        values = self._of_the_engine()
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


def default_text(field: FieldInfo) -> str:
    """Returns the default of a setting as a person writes it."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "default" in extra:
        return str(extra["default"])
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    if isinstance(field.default, float):
        return f"{field.default:.15g}"
    return "none" if field.default is None else str(field.default)


def group_of(field: FieldInfo) -> str:
    """Returns the heading of a setting in `--help` and in docs/configuration.md."""
    extra = field.json_schema_extra
    return str(extra["group"]) if isinstance(extra, dict) else ""
