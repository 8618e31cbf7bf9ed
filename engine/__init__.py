"""Penstock's engine: token ids in, tokens and text out. Continuous batching over a paged KV cache, on any JAX device.

`Engine` is driven step by step; `EngineDriver` runs one on a thread of its own for asyncio. Neither knows of Redis.
"""

from __future__ import annotations

from penstock.engine.config import EngineConfig
from penstock.engine.driver import EngineDriver, EngineStats
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

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineDriver",
    "EngineError",
    "EngineStats",
    "InvalidRequest",
    "Output",
    "PromptTooLong",
    "Request",
    "RequestError",
    "SamplingParams",
    "TokenLogprob",
]
