"""Log-probabilities as completions have them: four lists, and where in the text each token begins."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from penstock.gateway.openai.documents import Document, token_name
from penstock.gateway.openai.options import Shown
from penstock.producer import TokenLogprob


class LegacyLogprobs:
    """Those of one choice, part by part. A token may hold a part of a character, which begins with its first token."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._num_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, tokens: Sequence[TokenLogprob | None], text: str) -> Document:
        """Of the prompt's tokens. The first of them has no log-probability: its text is what the others leave."""
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
        """Where the next token begins, whose bytes these are."""
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(data))
        return offset


def joined(first: Document, second: Document) -> Document:
    return {name: first[name] + second[name] for name in first}
