"""From sampled tokens to the text that goes to the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

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
        delimiters: Mapping[int, str] | None = None,
        goes_on: bool = False,
    ) -> None:
        """
        Args:
            tokenizer: of the model.
            stops: what ends the text.
            include_stop: whether the text ends with the stop string, and not before it.
            skip_special_tokens: whether special tokens have no text.
            delimiters: the characters by which tokens that delimit parts of a reply are known in its text.
            goes_on: as in `Tokenizer.detokenizer`.

        Raises:
            InvalidRequest: a stop string is empty.
        """
        self._new_detokenizer = partial(tokenizer.detokenizer, skip_special_tokens=skip_special_tokens, goes_on=goes_on)
        self._detokenizer = self._new_detokenizer()
        self._delimiters = delimiters or {}
        self._matcher = StopMatcher(stops, include=include_stop) if stops else None

    def push(self, token_id: int) -> tuple[str, str | None]:
        """The text that this token released, and the stop string that is complete: then no text follows."""
        text = self._text_of(token_id)
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

    def _text_of(self, token_id: int) -> str:
        delimiter = self._delimiters.get(token_id)
        if delimiter is None:
            return self._detokenizer.push(token_id)
        text = self._detokenizer.flush() + delimiter
        self._detokenizer = self._new_detokenizer()  # no character goes across parts of a reply
        return text
