"""Drafts for replies with a grammar: what it leaves no choice about, else what others guess and it allows."""

from __future__ import annotations

from penstock.engine.execution.masks import MaskBuilder
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.speculation.drafter import Draft, Drafter

FORCED = -1
"""The kind of drafts that a grammar forces. Its bytes are certain; which tokens the model spells them by is not."""


class GrammarDrafter:
    """Asks `drafter` where no grammar says anything."""

    def __init__(self, masks: MaskBuilder, drafter: Drafter) -> None:
        self._masks = masks
        self._drafter = drafter

    def draft(self, sequence: Sequence, limit: int) -> Draft:
        draft = self._drafter.draft(sequence, limit)
        if not sequence.is_constrained:
            return draft
        forced = self._masks.forced(sequence)
        if forced:
            return Draft(tuple(forced[:limit]), FORCED)
        return draft._replace(token_ids=draft.token_ids[: self._masks.count_allowed(sequence, draft.token_ids)])

    def forget(self, sequence: Sequence) -> None:
        self._drafter.forget(sequence)
