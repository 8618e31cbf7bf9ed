"""Log-probabilities in the form of completions: four lists, and the offset of each token in the text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from penstock.gateway.common.documents import Document, token_name
from penstock.gateway.common.options import Shown
from penstock.producer import TokenLogprob


class LegacyLogprobs:
    """Log-probabilities of one choice, part by part. A character split over several tokens begins with its first
    token.
    """

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._num_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, tokens: Sequence[TokenLogprob | None], text: str) -> Document:
        """Returns the prompt's log-probabilities. The first token has none: its text is what the others leave."""
        known = [token for token in tokens if token is not None]
        data = text.encode()
        first = data[: max(0, len(data) - sum(len(token.bytes) for token in known))]
        head: Document = {
            "tokens": [first.decode(errors="replace")],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._offset(first)],
        }
        return joined(head, self.part(known))

    def part(self, tokens: Iterable[TokenLogprob]) -> Document:
        document: Document = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            document["tokens"].append(token_name(token, self._shown))
            document["token_logprobs"].append(token.logprob)
            best = {token_name(other, self._shown): other.logprob for other in reversed((token, *token.top))}
            document["top_logprobs"].append(best)
            document["text_offset"].append(self._offset(token.bytes))
        return document

    def _offset(self, data: bytes) -> int:
        """Returns the offset of the next token, which has these bytes."""
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(data))
        return offset


def joined(first: Document, second: Document) -> Document:
    return {name: first[name] + second[name] for name in first}
