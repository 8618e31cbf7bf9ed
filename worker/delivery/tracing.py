"""Who is told what becomes known of a claim, so that it can be traced: `spans.py` does, where it is asked for."""

from __future__ import annotations

from penstock.producer.wire import EndEntry


class Trace:
    """Of one claim of a request. This one keeps nothing: nobody traces the request. None of it is called per token."""

    __slots__ = ()

    def started(self, prompt_tokens: int, resumed_tokens: int) -> None:
        """The engine has it, with so many tokens of earlier claims."""

    def first_token(self, cached_tokens: int) -> None:
        """The first token of this claim is there; so many of the prompt's needed no computing."""

    def ended(self, end: EndEntry) -> None:
        """The end is on the reply stream."""

    def handed_back(self, completion_tokens: int) -> None:
        """It is given back, with so many tokens on the reply stream."""

    def lost(self, why: str) -> None:
        """It is another claim's, or its reply is gone."""


UNTRACED = Trace()
