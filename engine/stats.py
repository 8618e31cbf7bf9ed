"""What an engine reports about itself: what it is, fixed when it is made, and how it stands between two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

ReportProgress = Callable[[int, int, str], None]
"""Called with how much of a long piece of work is done, how much there is in all, and of what."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The model, the devices it is on, and what computes there."""

    num_parameters: int
    dtype: str  # of weights and activations
    kv_dtype: str  # of keys and values in the pages
    kv_cache_tokens: int  # that fit into the pages together
    kv_cache_bytes: int  # over all devices
    max_model_len: int  # prompt and generated tokens of one sequence
    platform: str  # cpu, gpu or tpu
    device_kind: str
    num_devices: int
    attention: str  # as the setting `attention` names it; never auto
    matmul: str  # as the setting `matmul` names it; never auto
    fallback: str | None  # why a CPU does without the C++ kernels that `auto` asks for; None where it does not
    vocab_size: int  # token ids are below it
    num_state_slots: int = 0  # for states of layers that keep such, of sequences and of prefixes
    state_cache_bytes: int = 0  # of all of them, over all devices
    unkept: str | None = None  # why compiled programs cannot be kept; None where they are, or are not to be
    batch_invariant: bool = False  # whether log-probabilities are the same to the bit in any batch (docs/guarantees.md)


class KindStats(NamedTuple):
    """Pages of one kind."""

    num_pages: int
    num_free: int
    num_cached: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Of one device, as its runtime counts it. A CPU's does not: there it is the process's memory."""

    device: int  # as jax numbers it
    used_bytes: int
    peak_bytes: int  # that were ever in use
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A consistent look at the engine between two steps. Totals only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_cached_pages: int = 0
    kinds: tuple[KindStats, ...] = ()  # of these pages, where layers differ in their KV heads
    num_state_slots: int = 0
    num_free_state_slots: int = 0
    num_cached_state_slots: int = 0
    steps_total: int = 0
    prompt_tokens_total: int = 0  # of requests taken on, each once, whatever its number of choices
    cached_tokens_total: int = 0  # of those, saved by the prefix cache, of requests whose first choice has ended
    prefix_queries_total: int = 0  # tokens of sequences as they start, after a preemption too
    prefix_hits_total: int = 0  # of those, found in the prefix cache; the others are computed
    generated_tokens_total: int = 0
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0  # of those that were drafted
    preemptions_total: int = 0
    faults_total: int = 0  # steps that raised; their sequences were run again
    compiles_after_warmup_total: int = 0


def worth_trying(num_waiting: int, num_pages: int, limit: int) -> int:
    """How many more sequences an engine should be given, of `limit` that have a place.

    While one waits that found no pages, and `num_pages` are left, that is one: it may need fewer. Once it waits too,
    others of the fleet may have room for what comes.
    """
    if num_waiting == 1 and num_pages:
        return min(1, limit)
    return 0 if num_waiting else limit
