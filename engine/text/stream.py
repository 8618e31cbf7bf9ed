"""From sampled tokens to the text that goes to the client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.engine.text.stop import StopMatcher
from penstock.engine.text.tokenizer import Tokenizer


class TextStream:
    """The text of one choice: detokenized, and ended by the first stop string.

    A function of the token ids alone. Token ids that end a sequence are the engine's business: whether their text is
    wanted is decided by pushing them or not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """Raises InvalidRequest if a stop string is empty."""
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stops, include=include_stop) if stops else None

    def push(self, token_id: int) -> tuple[str, str | None]:
        """The text that this token released, and the stop string that is complete: then no text follows."""
        text = self._detokenizer.push(token_id)
        return (text, None) if self._matcher is None else self._matcher.push(text)

    def finish(self) -> str:
        """The text still held back, for a sequence that ends without a stop string. Nothing may be pushed
        afterwards.
        """
        text = self._detokenizer.flush()
        if self._matcher is None:
            return text
        released, stop = self._matcher.push(text)
        return released if stop else released + self._matcher.flush()

    def replay(self, token_ids: Iterable[int]) -> str | None:
        """Brings a new stream to where it was after these tokens, whose text is out. Returns the stop string that they
        complete, if one.
        """
        stop = None
        for token_id in token_ids:
            _, stop = self.push(token_id)
        return stop
