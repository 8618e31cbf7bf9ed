"""What an engine reports about itself: fixed facts, and its state between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The model, its devices and the implementations that compute on them."""

    num_parameters: int
    dtype: str  # of weights and activations
    kv_dtype: str  # of keys and values in the pages
    kv_cache_tokens: int  # capacity of all pages together
    kv_cache_bytes: int  # over all devices
    max_model_len: int  # prompt and generated tokens of one sequence
    platform: str  # cpu, gpu or tpu
    device_kind: str
    num_devices: int
    attention: str  # as the setting `attention` names it; never auto
    matmul: str  # as the setting `matmul` names it; never auto
    fallback: str | None  # why a CPU lacks the C++ kernels of `auto`; None if it has them
    vocab_size: int  # token ids are below it
    num_state_slots: int = 0  # for recurrent states of sequences and prefixes
    state_cache_bytes: int = 0  # of all slots, over all devices
    exceeded_len: int | None = None  # the model's own limit, if `max_model_len` is set above it
    page_padding: float = 0.0  # share of the pages that is padding
    unkept: str | None = None  # why compiled programs cannot be cached; None if they are, or should not be
    batch_invariant: bool = False  # whether log-probabilities are the same to the bit in any batch (docs/guarantees.md)
    instructions: str | None = None  # that multiply bf16 in the C++ kernels; None: no such kernel is used
    arithmetic: str | None = None  # names how sums are rounded; None: it never matters
    loops: tuple[tuple[int, int], ...] = ()  # (row bucket, its decode steps in one dispatch), where these are several
    timed: tuple[str, ...] = ()  # choices by measured times that may change tokens (`same_tokens` off)


class KindStats(NamedTuple):
    num_pages: int
    num_free: int
    num_cached: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device, as its runtime counts it. A CPU's runtime does not: there it is the process's memory."""

    device: int  # as jax numbers it
    used_bytes: int
    peak_bytes: int  # most bytes ever in use
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A consistent snapshot of the engine between two steps. Totals only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_cached_pages: int = 0
    kinds: tuple[KindStats, ...] = ()  # the same figures by kind of page, if layers differ in their KV heads
    num_state_slots: int = 0
    num_free_state_slots: int = 0
    num_cached_state_slots: int = 0
    steps_total: int = 0
    prompt_tokens_total: int = 0  # of accepted requests, each once, whatever its number of choices
    cached_tokens_total: int = 0  # saved by the prefix cache, in requests whose first choice has ended
    prefix_queries_total: int = 0  # tokens of sequences when they start, also after a preemption
    prefix_hits_total: int = 0  # found in the prefix cache; the others are computed
    generated_tokens_total: int = 0
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0  # drafted tokens that were right
    preemptions_total: int = 0
    faults_total: int = 0  # steps that raised; their sequences were run again
    compiles_after_warmup_total: int = 0
    tool_calls_mended_total: int = 0  # calls that a model wrote with a known flaw


def worth_trying(num_waiting: int, num_pages: int, limit: int) -> int:
    """Returns how many more sequences to give the engine, out of `limit` free places.

    While one sequence waits because it found no pages, and `num_pages` are left, the answer is one: another may need
    fewer. Once that one waits too, other workers of the fleet may have room.
    """
    if num_waiting == 1 and num_pages:
        return min(1, limit)
    return 0 if num_waiting else limit
