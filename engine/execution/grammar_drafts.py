"""Drafts for replies with a grammar: what it leaves no choice about, else what others guess and it allows."""

from __future__ import annotations

from penstock.engine.execution.masks import MaskBuilder
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.speculation.drafter import Draft

FORCED = -1
"""The kind of drafts that a grammar forces. Its bytes are certain; which tokens the model spells them by is not."""


class GrammarDrafts:
    """What grammars make of drafts."""

    def __init__(self, masks: MaskBuilder) -> None:
        self._masks = masks

    def within(self, sequence: Sequence, draft: Draft) -> Draft:
        """What a sequence may really go on with, given a draft of tokens that there are."""
        if not sequence.is_constrained:
            return draft
        forced = self._masks.forced(sequence)
        if forced:
            return Draft(tuple(forced), FORCED)
        if not draft.token_ids:
            return draft
        return draft._replace(token_ids=draft.token_ids[: self._masks.count_allowed(sequence, draft.token_ids)])
