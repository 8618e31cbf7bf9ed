"""Log-probabilities in the form of completions: four lists, and the offset of each token in the text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.gateway.common.documents import Document
from penstock.gateway.common.options import Shown
from penstock.producer import TokenLogprob, TopLogprob

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_BEFORE = 3  # bytes of a character that came before the text


class LegacyLogprobs:
    """Log-probabilities of one choice, part by part. A character split over several tokens begins with its first
    token.

    Tokens come as they are in the middle of a text, with their leading spaces. How the first ones look at the beginning
    of this text is known only from the text itself, which may come later. Until then these tokens are held back.
    """

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._num_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_opened = False
        self._kept: list[TokenLogprob] = []
        self._text = ""
        self._num_dropped = 0  # leading spaces of the next tokens that are missing from the text

    def prompt(self, tokens: Sequence[TokenLogprob | None], text: str) -> Document:
        """Returns the prompt's log-probabilities. The first token has none; it gets what the others leave of `text`."""
        known = [token for token in tokens if token is not None]
        data = text.encode()
        rest = b"".join(token.bytes for token in known).decode(errors="replace").encode()
        first = data[: max(0, len(data) - len(rest))]
        self._has_opened = bool(first)
        head: Document = {
            "tokens": [_spelled(first)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._offset(first)],
        }
        return joined(head, self.part(known, text, is_last=bool(text)))

    def part(self, tokens: Iterable[TokenLogprob], text: str, *, is_last: bool = False) -> Document:
        """Returns the next log-probabilities. `text` is what came with these tokens; it may be that of earlier ones."""
        if self._has_opened:
            return self._lists(tokens)
        self._kept += tokens
        self._text += text
        if not (self._kept and (is_last or self._text.strip(" " + REPLACEMENT))):
            return self._lists(())
        opening = _opening(b"".join(token.bytes for token in self._kept), self._text)
        self._has_opened, self._num_dropped, self._num_chars = True, opening.num_dropped, opening.num_chars
        self._decoder.decode(opening.before)
        kept, self._kept = self._kept, []
        return self._lists(kept)

    def _lists(self, tokens: Iterable[TokenLogprob]) -> Document:
        document: Document = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            num_dropped = min(self._num_dropped, _num_spaces(token))
            self._num_dropped -= num_dropped
            document["tokens"].append(self._name(token, num_dropped))
            document["token_logprobs"].append(token.logprob)
            document["top_logprobs"].append(self._best(token, num_dropped))
            document["text_offset"].append(self._offset(token.bytes[num_dropped:]))
        return document

    def _best(self, token: TokenLogprob, num_dropped: int) -> dict[str, float]:
        """Returns the most likely tokens by name, the token itself first; of equal names, the later ones by id."""
        found: dict[str, float] = {}
        for other in (token, *(each for each in token.top if each.id != token.id)):
            name = self._name(other, min(num_dropped, _num_spaces(other)))
            found[f"token_id:{other.id}" if name in found else name] = other.logprob
        return found

    def _name(self, token: TopLogprob, num_dropped: int) -> str:
        return _spelled(token.bytes[num_dropped:]) if self._shown.token_names else f"token_id:{token.id}"

    def _offset(self, data: bytes) -> int:
        """Returns the offset of the next token, which has these bytes."""
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(data))
        return offset


@dataclass(frozen=True, slots=True)
class _Opening:
    """How the beginning of a text differs from its tokens inside a text."""

    num_dropped: int = 0  # leading spaces of the tokens that are missing from the text
    num_chars: int = 0  # replacement characters before the first token, of a character that the prompt had begun
    before: bytes = b""  # the part of the text's first character that is the prompt's


def _opening(data: bytes, text: str) -> _Opening:
    """Finds how tokens of these bytes begin this text."""
    decoded = _whole_characters(data)
    num_spaces = len(decoded) - len(decoded.lstrip(" "))
    for num_dropped in range(num_spaces + 1):
        if _agree(decoded[num_dropped:], text):
            return _Opening(num_dropped=num_dropped)
    first = text[:1].strip(REPLACEMENT).encode()
    for num_before in range(1, min(len(first), MAX_BEFORE + 1)):
        if _agree(_whole_characters(first[:num_before] + data), text):
            return _Opening(before=first[:num_before])
    for num_chars in range(1, len(text) - len(text.lstrip(REPLACEMENT)) + 1):
        if _agree(decoded, text[num_chars:]):
            return _Opening(num_chars=num_chars)
    return _Opening()


def _whole_characters(data: bytes) -> str:
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def _agree(first: str, second: str) -> bool:
    """Whether one text begins the other."""
    return first.startswith(second) or second.startswith(first)


def _num_spaces(token: TopLogprob) -> int:
    return len(token.bytes) - len(token.bytes.lstrip(b" "))


def _spelled(data: bytes) -> str:
    r"""Returns bytes as text, or if they are part of a character as OpenAI does: `bytes:\xf0\x9f`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 32 <= byte < 127 and byte != 92 else f"\\x{byte:02x}" for byte in data)


def joined(first: Document, second: Document) -> Document:
    return {name: first[name] + second[name] for name in first}
