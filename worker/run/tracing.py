"""Interface for tracing a claim: `spans.py` implements it if tracing is on."""

from __future__ import annotations

from penstock.protocol.wire import EndEntry


class ClaimTrace:
    """Traces one claim of a request. This class records nothing, for untraced requests. Nothing is called per token."""

    __slots__ = ()

    def started(self, prompt_tokens: int, resumed_tokens: int) -> None:
        """The engine has the request, with that many tokens of earlier claims."""

    def first_token(self, cached_tokens: int) -> None:
        """The first token of this claim is ready; `cached_tokens` of the prompt needed no computing."""

    def ended(self, end: EndEntry) -> None:
        """The end is on the reply stream."""

    def handed_back(self, completion_tokens: int) -> None:
        """The request is given back, with that many tokens on the reply stream."""

    def lost(self, why: str) -> None:
        """Another claim has the request, or its reply is gone."""


UNTRACED = ClaimTrace()
