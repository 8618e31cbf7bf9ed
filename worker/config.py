"""The settings of a worker, except its model and its Redis."""

from __future__ import annotations

import os
import re
import secrets
import socket
from dataclasses import dataclass, field

from penstock.protocol import keys
from penstock.protocol.redis.hosts import is_host
from penstock.protocol.wire import ID_PATTERN, MAX_KEEP_S, MIN_KEEP_S
from penstock.worker.errors import BadWorkerConfig

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

    queue: str = "default"
    name: str = field(default_factory=default_name)

    heartbeat_ttl_s: float = 10.0  # the longest silence before other workers take over
    reclaim_interval_s: float = 2.0  # between two looks for dead workers, give or take a quarter
    block_ms: int = 1000  # one blocking read: how long a drain may wait for it, and a handed-back entry for its taker
    steal_after_ms: int = 500  # how long an entry is left to the worker that has seen similar prompts
    flush_interval_ms: int = 30  # chunks of one reply are joined for this long; its first text is not held
    max_flush_interval_ms: int = 200  # the most it is stretched to while processors are short
    cancel_poll_ms: int = 200
    drain_timeout_s: float = 30.0
    refused_drain_after_s: float = 300.0  # how long Redis may refuse for good before the worker gives up
    allow_other_fleet: bool = False  # whether to join workers that have another model, tokenizer or template
    model_wait_s: float = 300.0  # half-written replies wait for a worker with the model that began them
    target_wait_s: float = 60.0  # for scaling: waiting requests should begin within this
    suspect_wait_s: float = 10.0  # how long others go before a request that two crashes had in common
    max_attempts: int = 3  # workers that a request may bring down in a row without progress

    reply_ttl_s: float = 86_400.0  # of an unfinished reply, from its last refresh
    reply_ttl_after_end_s: float = 3600.0
    # For dead letters. Malformed entries are kept apart, up to a tenth of this number and of these bytes.
    max_dead_entries: int = 10_000
    max_dead_bytes: int = 256 << 20
    dead_ttl_s: float = 14 * 86_400.0

    max_body_bytes: int = 1 << 20
    max_prompt_tokens: int | None = None  # None: what the model and its page pool can hold
    max_stop_strings: int = 16
    max_stop_chars: int = 256  # of one stop string
    max_n: int = 8
    max_keep_s: float = 7 * 86_400.0  # bounds what a request may ask for instead of reply_ttl_after_end_s

    health_host: str = "127.0.0.1"  # loopback only; the image sets another address for its containers
    health_port: int | None = 8080  # 0: any free one; None: no health server

    def __post_init__(self) -> None:
        for name in ("queue", "name"):
            _require(bool(ID_PATTERN.fullmatch(getattr(self, name))), name, getattr(self, name), ID_PATTERN.pattern)
        _require(
            self.name not in keys.HOLDERS, "name", self.name, "another one: this stands for entries without a worker"
        )
        _require(self.queue != keys.GATEWAY, "queue", self.queue, "another one: the gateway's own keys are called so")
        for name in (
            "heartbeat_ttl_s", "reclaim_interval_s", "block_ms", "cancel_poll_ms", "reply_ttl_s", "target_wait_s",
            "reply_ttl_after_end_s", "max_attempts", "max_dead_entries", "max_dead_bytes", "dead_ttl_s",
            "max_body_bytes", "max_n",
        ):  # fmt: skip
            _require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for name in (
            "model_wait_s",
            "suspect_wait_s",
            "steal_after_ms",
            "flush_interval_ms",
            "max_flush_interval_ms",
            "drain_timeout_s",
            "refused_drain_after_s",
            "max_stop_strings",
            "max_stop_chars",
        ):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        _require(self.max_prompt_tokens is None or self.max_prompt_tokens > 0, "max_prompt_tokens",
                 self.max_prompt_tokens, "above 0")  # fmt: skip
        _require(is_host(self.health_host), "health_host", self.health_host, "an address")  # "" would be all addresses
        _require(self.health_port is None or 0 <= self.health_port < 65_536, "health_port", self.health_port,
                 "0 to 65535")  # fmt: skip
        _require(self.dead_ttl_s <= MAX_DEAD_TTL_S, "dead_ttl_s", self.dead_ttl_s, f"at most {MAX_DEAD_TTL_S}")
        _require(MIN_KEEP_S <= self.max_keep_s <= MAX_KEEP_S, "max_keep_s", self.max_keep_s,
                 f"{MIN_KEEP_S} to {MAX_KEEP_S}")  # fmt: skip
        # Three heartbeats are sent within a time to live. A read that blocks for longer makes the worker miss none, but
        # a drain and a takeover wait for it.
        _require(self.block_ms <= 10_000, "block_ms", self.block_ms, "at most 10000")


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise BadWorkerConfig(f"{name} must be {expected}, not {value!r}", name)
