"""Settings of the gateway. `penstock gateway` reads them from its flags, the environment and a file."""

from __future__ import annotations

import re
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, ConfigDict, Field, field_validator, model_validator

from penstock.protocol import keys
from penstock.protocol.redis.address import check_files, parse_url
from penstock.protocol.redis.credentials import Rereadable
from penstock.protocol.redis.hosts import is_host
from penstock.protocol.wire import ID_PATTERN, MIN_KEEP_S
from penstock.serving.setting_fields import Names, OrNone, setting

PREFIX = "PENSTOCK_GATEWAY_"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
"""https://www.rfc-editor.org/rfc/rfc6454#section-6.2: lower case, and no path."""

MIN_FILE_S = 3600
MAX_FILE_S = 30 * 86_400


LAST_PORT = 65_535
_Port = Annotated[int, Field(ge=0, le=LAST_PORT)]
_Seconds = Annotated[float, Field(gt=0.0)]
_Bytes = Annotated[ByteSize, Field(ge=1)]


class DoNotGoTogether(ValueError):
    """A combination of settings is invalid: `settings` has their names."""

    def __init__(self, message: str, *settings: str) -> None:
        super().__init__(message)
        self.settings = settings


class GatewaySettings(Rereadable):
    """All settings of a gateway. They are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    redis_url: str = setting(
        "Redis",
        "URL of Redis, as for a worker. Where it is not set for the gateway, the worker's setting is "
        "taken, then REDIS_URL.",
        "redis://localhost:6379/0",
        repr=False,
    )
    operator_redis_url: Annotated[str | None, OrNone] = setting(
        "Redis",
        "URL of Redis with a user of the role operator, for the page for operators; none: redis_url.",
        None,
        repr=False,
    )
    queues: Names = setting(
        "Redis", "Queues to serve, separated by commas; by default all that have workers.", (), "all"
    )
    max_queue_length: Annotated[int, Field(ge=1)] = setting(
        "Redis", "Most requests in a queue, waiting and running; more are refused.", 10_000
    )

    redis_timeout_s: _Seconds = setting(
        "Redis",
        "How long an answer waits for a command to Redis; then it is a 503. Open streams wait longer.",
        5.0,
    )

    refused_drain_after_s: _Seconds = setting(
        "Redis",
        "How long Redis may refuse the password or permissions of a running gateway before it drains and "
        "exits with 5. It answers 503 meanwhile, and reads user and password of redis_url again.",
        300.0,
    )

    host: str = setting("Server", "Address to listen on; * is all addresses, as in the image.", "127.0.0.1")
    port: _Port = setting("Server", "Port to listen on; 0: any free one.", 8000)
    workers: Annotated[int, Field(ge=1, le=256)] = setting(
        "Server", "Processes that share the port. A killed one is replaced.", 1
    )
    metrics_port: Annotated[_Port | None, OrNone] = setting(
        "Server",
        "Port of /metrics and probes of the first process; the next one has the next port. 0: any free "
        "one, none: no such server.",
        None,
    )
    tls_certificate: Annotated[Path | None, OrNone] = setting(
        "Server", "PEM file with the certificate and its chain; none: no TLS.", None
    )
    tls_key: Annotated[Path | None, OrNone] = setting("Server", "PEM file with the key of the certificate.", None)
    strict_fields: bool = setting(
        "Server",
        "Refuse every unknown field of a request; off: only those that look like a misspelled one.",
        False,
    )
    trusted_proxies: Names = setting(
        "Server",
        "Addresses or networks of proxies, separated by commas, whose X-Forwarded-For names the client.",
        (),
        "",
    )
    require_key: bool = setting(
        "Server",
        "Refuse everybody while there are no API keys, as after Redis has lost its data.",
        False,
    )
    isolate_prefix_cache: bool = setting(
        "Server",
        "Share no cached prefixes between tenants of API keys: the timing of an answer reveals what others "
        "asked. A common prefix is then computed once for each tenant. Needs workers that know `cache_salt`.",
        False,
    )
    page: bool = setting("Server", "Serve pages: / to chat, /docs about the API, /operations for operators.", True)
    cors_origins: Names = setting(
        "Server",
        "Origins whose pages may use the gateway from a browser, separated by commas; * for any. By default no other.",
        (),
        "",
    )
    drain_timeout_s: _Seconds = setting(
        "Server",
        "How long answers may continue after SIGTERM. Streams that are still open then get an event that "
        "says how to continue elsewhere.",
        20.0,
    )

    commit_after_s: _Seconds = setting(
        "Streams",
        "How long the status of a streamed answer is held back for errors before the first token.",
        10.0,
    )
    ping_interval_s: _Seconds = setting(
        "Streams", "Time between comments in a silent stream, which keep proxies from closing it.", 15.0
    )
    abandon_after_s: _Seconds = setting(
        "Streams", "How long a request with an Idempotency-Key continues without readers.", 30.0
    )

    max_body_bytes: _Bytes = setting(
        "Limits of HTTP",
        "Bytes of one body; JSON may take three times as many. A worker's limit is lower by default.",
        ByteSize(4 << 20),
    )
    max_file_bytes: _Bytes = setting(
        "Limits of HTTP", "Bytes of one uploaded file, within the limit of the store.", ByteSize(200 << 20)
    )
    max_bodies_bytes: _Bytes = setting(
        "Limits of HTTP",
        "Bytes of large bodies that a process reads at once; more are refused for the moment.",
        ByteSize(256 << 20),
    )
    max_prompts: Annotated[int, Field(ge=1)] = setting(
        "Limits of HTTP", "Prompts in one request for completions; each becomes a request to the queue.", 128
    )
    max_header_bytes: Annotated[ByteSize, Field(ge=1024)] = setting(
        "Limits of HTTP", "Bytes of the request line and headers of one request.", ByteSize(64 << 10)
    )
    max_connections: Annotated[int, Field(ge=1, le=1 << 20)] = setting(
        "Limits of HTTP",
        "Connections of one process with a request; more get 503. Probes and some idle connections come on top.",
        4096,
    )
    header_timeout_s: _Seconds = setting(
        "Limits of HTTP", "From the connection to the end of the TLS handshake, and of the headers.", 10.0
    )
    body_timeout_s: _Seconds = setting("Limits of HTTP", "From the headers to the end of the body.", 120.0)
    idle_timeout_s: _Seconds = setting(
        "Limits of HTTP", "How long a connection may be idle; a proxy in front needs a shorter limit.", 75.0
    )
    stall_timeout_s: _Seconds = setting("Limits of HTTP", "How long a client may read nothing of its answer.", 60.0)

    keep_responses_s: Annotated[int, Field(ge=MIN_KEEP_S)] = setting(
        "Store",
        "How long a stored response is kept after its end, within the workers' max_keep_s.",
        86_400,
    )
    keep_files_s: Annotated[int, Field(ge=MIN_FILE_S, le=MAX_FILE_S)] = setting(
        "Store",
        "How long files, uploaded or written by batches, and ended batches are kept, unless their clients"
        " say otherwise.",
        7 * 86_400,
    )
    max_store_share: Annotated[float, Field(gt=0.0, le=0.9)] = setting(
        "Store",
        "Share of Redis's maxmemory (of the machine's memory if that is 0) for stored responses, files "
        "and batches of all gateways together.",
        0.25,
    )
    max_store_bytes: Annotated[ByteSize | None, Field(ge=1), OrNone] = setting(
        "Store", "The same in bytes, if that is less; none: only the share counts.", None
    )

    max_batch_lines: Annotated[int, Field(ge=1, le=1000)] = setting(
        "Batches", "Lines of one batch in the queue at once, waiting or running.", 64
    )
    batch_lease_s: _Seconds = setting(
        "Batches", "How long a batch waits for its gateway before another one takes it over.", 15.0
    )

    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "Logs",
        "Lowest level that is logged; each request is an info. Where it is not set, the worker's setting.",
        "info",
    )
    log_format: Literal["auto", "json", "console"] = setting(
        "Logs",
        "Form of the log lines; auto: console on a terminal, JSON elsewhere. Where it is not set, the "
        "worker's setting.",
        "auto",
    )
    otel: bool = setting(
        "Logs",
        "Send traces and metrics by OpenTelemetry, as the OTEL_* variables say; needs the extra otel.",
        False,
    )

    @field_validator("redis_url", "operator_redis_url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is not None:
            check_files(parse_url(value))
        return value

    @field_validator("queues")
    @classmethod
    def _check_queues(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for queue in value:
            if not ID_PATTERN.fullmatch(queue):
                raise ValueError(f"a queue's name has 1 to 128 of the characters A-Z a-z 0-9 _ . : -, not {queue!r}")
            if queue == keys.GATEWAY:
                raise ValueError(f"no queue is called {queue!r}: the gateway's own keys are")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is not an origin as browsers send it: scheme://host or scheme://host:port, or *"
                )
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _check_proxies(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            try:
                ip_network(name, strict=False)
            except ValueError:
                raise ValueError(f"{name!r} is neither an address nor a network, as 10.0.0.0/8") from None
        return value

    @field_validator("host")
    @classmethod
    def _check_host(cls, value: str) -> str:
        if not value:
            raise ValueError("an address is needed; * stands for all")
        if not is_host(value):
            raise ValueError("must be a host or an address")
        return value

    @model_validator(mode="after")
    def _check_tls(self) -> GatewaySettings:
        if (self.tls_key is None) != (self.tls_certificate is None):
            missing = "tls_key" if self.tls_key is None else "tls_certificate"
            message = f"TLS needs tls_key and tls_certificate: {missing} is not set"
            raise DoNotGoTogether(message, "tls_key", "tls_certificate")
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> GatewaySettings:
        if self.metrics_port is not None and self.metrics_port + self.workers - 1 > LAST_PORT:
            message = f"metrics_port {self.metrics_port} and the next ones of {self.workers} workers end at {LAST_PORT}"
            raise DoNotGoTogether(message, "metrics_port", "workers")
        return self
