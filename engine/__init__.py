"""Penstock's engine: token ids in, tokens and text out. Continuous batching over a paged KV cache, on any JAX device.

`Engine` is driven step by step; `EngineDriver` runs one on a thread of its own for asyncio. Neither knows of Redis.
"""

from __future__ import annotations

from penstock.engine.config import EngineConfig
from penstock.engine.driver import EngineDriver
from penstock.engine.engine import Engine
from penstock.engine.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    InvalidRequest,
    PromptTooLong,
    RequestError,
)
from penstock.engine.request import Output, Request, SamplingParams, TokenLogprob
from penstock.engine.stats import EngineInfo, EngineStats

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineDriver",
    "EngineError",
    "EngineInfo",
    "EngineStats",
    "InvalidRequest",
    "Output",
    "PromptTooLong",
    "Request",
    "RequestError",
    "SamplingParams",
    "TokenLogprob",
]
