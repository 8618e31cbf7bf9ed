"""The cycles of the attention kernel in a step, from the table of schedules.

The table has plain layers: no window, no soft cap, no sinks, pages of 64 tokens, or of 128 if they are 8 bits wide. A
prompt counts as chunks of 512 tokens, each after those before it, and the last one in part. Everything else is unknown,
and so is a model with a single layer of another kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

from penstock.engine.attention import page_size_for
from penstock.engine.deployment.deployment import Deployment
from penstock.tools.plan.device.chips import Chip
from penstock.tools.plan.schedules import table

_CHUNK = 512  # tokens of a prompt in the table's figures


class AttentionSchedule:
    """How long attention takes on each device by its schedule, for one deployment."""

    def __init__(self, deployment: Deployment, chip: Chip) -> None:
        self._num_layers = len(deployment.model.attentions)
        self._decode, self._prefill = _rows_for(deployment, chip)
        self._of_context = lru_cache(maxsize=None)(self._decode.at) if self._decode else None

    def cycles(self, chunks: Sequence[tuple[int, int]]) -> float | None:
        """Returns the cycles of all layers for chunks: the tokens before each, and its own. None: not in the table."""
        if self._of_context is None or self._prefill is None:
            return None
        decoding = [start for start, count in chunks if count == 1]
        cycles = sum(map(self._of_context, decoding))
        for start, count in chunks:
            if count > 1:
                cycles += sum(self._prefill.at(place) * share for place, share in _parts(start, count))
        return self._num_layers * cycles


def _parts(start: int, count: int) -> Iterator[tuple[int, float]]:
    """Yields the tokens before each chunk of the table's size, and how much of one it is."""
    for place in range(start, start + count, _CHUNK):
        yield place, min(_CHUNK, start + count - place) / _CHUNK


def _rows_for(deployment: Deployment, chip: Chip) -> tuple[table.Row | None, table.Row | None]:
    attentions, kv = deployment.model.attentions, deployment.kv_dtype
    shares = 1 if deployment.placement is None else deployment.placement.num_shares
    shapes = {(a.num_heads // shares, a.num_kv_heads // shares, a.head_dim) for a in attentions}
    is_plain = not any(a.sliding_window or a.soft_cap or a.sinks or a.kv_layer is not None for a in attentions)
    page = page_size_for("tpu", max_num_seqs=1, max_model_len=1, kv_dtype=kv)  # the smallest
    if len(shapes) != 1 or not is_plain or deployment.attention.name != "fused" or deployment.page_size != page:
        return None, None
    heads, kv_heads, head_dim = shapes.pop()
    geometry = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "kv": kv}
    try:
        libtpu = version("libtpu")
    except PackageNotFoundError:
        return None, None
    decode, prefill = (table.found(libtpu, chip.name, f"{kind} attention", geometry) for kind in ("decode", "prefill"))
    return decode, prefill
