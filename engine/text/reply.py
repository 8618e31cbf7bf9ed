"""Turns sampled tokens into the parts of a reply."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.engine.request import Request
from penstock.engine.text.response.reading.delta import Delta, ReplyEnd
from penstock.engine.text.response.reading.parser import ReplyParser
from penstock.engine.text.response.reading.replies import ReplyFormats
from penstock.engine.text.stream import TextStream
from penstock.engine.text.tokenizer import Tokenizer

TEXT_RULES = "1"
"""Version of the rules by which tokens become text. No worker continues a reply whose text other rules made."""


class ReplyDecoder:
    """The reply of one choice: its text and, if there is a parser, its reasoning and tool calls separately.

    It is a function of the prompt and the token ids alone, which are pushed one by one whatever steps they come from.
    Stop strings are matched in the text as the model wrote it, tags and reasoning included.
    """

    def __init__(self, text: TextStream, parser: ReplyParser | None = None) -> None:
        self._text = text
        self._parser = parser
        self.num_reasoning = 0
        """Number of reasoning tokens so far, the tag that ends the reasoning included."""

    @property
    def calls_tools(self) -> bool:
        """Whether a tool call is complete."""
        return self._parser is not None and self._parser.calls_tools

    @property
    def num_mended(self) -> int:
        """Number of tool calls with a flaw that was mended."""
        return 0 if self._parser is None else self._parser.num_mended

    def push(self, token_id: int) -> tuple[Delta, str | None]:
        """Returns what this token released, and the stop string that it completed, if any: then nothing follows."""
        text, stop = self._text.push(token_id)
        parser = self._parser
        if parser is None:
            return Delta(text), stop
        was_reasoning = parser.is_reasoning
        delta = parser.push(text) if stop is None else parser.finish(text, ReplyEnd.STOPPED)
        self.num_reasoning += was_reasoning or parser.is_reasoning
        return delta, stop

    def finish(self, ended: ReplyEnd = ReplyEnd.ITSELF) -> Delta:
        """Returns what is still held back when a reply ends without a stop string. Nothing may be pushed afterwards."""
        text = self._text.finish()
        return Delta(text) if self._parser is None else self._parser.finish(text, ended)

    def replay(self, token_ids: Iterable[int]) -> str | None:
        """Restores a new stream to its state after these tokens, whose parts are out.

        Returns the stop string that they complete, if any.
        """
        stop = None
        for token_id in token_ids:
            _, stop = self.push(token_id)
        return stop


class ReplyStreams:
    """Makes the streams of one model. Only one thread at a time may use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._formats = ReplyFormats(tokenizer.special_token_ids)

    def stream(self, request: Request, choice: int) -> ReplyDecoder:
        """Returns a stream for a new reply. Raises InvalidRequest if its format is unknown or a stop string empty."""
        params, spec = request.sampling, request.response
        text = TextStream(
            self._tokenizer,
            params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            delimiters={} if spec is None else self._formats.dialect(spec.format).special,
            prompt=None if request.begins_turn else request.prompt_token_ids,
            goes_on=request.grammar is not None,  # the grammar decides on each space
        )
        if spec is None:
            return ReplyDecoder(text)
        shows_special = not params.skip_special_tokens
        parser = self._formats.parser(
            spec, request.id, choice, shows_special=shows_special, mends=request.grammar is None
        )
        return ReplyDecoder(text, parser)
