"""How long a step takes: bytes over bandwidth, matmuls over peak, the compiler's cycles, and links between devices.

The formulas can be checked by hand. They are per device, with n devices of one replica:

- Weights that a step reads: all that a device holds once, except that an embedding not tied to the head counts one row
  per token. Quantized weights count the bytes of their codes, scales and zeros. Weights that n does not divide, such as
  a router, count whole on each device. The head has as many rows as tokens, padded if necessary so that each share is a
  multiple of 128. With E experts, of which a token chooses k, a step of t tokens reads E (1 - (1 - k / E)^t) of them:
  the expected number of distinct ones if the router prefers none.
- KV of a token: layers x KV heads x 2 x (head_dim x bytes of an element, and 4 for the scale of 8-bit ones) / n, each
  layer with its own values. A layer with a window reads at most that many tokens of a sequence. A layer without keys
  and values of its own reads those of another, and writes none.
- States of layers that keep them are read once and written once in a decode step; a prompt's are written.
- FLOPs of matmuls: 2 x (parameters of the layers, of experts k) x tokens + 2 x (parameters of the head) x sampled rows;
  of attention 4 x layers x heads x head_dim x (tokens x keys that each sees), over n.
- An all-reduce of b bytes around a ring, both ways at once: 2 (n - 1) / n x b over two links, or over one between two
  chips (`Chip.link_rate`), and 2 (n - 1) hops. There are two per layer, of tokens x hidden x bytes of an element, and
  one after the embedding. If the compiler prints the program, the collectives in it count instead; of those that
  overlap with compute, only the wait for them counts (`links.py`).
- Logits of r rows and v tokens: for greedy rows, each device's three words are gathered, n - 1 hops each time. Other
  rows are exchanged around the ring, both ways at once: a quarter of what gathering would take, 4 r v / 4 bytes over
  two links; then their tokens are gathered.
- At the roofline a step takes the longer of bytes / bandwidth and FLOPs / peak, over everything it moves and computes.
- The second estimate is the compiler's: cycles / clock of all XLA code in the step, waiting for memory included, plus
  kernels, which run between XLA's fusions. Each takes the longest of bytes / bandwidth, FLOPs / peak and, if the table
  of schedules has any like it, cycles / clock (`kernel_work.py`, `schedules/scaling.py`). Attention has the pages that
  it reads and writes, and the FLOPs above (`attention_schedule.py`). Grouped matmuls have the experts that have rows,
  and 2 x tokens x k x parameters of an expert / n. Others have the bytes that they move and the FLOPs that they state.
  What the compiler has no estimate of counts like these, and so do XLA's matmuls with int8 weights: all quantized
  weights count by one rule.
- A step takes the longer of the roofline and of cycles / clock + kernels, followed by the collectives, which wait for
  it. Both estimates cover the whole step, so they are not added. A copy that runs next to other work, such as a
  prefetch into VMEM, has no cycles and counts at the roofline. If the compiler cannot print a program, or wrote no
  cycles, only the roofline counts.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp

from penstock.engine.attention import kv_head_bytes
from penstock.engine.deployment.deployment import Deployment
from penstock.engine.models import AttentionConfig, ModelConfig, layer_groups, matmul_parameters
from penstock.engine.scheduling.memory.amounts import Amount
from penstock.tools.plan.device.attention_schedule import AttentionSchedule
from penstock.tools.plan.device.chips import Chip
from penstock.tools.plan.device.hlo import Traffic
from penstock.tools.plan.device.kernel_work import KernelWork, Load, expert_cycles, kernels_of
from penstock.tools.plan.device.published import expected_s
from penstock.tools.plan.device.weights import grouped_matmul_bytes, step_weight_bytes


@dataclass(frozen=True, slots=True)
class StepTime:
    memory_s: float  # of all bytes
    compute_s: float  # of all FLOPs
    xla_s: float  # of all but kernels and collectives, as the compiler expects; 0: unknown
    kernels_s: float  # on top of `xla_s`; 0 if that is 0
    collective_s: float

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s, self.xla_s + self.kernels_s) + self.collective_s


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of one step, on each device, by their HLO: without pages, attention's FLOPs, and experts."""

    num_bytes: float  # to and from HBM
    cycles: float  # of XLA's code; 0: not known for all programs
    kernels: tuple[KernelWork, ...] = ()

    @classmethod
    def of(cls, programs: Sequence[Traffic], weight_bytes: int, chip: Chip, load: Load, num_steps: int = 1) -> Programs:
        """Sums up the programs of a dispatch of `num_steps` steps, each of which has that load.

        `weight_bytes`, what a step reads of the weights, replaces programs that the compiler could not print.
        """
        is_counted = bool(programs) and all(program.hbm_bytes for program in programs)
        if not is_counted:
            return cls(weight_bytes, 0.0)
        total = Traffic()
        for program in programs:
            total.add(program)
        return cls(
            total.hbm_bytes / num_steps,
            total.cycles / num_steps if all(program.cycles for program in programs) else 0.0,
            tuple(kernels_of(total, chip, load, num_steps)),
        )


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step, on each device."""

    programs: Programs
    attention: KernelWork  # of pages
    experts: KernelWork  # of grouped matmuls, for experts that have rows
    flops: float  # of all matmuls, attention's and experts' included
    collective_s: float

    @property
    def num_bytes(self) -> float:
        return self.programs.num_bytes + self.attention.num_bytes + self.experts.num_bytes

    @property
    def kernels(self) -> tuple[KernelWork, ...]:
        """All kernels that do anything; none if XLA's own cycles are unknown."""
        every = (*self.programs.kernels, self.attention, self.experts) if self.programs.cycles else ()
        return tuple(kernel for kernel in every if kernel.num_bytes or kernel.flops or kernel.cycles)

    def time(self, chip: Chip) -> StepTime:
        return StepTime(
            memory_s=self.num_bytes / chip.hbm_bytes_per_s,
            compute_s=self.flops / chip.bf16_flops_per_s,
            xla_s=self.programs.cycles / chip.clock_hz,
            kernels_s=sum(kernel.seconds(chip) for kernel in self.kernels),
            collective_s=self.collective_s,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """A step's figures, per device."""

    num_tokens: int
    context: int
    bound_s: float  # of the ideal bytes or all FLOPs, whichever takes longer
    kernels: tuple[KernelWork, ...]  # what stands behind `time.kernels_s`
    ideal_bytes: int  # weights once, live KV once, new KV once, states read and written
    counted_bytes: int  # from the compiled HLO, plus pages and experts that kernels move
    flops: float
    time: StepTime

    @property
    def seconds(self) -> float:
        return self.time.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def expected_s(self) -> tuple[float, float]:
        """The range that published figures of other stacks suggest (`published.py`), no less than its own estimate."""
        low, high = expected_s(self.bound_s)
        return max(low, self.seconds), max(high, self.seconds)

    @property
    def overhead(self) -> float:
        """Counted bytes over ideal bytes."""
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
    waited_s: float | None = None,
) -> Step:
    """Estimates a step in which `batch` sequences of `context` tokens each generate one token.

    Rows use temperature or other options if `is_drawn`, and are greedy otherwise. `waited_s` is the backbone's wait for
    links; None: the full time of what they carry.
    """
    model, devices = deployment.model, _devices(deployment)
    weights = step_weight_bytes(model, batch, deployment.placement)
    keys_seen = batch * _mean_keys(model, lambda window: min(context, window))
    attention = AttentionSchedule(deployment, chip)
    work = StepWork(
        programs=Programs.of((backbone, head), weights, chip, Load(batch, batch, is_drawn)),
        attention=attention.work(
            [(context, 1)] * batch,
            batch * kv_bytes_moved(deployment, context),
            attention_flops(model, keys_seen) / devices,
        ),
        experts=expert_load(deployment, chip, batch, backbone),
        flops=step_flops(model, batch, batch, keys_seen) / devices,
        collective_s=(collective_s(model, batch, devices, chip) if waited_s is None else waited_s)
        + logits_s(model, batch, devices, chip, is_drawn=is_drawn),
    )
    ideal = weights + batch * kv_sequence_bytes(model, deployment.kv_dtype, context + 1) // devices
    ideal += 2 * batch * deployment.state_bytes
    return _step(work, chip, batch, context, ideal)


def prefill_step(
    deployment: Deployment,
    chip: Chip,
    num_tokens: int,
    programs: Sequence[Traffic] = (),
    waited_s: float | None = None,
) -> Step:
    """Estimates one prompt of `num_tokens` in one step: the time to its first token on an idle engine.

    `programs` are the backbone and the head, if they were compiled; `waited_s` is that of `decode_step`.
    """
    model, devices = deployment.model, _devices(deployment)
    weights = step_weight_bytes(model, num_tokens, deployment.placement)
    kv_bytes = num_tokens * kv_token_bytes(model, deployment.kv_dtype) // devices
    keys_seen = _mean_keys(model, lambda window: _pairs(num_tokens, window))
    attention = AttentionSchedule(deployment, chip)
    work = StepWork(
        programs=Programs.of(programs, weights, chip, Load(num_tokens, 1, is_drawn=False)),
        attention=attention.work([(0, num_tokens)], kv_bytes, attention_flops(model, keys_seen) / devices),
        experts=expert_load(deployment, chip, num_tokens, programs[0]) if programs else KernelWork(),
        flops=step_flops(model, num_tokens, 1, keys_seen) / devices,
        collective_s=(collective_s(model, num_tokens, devices, chip) if waited_s is None else waited_s)
        + logits_s(model, 1, devices, chip),
    )
    return _step(work, chip, num_tokens, 0, weights + kv_bytes + deployment.state_bytes)


def _step(work: StepWork, chip: Chip, num_tokens: int, context: int, ideal_bytes: int) -> Step:
    bound_s = max(ideal_bytes / chip.hbm_bytes_per_s, work.flops / chip.bf16_flops_per_s)
    num_bytes = round(work.num_bytes)
    return Step(num_tokens, context, bound_s, work.kernels, ideal_bytes, num_bytes, work.flops, work.time(chip))


def expert_load(
    deployment: Deployment, chip: Chip, num_tokens: int, program: Traffic, num_steps: int = 1
) -> KernelWork:
    """Returns the grouped matmuls' load for `num_tokens` in a step, one of `num_steps` in a dispatch of `program`."""
    plain, quantized = program.grouped_matmuls // num_steps, program.quantized_grouped_matmuls // num_steps
    if not plain and not quantized:
        return KernelWork()
    model = deployment.model
    of_experts = partial(grouped_matmul_bytes, model, num_tokens, deployment.placement)
    num_bytes = of_experts(plain) + of_experts(quantized, quantized=True)
    chosen = matmul_parameters(model, lambda mixture: mixture.num_chosen) - matmul_parameters(model, lambda _: 0)
    cycles, basis = expert_cycles(deployment, chip, num_tokens, program)
    return KernelWork(num_bytes, 2 * chosen * num_tokens / _devices(deployment), cycles / num_steps, "experts", basis)


def kv_token_bytes(model: ModelConfig, kv_dtype: str) -> int:
    """Returns the KV bytes of one token in all layers that keep any, over all devices of a replica."""
    return sum(_layer_bytes(attention, kv_dtype) for attention in model.kept)


def kv_sequence_bytes(model: ModelConfig, kv_dtype: str, num_tokens: int) -> int:
    """Returns the KV bytes of the tokens that a sequence's last token sees, over all layers and devices."""
    return sum(
        _layer_bytes(attention, kv_dtype) * min(num_tokens, attention.sliding_window or num_tokens)
        for attention in model.attentions
    )


def _layer_bytes(attention: AttentionConfig, kv_dtype: str) -> int:
    """Returns the KV bytes of a token that a layer reads."""
    return 2 * attention.num_kv_heads * kv_head_bytes(attention.head_dim, kv_dtype)


def kv_bytes_moved(deployment: Deployment, context: int) -> int:
    """Returns the KV bytes that decoding after `context` tokens moves on each device, in whole padded page rows."""
    pages_per_seq = -(-deployment.max_model_len // deployment.page_size)
    kinds = deployment.cache_spec(Amount((2,) * len(deployment.kind_bytes))).kinds
    groups = layer_groups(deployment.model)
    layers = Counter(
        (place.kind, attention.sliding_window, attention.has_kv)
        for place, attention in zip(groups.pages, deployment.model.attentions, strict=True)
    )
    rows = [0] * len(kinds)
    for (kind, window, writes), count in layers.items():
        read, written = deployment.attention.rows_moved(context, kinds[kind], pages_per_seq, window)
        rows[kind] += count * (read + (written if writes else 0))
    return sum(
        num_rows * num_bytes // (deployment.page_size * kind.num_layers)
        for num_rows, num_bytes, kind in zip(rows, deployment.kind_bytes, kinds, strict=True)
    )


def _pairs(num_tokens: int, window: int) -> int:
    """Returns the number of pairs of a prompt's tokens with the tokens they see, themselves included."""
    short = min(num_tokens, window)
    return short * (short + 1) // 2 + (num_tokens - short) * short


def _mean_keys(model: ModelConfig, seen: Callable[[int], int]) -> int:
    """Returns the mean of keys seen with each layer's window, weighted by the layers' head features."""
    features = [attention.num_mixed for attention in model.attentions]
    counts = [seen(attention.sliding_window or sys.maxsize) for attention in model.attentions]
    return round(statistics.fmean(counts, features))


def step_flops(model: ModelConfig, num_tokens: int, num_rows: int, num_keys_seen: int) -> float:
    """Returns the FLOPs over all devices of a replica."""
    matmuls = 2 * matmul_parameters(model, lambda mixture: mixture.num_chosen) * num_tokens
    head = 2 * model.vocab_rows * model.hidden_size * num_rows
    return float(matmuls + head) + attention_flops(model, num_keys_seen)


def attention_flops(model: ModelConfig, num_keys_seen: float) -> float:
    """Returns the FLOPs over all devices of a replica."""
    return 4.0 * num_keys_seen * sum(attention.num_mixed for attention in model.attentions)


def collective_s(model: ModelConfig, num_tokens: int, devices: int, chip: Chip) -> float:
    if devices == 1:
        return 0.0
    num_bytes = num_tokens * model.hidden_size * int(jnp.dtype(model.dtype).itemsize)
    return (2 * model.num_layers + 1) * all_reduce_s(num_bytes, devices, chip)


def all_reduce_s(num_bytes: int, devices: int, chip: Chip) -> float:
    return 2 * (devices - 1) / devices * num_bytes / chip.link_rate(devices) + 2 * (devices - 1) * chip.hop_s


def logits_s(model: ModelConfig, num_rows: int, devices: int, chip: Chip, *, is_drawn: bool = False) -> float:
    """Returns the seconds that devices take to exchange the logits of `num_rows` rows."""
    if devices == 1:
        return 0.0
    word = (devices - 1) / devices * 4 * num_rows / chip.link_rate(devices) + (devices - 1) * chip.hop_s
    if not is_drawn:
        return 3 * word
    exchanged = 4 * num_rows * model.vocab_rows
    return exchanged / 4 / chip.link_rate(devices) + devices / 2 * chip.hop_s + word


def _devices(deployment: Deployment) -> int:
    return 1 if deployment.placement is None else deployment.placement.num_shares
