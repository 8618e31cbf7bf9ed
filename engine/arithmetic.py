"""Names the arithmetic of an engine: what decides how its sums are rounded, besides the model and the tokens."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping

import jax
from jaxlib.version import __version__ as jaxlib_version

from penstock.engine.config import EngineConfig
from penstock.engine.processors import cpu_facts, num_processors, vector_features
from penstock.engine.stats import EngineInfo

_CHARS = 16
_SHAPING = ("max_num_seqs", "max_batch_tokens", "page_size", "decode_steps", "speculation", "max_draft_tokens")
"""Settings that decide which tokens one program computes together."""
_TPU_KERNELS = 6
"""A version: raise it with each change of how TPU kernels, attention's included, round or order their sums."""


def arithmetic_of(info: EngineInfo, config: EngineConfig) -> str:
    """Returns 16 hex digits. Engines of one version and model round alike if their digits are equal.

    Engines with different digits may still round alike: two kinds of processors always count as two arithmetics. An
    engine that is `batch_invariant` rounds alike whatever its batches and threads. For any other engine, the digits
    also depend on threads, on the settings that shape batches, and on choices that were made by timing at the start
    (`same_tokens` off).
    """
    return hashlib.sha256(json.dumps(_facts(info, config), sort_keys=True).encode()).hexdigest()[:_CHARS]


def _facts(info: EngineInfo, config: EngineConfig) -> Mapping[str, object]:
    facts: dict[str, object] = {
        "versions": (jax.__version__, jaxlib_version),
        "kernels": (info.attention, info.matmul, info.instructions),
        "types": (info.dtype, info.kv_dtype),
        "device": (info.platform, info.device_kind, *(_processor() if info.platform == "cpu" else ())),
        "split": (info.num_devices, config.tensor_parallel, config.expert_parallel),
        "same_tokens": config.same_tokens,
    }
    if info.platform == "tpu":
        facts["tpu_kernels"] = _TPU_KERNELS
    if not info.batch_invariant:
        facts["batches"] = [getattr(config, name) for name in _SHAPING]
        facts["threads"] = num_processors() if info.platform == "cpu" else None
        facts["loops"] = info.loops
    return facts


def _processor() -> tuple[str, ...]:
    """Returns the kind of the processor and its vector instructions, for which XLA and the C++ kernels are compiled."""
    facts = {tuple(part.strip() for part in line.split(":", 1)) for line in cpu_facts("model name", "CPU part")}
    return (platform.machine(), *(value for fact in sorted(facts) for value in fact[1:]), *vector_features())
