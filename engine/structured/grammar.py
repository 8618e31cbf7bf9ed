"""A compiled grammar, and a reply's position in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from llguidance import LLMatcher

from penstock.engine.errors import EngineError
from penstock.engine.structured.refusals import cleaned

RENEWABLE_S = 0.01  # most that the engine's thread may spend on compiling
MAX_LEXERS = 3  # per reply: two shared ones, then one of its own


class GrammarFailed(EngineError):
    """A reply can't be continued: its grammar met a limit, or does not allow one of its tokens."""


class Grammar:
    """A grammar that replies must follow.

    Its replies share a lexer, which grows with what they say and, once it is too large, fails for all of them. The
    engine then gives them a new one, so whether a reply fails follows from its own tokens alone. If compiling takes too
    long for the engine's thread, the grammar is spent: the next request that uses it gets a new one.
    """

    def __init__(self, source: str, compiled: Callable[[], LLMatcher], eos_token_ids: tuple[int, ...]) -> None:
        """Compiles the grammar. `compiled` returns a new matcher that has seen no token, with a lexer of its own."""
        self.source = source
        self._compiled = compiled
        self._eos_token_ids = eos_token_ids
        started_s = time.thread_time()
        self._start = compiled()
        self._is_renewable = time.thread_time() - started_s < RENEWABLE_S
        self._num_renewals = 0
        self.is_spent = False  # the lexer is too large and will not be replaced

    def __repr__(self) -> str:
        return f"Grammar({self.source[:40]!r}, {len(self.source)} characters)"

    def matcher(self, bad_token_ids: Iterable[int] = ()) -> Matcher:
        """Returns a matcher for a new reply, in which `bad_token_ids` are never sampled."""
        can_end = not set(self._eos_token_ids).issubset(bad_token_ids)
        return Matcher(self._start.deep_copy(), can_end, self._num_renewals, may_guess=self._is_renewable)

    def instead_of(self, failed: Matcher) -> Matcher | None:
        """Returns a matcher that has seen no token, for a reply whose own `failed` because its lexer had grown too
        large.

        The first replacement shares a new lexer with the other replies. The second has one of its own: long replies
        would fill a shared one for each other again and again. Returns None if the reply failed by itself, or compiling
        takes too long.
        """
        if not failed.is_lexer_full or failed.num_lexers == MAX_LEXERS:
            return None
        if failed.num_renewals == self._num_renewals and not self._renew():
            return None
        is_last = failed.num_lexers + 1 == MAX_LEXERS
        state = self._made() if is_last else self._start.deep_copy()
        if state is None:
            return None
        return Matcher(state, failed.can_end, self._num_renewals, failed.num_lexers + 1, may_guess=not is_last)

    def _renew(self) -> bool:
        state = self._made() if self._is_renewable and not self.is_spent else None
        self.is_spent = state is None
        if state is not None:
            self._start = state
            self._num_renewals += 1
        return state is not None

    def _made(self) -> LLMatcher | None:
        try:
            return self._compiled()
        except EngineError:
            return None


class Matcher:
    """A reply's position in its grammar: a function of its tokens alone. Only one thread at a time may use it.

    A failure is permanent.
    """

    def __init__(
        self, state: LLMatcher, can_end: bool, num_renewals: int = 0, num_lexers: int = 1, *, may_guess: bool = False
    ) -> None:
        self.state = state  # for the code that fills masks
        # Whether its lexer may also read guessed text. If such text fills the lexer, the reply gets another one.
        self.may_guess = may_guess
        self.num_tokens = 0  # tokens taken
        self.num_renewals = num_renewals  # of its grammar when it was made
        self.num_lexers = num_lexers  # lexers that its reply has had, this one's included
        self.can_end = can_end  # whether a token can end the reply

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes the reply's next tokens. None of them may end it.

        Raises:
            GrammarFailed: the grammar does not allow a token, or met a limit.
        """
        self.num_tokens += len(token_ids)
        if token_ids and not self.state.consume_tokens(list(token_ids)):
            raise self.failure()

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow and no token can say so: there is no end token, or it must not be sampled."""
        return not self.can_end and self.state.is_stopped() and not self.has_failed

    @property
    def has_failed(self) -> bool:
        return self.state.is_error()

    @property
    def is_lexer_full(self) -> bool:
        """Whether it failed because of the lexer that all replies of the grammar share."""
        return "lexer error" in self.state.get_error()

    def failure(self) -> GrammarFailed:
        return GrammarFailed(f"the reply's grammar failed: {cleaned(self.state.get_error())}")
