"""A compiled grammar, and where a reply is in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llguidance import LLMatcher

from penstock.engine.errors import EngineError


class GrammarFailed(EngineError):
    """A reply that can't be continued: its grammar met a limit, or does not have one of its tokens."""


class Grammar:
    """What a reply must follow. Any thread may use it."""

    def __init__(self, source: str, start: LLMatcher, eos_token_ids: tuple[int, ...]) -> None:
        """`start` has seen no token, and is not used otherwise."""
        self.source = source
        self._start = start
        self._eos_token_ids = eos_token_ids

    def __repr__(self) -> str:
        return f"Grammar({self.source[:40]!r}, {len(self.source)} characters)"

    def matcher(self, bad_token_ids: Iterable[int] = ()) -> Matcher:
        """For a new reply, in which `bad_token_ids` are never sampled."""
        can_end = not set(self._eos_token_ids).issubset(bad_token_ids)
        return Matcher(self._start.deep_copy(), can_end)


class Matcher:
    """Where one reply is in its grammar: a function of its tokens alone. One thread at a time uses it.

    Once it has failed it fails for ever: whoever holds it ends the reply.
    """

    def __init__(self, state: LLMatcher, can_end: bool) -> None:
        self.state = state  # for who fills masks
        self.num_tokens = 0  # that it has taken
        self._can_end = can_end

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes the reply's next tokens. None of them ends it.

        Raises:
            GrammarFailed: the grammar does not allow a token, or met a limit.
        """
        self.num_tokens += len(token_ids)
        if token_ids and not self.state.consume_tokens(list(token_ids)):
            raise self.failure()

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow, and no token says so: the vocabulary has none that ends a reply, or it is not
        to be sampled.
        """
        return not self._can_end and self.state.is_stopped() and not self.has_failed

    @property
    def has_failed(self) -> bool:
        return self.state.is_error()

    def failure(self) -> GrammarFailed:
        return GrammarFailed(f"the reply's grammar failed: {cleaned(self.state.get_error())}")


def cleaned(message: str) -> str:
    """What llguidance says, without its mark for details that are left out."""
    return message.removesuffix("<non-verbose/>").strip()
