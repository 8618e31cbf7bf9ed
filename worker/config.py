"""The settings of a worker, except its model and its Redis, declared once: `worker.settings` follows."""

from __future__ import annotations

import os
import re
import secrets
import socket
from dataclasses import dataclass, field
from typing import Annotated

from penstock.engine.setting import Setting, faults
from penstock.protocol import keys
from penstock.protocol.redis.hosts import is_host
from penstock.protocol.wire import ID_PATTERN, MAX_KEEP_S, MIN_KEEP_S
from penstock.worker.errors import BadWorkerConfig

_MODEL_NAME = re.compile(r"[^\s,]{1,256}")
MAX_DEAD_TTL_S = 10 * 365 * 86_400  # far below Redis's limit for a time to live


def default_name() -> str:
    """Names this process: unique, so that no two workers share a list of pending entries."""
    try:
        host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:64]
    except (OSError, UnicodeError):  # a sandbox that hides it
        host = "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of a worker, validated.

    Raises:
        BadWorkerConfig: a value is out of range; the message names it.
    """

    queue: Annotated[str, Setting("The queue that requests are sent to and taken from.", group="Redis")] = "default"
    name: Annotated[
        str,
        Setting(
            "Name of this worker, unique in its queue; none: the host's name, the process id and a random part.",
        ),
    ] = field(default_factory=default_name)
    served_model_name: Annotated[
        tuple[str, ...],
        Setting(
            "Names by which requests ask for the model, separated by commas, instead of what `model` says. The first "
            "is in metrics and reports. Set it alike for all workers of a queue.",
        ),
    ] = ()
    flush_interval_ms: Annotated[
        int,
        Setting("How long tokens are gathered into one chunk; a reply's first text is not held.", least=0),
    ] = 30
    max_flush_interval_ms: Annotated[
        int,
        Setting(
            "How long flush_interval_ms may become on busy processors; if below flush_interval_ms, it never grows.",
            least=0,
        ),
    ] = 200
    drain_timeout_s: Annotated[
        float,
        Setting(
            "How long running requests may continue after SIGTERM before they are handed to other workers.", least=0
        ),
    ] = 30.0
    refused_drain_after_s: Annotated[
        float,
        Setting(
            "How long Redis may refuse the password or permissions of a running worker before it drains and "
            "exits with 5. It is not ready meanwhile, and reads user and password of redis_url again.",
            least=0,
        ),
    ] = 300.0
    heartbeat_ttl_s: Annotated[
        float,
        Setting("The longest silence of a worker before others take over its requests.", above=0),
    ] = 10.0
    # Give or take a quarter.
    reclaim_interval_s: Annotated[float, Setting("Time between two looks for dead workers.", above=0)] = 2.0
    # Three heartbeats are sent within a time to live. A read that blocks for longer makes the worker miss none, but a
    # drain and a takeover wait for it.
    block_ms: Annotated[
        int,
        Setting("The longest blocking read of the queue.", above=0, most=10_000),
    ] = 1000
    steal_after_ms: Annotated[
        int,
        Setting(
            "How long a request is left to a worker with capacity that has run prompts with the same prefix.",
            least=0,
        ),
    ] = 500
    cancel_poll_ms: Annotated[
        int,
        Setting("Time between two looks for cancelled requests; an eighth of it after one that found some.", above=0),
    ] = 200
    allow_other_fleet: Annotated[
        bool,
        Setting(
            "Join a queue whose workers have other weights, another tokenizer or chat template, as in a "
            "rolling upgrade. Half-written replies are left to workers of the model that began them.",
        ),
    ] = False
    model_wait_s: Annotated[
        float,
        Setting(
            "How long a half-written reply waits, without a worker that has the model that began it (and rounds "
            "alike, for an `exact` request), before it ends with an error.",
            least=0,
        ),
    ] = 300.0
    exact_wait_s: Annotated[
        float,
        Setting(
            "How long a half-written reply is left to workers that round alike (`arithmetic`), from when its worker "
            "died or handed it back; then any continues it, and says so. Set it alike for all workers of a queue.",
            least=0,
            most=600,
        ),
    ] = 3.0
    target_wait_s: Annotated[
        float,
        Setting(
            "How soon waiting requests should begin: `penstock_wanted_workers` follows from it. Set it alike "
            "for all workers of a queue.",
            above=0,
        ),
    ] = 60.0
    suspect_wait_s: Annotated[
        float,
        Setting(
            "How long a request that was there when two workers in a row died waits to run alone; then the "
            "requests beside it wait again.",
            least=0,
        ),
    ] = 10.0
    max_attempts: Annotated[
        int,
        Setting("Workers that a request may take down in a row before it goes to the dead-letter stream.", above=0),
    ] = 3
    max_dead_entries: Annotated[
        int,
        Setting(
            "Dead letters that a queue keeps, the newest; a tenth of it for malformed entries.",
            above=0,
        ),
    ] = 10_000
    max_dead_bytes: Annotated[
        int,
        Setting(
            "Bytes of dead letters that a queue keeps, the newest; a tenth of it for malformed entries.",
            above=0,
        ),
    ] = 256 << 20
    dead_ttl_s: Annotated[
        float,
        Setting(
            "How long a dead letter is kept; up to twice as long if no further one comes.",
            above=0,
            most=MAX_DEAD_TTL_S,
        ),
    ] = 14 * 86_400.0
    reply_ttl_s: Annotated[
        float,
        Setting("How long an unfinished reply is kept without a refresh.", above=0),
    ] = 86_400.0
    reply_ttl_after_end_s: Annotated[float, Setting("How long a reply is kept after its end.", above=0)] = 3600.0
    max_body_bytes: Annotated[int, Setting("Bytes of one request entry.", above=0, group="Limits")] = 1 << 20
    max_prompt_tokens: Annotated[
        int | None,
        Setting("Tokens of one prompt; none: what the model and the KV cache can hold.", above=0, group="Limits"),
    ] = None
    max_stop_strings: Annotated[int, Setting("Stop strings of one request.", least=0, group="Limits")] = 16
    max_stop_chars: Annotated[int, Setting("Characters of one stop string.", least=0, group="Limits")] = 256
    max_n: Annotated[int, Setting("Choices (`n`) of one request.", above=0, group="Limits")] = 8
    max_keep_s: Annotated[
        float,
        Setting(
            "The longest time that a request may have its reply kept after its end (`keep_s`).",
            least=MIN_KEEP_S,
            most=MAX_KEEP_S,
            group="Limits",
        ),
    ] = 7 * 86_400.0
    # Loopback only; the image sets another address for its containers.
    health_host: Annotated[
        str,
        Setting(
            "Address of /healthz, /readyz and /metrics; * is all addresses, as in the image.",
            group="Health and logs",
        ),
    ] = "127.0.0.1"
    health_port: Annotated[
        int | None,
        Setting(
            "Port of /healthz, /readyz and /metrics; 0: any free one, none: no such server. Where it is not set and "
            "8080 is taken, any free one.",
            least=0,
            most=65_535,
            group="Health and logs",
        ),
    ] = 8080

    def __post_init__(self) -> None:
        for name in ("queue", "name"):
            _require(bool(ID_PATTERN.fullmatch(getattr(self, name))), name, getattr(self, name), ID_PATTERN.pattern)
        _require(
            self.name not in keys.HOLDERS, "name", self.name, "another one: this stands for entries without a worker"
        )
        _require(self.queue != keys.GATEWAY, "queue", self.queue, "another one: the gateway's own keys are called so")
        for name in self.served_model_name:
            _require(bool(_MODEL_NAME.fullmatch(name)), "served_model_name", name, _MODEL_NAME.pattern)
        _require(is_host(self.health_host), "health_host", self.health_host, "an address")  # "" would be all addresses
        for name, fault in faults(self):
            raise BadWorkerConfig(f"{name} {fault}", name)

    def names_of(self, model: str) -> tuple[str, ...]:
        """Returns the names by which requests ask for the worker's model."""
        return self.served_model_name or (model,)


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise BadWorkerConfig(f"{name} must be {expected}, not {value!r}", name)
