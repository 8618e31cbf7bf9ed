"""Turns sampled tokens into the text for the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from penstock.engine.text.stop import StopMatcher
from penstock.engine.text.tokenizer import Tokenizer


class TextStream:
    """The text of one choice: detokenized, and ended by the first stop string.

    It is a function of the prompt and the token ids alone. The engine handles token ids that end a sequence: it pushes
    them if their text is wanted.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        delimiters: Mapping[int, str] | None = None,
        prompt: Sequence[int] | None = None,
        goes_on: bool = False,
    ) -> None:
        """Starts a new text.

        Args:
            tokenizer: the model's tokenizer.
            stops: strings that end the text.
            include_stop: whether the text includes the stop string that ends it.
            min_tokens: number of tokens before which no stop string ends it.
            skip_special_tokens: whether special tokens have no text.
            delimiters: the characters that stand in the text for tokens that delimit parts of a reply.
            prompt: as in `Tokenizer.detokenizer`; no part after a delimiter continues it.
            goes_on: as in `Tokenizer.detokenizer`.

        Raises:
            InvalidRequest: a stop string is empty.
        """
        self._new_detokenizer = partial(tokenizer.detokenizer, skip_special_tokens=skip_special_tokens, goes_on=goes_on)
        self._detokenizer = self._new_detokenizer(prompt=prompt)
        self._delimiters = delimiters or {}
        self._num_left = min_tokens  # tokens before the text may end
        self._matcher = StopMatcher(stops, include=include_stop) if stops else None

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Returns the text that this token released, and the stop string that it completed: then no text follows."""
        text = self._text_of(token_id)
        self._num_left -= 1
        return (text, None) if self._matcher is None else self._matcher.push(text, may_end=self._num_left <= 0)

    def finish(self) -> str:
        """Returns the text still held back by a sequence that ends without a stop string.

        Nothing may be pushed afterwards.
        """
        text = self._detokenizer.flush()
        if self._matcher is None:
            return text
        released, stop = self._matcher.push(text, may_end=self._num_left <= 0)
        return released if stop else released + self._matcher.flush()

    def _text_of(self, token_id: int) -> str:
        delimiter = self._delimiters.get(token_id)
        if delimiter is None:
            return self._detokenizer.push(token_id)
        text = self._detokenizer.flush() + delimiter
        self._detokenizer = self._new_detokenizer()  # no character spans two parts of a reply
        return text
