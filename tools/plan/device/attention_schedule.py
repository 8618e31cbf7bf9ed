"""The cycles of the attention kernel in a step, from the table of schedules.

The table has plain layers: no window, no soft cap, no sinks, pages of 64 tokens, or of 128 if they are 8 bits wide.
Other layers of the same kernel count like plain layers with the same heads, over the keys that their windows reach; a
plan says so. A prompt counts as chunks of 512 tokens, each after those before it, and the last one in part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache

from penstock.engine.attention import page_size_for
from penstock.engine.deployment.deployment import Deployment
from penstock.engine.models import AttentionConfig
from penstock.tools.plan.device.chips import Chip
from penstock.tools.plan.device.kernel_work import Basis, KernelWork
from penstock.tools.plan.schedules.scaling import Cycles, cycles_of

_CHUNK = 512  # tokens of a prompt in the table's figures


class AttentionSchedule:
    """How long attention takes on each device by its schedule, for one deployment."""

    def __init__(self, deployment: Deployment, chip: Chip) -> None:
        self._layers: list[tuple[_Layer, int]] = []
        self.basis = Basis.NONE
        if deployment.attention.name != "fused":
            return
        counts = Counter(deployment.model.attentions)
        layers = [(_layer(attention, deployment, chip), count) for attention, count in counts.items()]
        self._layers = [(layer, count) for layer, count in layers if layer is not None]
        if len(self._layers) < len(layers):
            self._layers = []
        elif layers:
            self.basis = Basis.SCHEDULE if all(layer.is_exact for layer, _ in self._layers) else Basis.SCALED

    def work(self, chunks: Sequence[tuple[int, int]], num_bytes: float, flops: float) -> KernelWork:
        """Returns the work of all layers for chunks: the tokens before each, and its own."""
        cycles = sum(count * layer.cycles(chunks) for layer, count in self._layers)
        return KernelWork(num_bytes, flops, cycles, "attention", self.basis)


class _Layer:
    """A layer's attention on one device."""

    def __init__(self, decode: Cycles, prefill: Cycles, window: int | None, *, is_plain: bool) -> None:
        self.is_exact = is_plain and decode.is_exact and prefill.is_exact
        self._window, self._prefill = window, prefill
        self._decode_at = lru_cache(maxsize=None)(decode.at)

    def cycles(self, chunks: Sequence[tuple[int, int]]) -> float:
        cycles = sum(self._decode_at(self._seen(start)) for start, count in chunks if count == 1)
        for start, count in chunks:
            if count > 1:
                cycles += sum(self._prefill.at(self._seen(place)) * share for place, share in _parts(start, count))
        return cycles

    def _seen(self, before: int) -> int:
        return before if self._window is None else min(before, self._window)


def _parts(start: int, count: int) -> Iterator[tuple[int, float]]:
    """Yields the tokens before each chunk of the table's size, and how much of one it is."""
    for place in range(start, start + count, _CHUNK):
        yield place, min(_CHUNK, start + count - place) / _CHUNK


def _layer(attention: AttentionConfig, deployment: Deployment, chip: Chip) -> _Layer | None:
    """Returns None if the table has nothing like it."""
    shares = 1 if deployment.placement is None else deployment.placement.num_shares
    geometry = {
        "heads": attention.num_heads // shares,
        "kv_heads": max(1, attention.num_kv_heads // shares),  # held several times by more devices than heads
        "head_dim": attention.head_dim,
        "kv": deployment.kv_dtype,
    }
    decode, prefill = (cycles_of(chip.name, f"{kind} attention", geometry) for kind in ("decode", "prefill"))
    if decode is None or prefill is None:
        return None
    page = page_size_for("tpu", max_num_seqs=1, max_model_len=1, kv_dtype=deployment.kv_dtype)  # the smallest
    is_special = attention.sliding_window or attention.soft_cap or attention.sinks or attention.kv_layer is not None
    is_plain = not is_special and deployment.page_size == page
    return _Layer(decode, prefill, attention.sliding_window, is_plain=is_plain)
