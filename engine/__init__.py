"""Penstock's engine: token ids in, tokens and text out. Continuous batching over a paged KV cache, on any JAX device.

`Engine` is driven step by step; `EngineDriver` runs one on a thread of its own for asyncio. Neither knows of Redis.
"""

from __future__ import annotations

from engine.config import EngineConfig
from engine.driver import EngineDriver, EngineStats
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError, EngineError, InvalidRequest, PromptTooLong, RequestError
from engine.request import Output, Request, SamplingParams, TokenLogprob

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
