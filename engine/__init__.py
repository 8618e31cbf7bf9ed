"""Penstock's engine: token ids in, tokens and text out. Continuous batching over a paged KV cache, on any JAX device.

`Engine` is driven step by step; `EngineDriver` runs one on a thread of its own for asyncio. Neither knows about Redis.

Only `Engine` needs JAX, which takes seconds to import and which a client may not have installed, so it is imported on
first use. Settings, requests and errors are plain Python.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.engine.config import EngineConfig
from penstock.engine.driver import EngineDriver
from penstock.engine.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    InvalidRequest,
    PromptTooLong,
    RequestError,
)
from penstock.engine.request import (
    Output,
    Prefill,
    Request,
    ResponseSpec,
    SamplingParams,
    TokenLogprob,
    Tool,
    ToolCallDelta,
    TopLogprob,
)
from penstock.engine.stats import EngineInfo, EngineStats

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

# As transformers is imported it warns that torch is missing, which nothing here needs.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

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
    "Prefill",
    "PromptTooLong",
    "Request",
    "RequestError",
    "ResponseSpec",
    "SamplingParams",
    "TokenLogprob",
    "Tool",
    "ToolCallDelta",
    "TopLogprob",
]


def __getattr__(name: str) -> Any:
    if name != "Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("penstock.engine.engine").Engine
