"""What other stacks were reported to reach on TPUs, as the share of a bound that is the same for all.

The bound is that of a decode step's bytes: all weights and all live KV once. A time per output token also holds the
prefill of other prompts, the host and the network, so nobody can reach 1. A plan expects a step to take its own bound
over the highest and the lowest of these shares.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    source: str
    model: str  # a preset
    topology: str
    tensor: int
    batch: int
    context: int  # tokens of a sequence, half-way through its output
    token_s: float  # time per output token, of a sequence
    share: float  # of the bound in that time
    weights: str = "auto"
    kv_dtype: str = "auto"


_RECIPES = "AI-Hypercomputer/tpu-recipes"
_SGLANG = "sglang-jax's benchmarks"
PUBLISHED = (
    Published(_RECIPES, "Llama-3.3-70B", "v6e:2x4", 8, 64, 1536, 0.0254, 0.51),
    Published(_RECIPES, "Llama-3.3-70B", "v6e:2x4", 8, 128, 1536, 0.0351, 0.44),
    Published(_SGLANG, "Qwen3-8B", "v6e:2x2", 4, 64, 1536, 0.0111, 0.41),
    Published(_SGLANG, "Qwen3-8B", "v6e:2x2", 4, 256, 1536, 0.030, 0.37),
    Published(_SGLANG, "Llama-3.1-8B", "v6e:2x2", 4, 16, 768, 0.0099, 0.26),
    Published(_RECIPES, "Qwen3-32B", "tpu7x:2x2x1", 2, 320, 1536, 0.0488, 0.27, "fp8", "float8_e4m3fn"),
)
SHARES = (min(row.share for row in PUBLISHED), max(row.share for row in PUBLISHED))


def expected_s(bound_s: float) -> tuple[float, float]:
    """Returns the range in which a step should lie whose bound takes `bound_s`."""
    return bound_s / SHARES[1], bound_s / SHARES[0]
