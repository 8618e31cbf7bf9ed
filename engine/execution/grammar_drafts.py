"""Drafts for replies with a grammar: forced tokens, or the part of other drafts that the grammar allows."""

from __future__ import annotations

from penstock.engine.execution.sampling.masks import MaskBuilder
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.speculation.drafter import Draft

FORCED = -1
"""The kind of drafts that a grammar forces: their bytes are certain, but not how the model tokenizes them."""


class GrammarDrafts:
    def __init__(self, masks: MaskBuilder) -> None:
        self._masks = masks

    def within(self, sequence: Sequence, draft: Draft) -> Draft:
        """Returns the draft that a sequence's grammar forces, or else the allowed part of `draft`."""
        if not sequence.is_constrained:
            return draft
        forced = self._masks.forced(sequence)
        if forced:
            return Draft(tuple(forced), FORCED)
        if not draft.token_ids:
            return draft
        return draft._replace(token_ids=draft.token_ids[: self._masks.count_allowed(sequence, draft.token_ids)])
