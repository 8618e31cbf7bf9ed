"""What a step costs at best: bytes over bandwidth, matmuls over peak, and the communication between devices.

Formulas, so that they can be checked by hand, per device, with n devices of one replica:

- Weights that a step reads: all that a device holds once, but of an embedding that is not tied to the head only a row
  per token. Quantized ones count the bytes of their codes, scales and zeros; what n does not divide, such as a router,
  counts whole on each device. The head has as many rows as tokens, and where n does not divide those, as many as make
  each share a multiple of 128. Of E experts, of which a token chooses k, a step of t tokens reads
  E (1 - (1 - k / E)^t): as many different ones as are to be expected where the router prefers none.
- KV of a token: layers x KV heads x 2 x (head_dim x bytes of an element, and 4 for the scale of 8-bit ones) / n. A
  layer with a window reads no more tokens of a sequence than it has.
- FLOPs of matmuls: 2 x (parameters of the layers, of experts k) x tokens + 2 x (parameters of the head) x sampled
  rows; of attention 4 x layers x heads x head_dim x (tokens x keys that each sees), over n.
- An all-reduce of b bytes around a ring, both ways at once: 2 (n - 1) / n x b over two links, and 2 (n - 1) hops; there
  are two per layer, of tokens x hidden x bytes of an element, and one behind the embedding.
- Logits of r rows and v tokens: greedy rows gather three words of each device, n - 1 hops each time. Others are
  exchanged around the ring, both ways at once: a quarter of what gathering would take, 4 r v / 4 bytes over two links;
  and then their tokens are gathered.
- A step takes the longer of bytes / bandwidth and FLOPs / peak, and then the collectives, which wait for it.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import jax.numpy as jnp

from penstock.engine.attention import kv_head_bytes
from penstock.engine.deployment import Deployment
from penstock.engine.models import ModelConfig, matmul_parameters
from penstock.engine.planning.chips import Chip
from penstock.engine.planning.hlo import Traffic
from penstock.engine.planning.weights import grouped_matmul_bytes, step_weight_bytes


@dataclass(frozen=True, slots=True)
class Step:
    """Per device, at the roofline."""

    num_tokens: int
    context: int
    ideal_bytes: int  # weights once, live KV once, new KV once
    counted_bytes: int  # from the compiled HLO, with the pages and experts that kernels move
    flops: float
    memory_s: float
    compute_s: float
    collective_s: float

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s) + self.collective_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def overhead(self) -> float:
        """Bytes counted over the ideal."""
        return self.counted_bytes / self.ideal_bytes


def decode_step(
    deployment: Deployment,
    chip: Chip,
    batch: int,
    context: int,
    backbone: Traffic,
    head: Traffic,
    *,
    is_drawn: bool = False,
) -> Step:
    """`batch` sequences of `context` tokens each make one token more: with temperature or other options where it
    `is_drawn`, else greedily.
    """
    model, devices = deployment.model, _devices(deployment)
    weights = step_weight_bytes(model, batch, deployment.placement)
    ideal = weights + batch * kv_sequence_bytes(model, deployment.kv_dtype, context + 1) // devices
    counted = backbone.hbm_bytes + head.hbm_bytes + batch * kv_bytes_moved(deployment, context)
    counted += grouped_matmul_bytes(model, batch, deployment.placement, backbone.grouped_matmuls)
    counted += grouped_matmul_bytes(
        model, batch, deployment.placement, backbone.quantized_grouped_matmuls, quantized=True
    )
    flops = step_flops(model, batch, batch, batch * _mean(min(context, seen) for seen in _windows(model))) / devices
    return Step(
        num_tokens=batch,
        context=context,
        ideal_bytes=ideal,
        counted_bytes=counted,
        flops=flops,
        memory_s=counted / chip.hbm_bytes_per_s,
        compute_s=flops / chip.bf16_flops_per_s,
        collective_s=collective_s(model, batch, devices, chip)
        + logits_s(model, batch, devices, chip, is_drawn=is_drawn),
    )


def prefill_step(deployment: Deployment, chip: Chip, num_tokens: int) -> Step:
    """One prompt of `num_tokens` in one step: at best the time to its first token, with nothing else to do."""
    model, devices = deployment.model, _devices(deployment)
    weights = step_weight_bytes(model, num_tokens, deployment.placement)
    kv_bytes = num_tokens * kv_token_bytes(model, deployment.kv_dtype) // devices
    flops = step_flops(model, num_tokens, 1, _mean(_pairs(num_tokens, seen) for seen in _windows(model))) / devices
    return Step(
        num_tokens=num_tokens,
        context=0,
        ideal_bytes=weights + kv_bytes,
        counted_bytes=weights + kv_bytes,
        flops=flops,
        memory_s=(weights + kv_bytes) / chip.hbm_bytes_per_s,
        compute_s=flops / chip.bf16_flops_per_s,
        collective_s=collective_s(model, num_tokens, devices, chip) + logits_s(model, 1, devices, chip),
    )


def kv_token_bytes(model: ModelConfig, kv_dtype: str) -> int:
    """Of one token in all layers, over all devices of a replica."""
    return 2 * model.num_layers * model.num_kv_heads * kv_head_bytes(model.head_dim, kv_dtype)


def kv_sequence_bytes(model: ModelConfig, kv_dtype: str, num_tokens: int) -> int:
    """Of those of a sequence's tokens that its last one sees, in all layers, over all devices of a replica."""
    layer = kv_token_bytes(model, kv_dtype) // model.num_layers
    return layer * sum(min(num_tokens, seen) for seen in _windows(model))


def kv_bytes_moved(deployment: Deployment, context: int) -> int:
    """On each device, for a token that decodes behind `context` others: of whole rows of pages, as they are padded."""
    pages_per_seq = -(-deployment.max_model_len // deployment.page_size)
    spec = deployment.cache_spec(2)
    windows = Counter(block.attention.sliding_window for block in deployment.model.blocks)
    rows = sum(
        count * sum(deployment.attention.rows_moved(context, spec, pages_per_seq, window))
        for window, count in windows.items()
    )
    return rows * deployment.page_bytes // (deployment.page_size * spec.num_layers)


def _windows(model: ModelConfig) -> list[int]:
    """Of each layer, how many tokens it sees at most."""
    return [block.attention.sliding_window or sys.maxsize for block in model.blocks]


def _pairs(num_tokens: int, window: int) -> int:
    """Of a prompt's tokens with those that they see, themselves included."""
    short = min(num_tokens, window)
    return short * (short + 1) // 2 + (num_tokens - short) * short


def _mean(counts: Iterable[int]) -> int:
    """Over layers, which have the same heads."""
    return round(statistics.fmean(counts))


def step_flops(model: ModelConfig, num_tokens: int, num_rows: int, num_keys_seen: int) -> float:
    """Over all devices of a replica."""
    matmuls = 2 * matmul_parameters(model, lambda mixture: mixture.num_chosen) * num_tokens
    head = 2 * model.vocab_rows * model.hidden_size * num_rows
    heads = sum(block.attention.num_heads * block.attention.head_dim for block in model.blocks)
    attention = 4 * heads * num_keys_seen
    return float(matmuls + head + attention)


def collective_s(model: ModelConfig, num_tokens: int, devices: int, chip: Chip) -> float:
    if devices == 1:
        return 0.0
    num_bytes = num_tokens * model.hidden_size * int(jnp.dtype(model.dtype).itemsize)
    each = 2 * (devices - 1) / devices * num_bytes / (2 * chip.link_bytes_per_s) + 2 * (devices - 1) * chip.hop_s
    return (2 * model.num_layers + 1) * each


def logits_s(model: ModelConfig, num_rows: int, devices: int, chip: Chip, *, is_drawn: bool = False) -> float:
    """Of what devices tell each other of the logits of so many rows."""
    if devices == 1:
        return 0.0
    word = (devices - 1) / devices * 4 * num_rows / (2 * chip.link_bytes_per_s) + (devices - 1) * chip.hop_s
    if not is_drawn:
        return 3 * word
    exchanged = 4 * num_rows * model.vocab_rows
    return exchanged / 4 / (2 * chip.link_bytes_per_s) + devices / 2 * chip.hop_s + word


def _devices(deployment: Deployment) -> int:
    return 1 if deployment.placement is None else deployment.placement.num_shares
