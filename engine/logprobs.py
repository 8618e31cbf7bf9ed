"""Log-probabilities as values, built from a step's results on the device."""

from __future__ import annotations

from collections.abc import Callable

from penstock.engine.execution.sampling.logprobs import Logprobs
from penstock.engine.request import Request, TokenLogprob, TopLogprob

Spell = Callable[[int], tuple[str, bytes]]


class PromptLogprobs:
    """The log-probabilities of one prompt, collected while its chunks are computed."""

    def __init__(self, request: Request, spell: Spell) -> None:
        self._token_ids = request.prompt_token_ids
        self._num_top = request.sampling.prompt_logprobs or 0
        self._spell = spell
        self._values: list[TokenLogprob | None] = [None]  # nothing comes before the first token

    def take(self, found: Logprobs, place: int, start: int, count: int) -> None:
        """Takes the log-probabilities of `count` prompt tokens, those after position `start`, from the rows at `place`.

        Chunks overlap when a prompt was preempted and is recomputed.
        """
        for offset in range(len(self._values) - start - 1, count):
            token_id = self._token_ids[start + offset + 1]
            self._values.append(logprob_at(found, place + offset, token_id, self._num_top, self._spell))

    def all(self) -> tuple[TokenLogprob | None, ...]:
        return tuple(self._values)


def logprob_at(found: Logprobs, place: int, token_id: int, count: int, spell: Spell) -> TokenLogprob:
    """Returns the log-probability of `token_id`, at `place` in a step's results, and its `count` most likely
    alternatives.
    """
    ids, values = found.top_ids[place, :count].tolist(), found.top[place, :count].tolist()
    top = tuple(TopLogprob(id_, *spell(id_), value) for id_, value in zip(ids, values, strict=True))
    return TokenLogprob(token_id, *spell(token_id), float(found.sampled[place]), top)
