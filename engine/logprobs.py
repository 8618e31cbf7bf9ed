"""Log-probabilities as values, made of what a step found on the device."""

from __future__ import annotations

from collections.abc import Callable

from penstock.engine.execution.sampling import Logprobs
from penstock.engine.request import TokenLogprob, TopLogprob

Spell = Callable[[int], tuple[str, bytes]]


def logprob_at(found: Logprobs, place: int, token_id: int, count: int, spell: Spell) -> TokenLogprob:
    """Of the row at `place` in a step's results, which is that of `token_id`, and of its `count` most likely tokens."""
    ids, values = found.top_ids[place, :count].tolist(), found.top[place, :count].tolist()
    top = tuple(TopLogprob(id_, *spell(id_), value) for id_, value in zip(ids, values, strict=True))
    return TokenLogprob(token_id, *spell(token_id), float(found.sampled[place]), top)
