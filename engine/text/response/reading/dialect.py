"""A format for one tokenizer: its special tokens are single characters, which no text can contain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar

from penstock.engine.text.response.syntax import ReplyFormat

T = TypeVar("T")

FIRST_DELIMITER = 0xD800  # the first lone surrogate


@dataclass(frozen=True, slots=True)
class Dialect:
    format: ReplyFormat  # its syntax is written with the characters of `special`
    special: Mapping[int, str]  # token id -> its character
    spelled: Mapping[str, str]  # character -> how the token is spelled

    def written(self, text: str) -> str:
        """Replaces special tokens spelled out in `text` by their characters."""
        return _written(text, {spelled: character for character, spelled in self.spelled.items()})


def dialect(format_: ReplyFormat, special_token_ids: Mapping[str, int]) -> Dialect:
    """Makes the dialect of a format. `special_token_ids` has all special tokens; other delimiters are ordinary text."""
    delimiters = format_.special_within(special_token_ids)
    character = {delimiter: chr(FIRST_DELIMITER + number) for number, delimiter in enumerate(delimiters)}
    return Dialect(
        _rewritten(format_, character),
        {special_token_ids[delimiter]: character[delimiter] for delimiter in delimiters},
        {character[delimiter]: delimiter for delimiter in delimiters},
    )


def _rewritten(value: T, character: Mapping[str, str]) -> T:
    """Rewrites all the syntax in a part of a format."""
    if isinstance(value, str):
        return _written(value, character)  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(_rewritten(item, character) for item in value)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{field.name: _rewritten(getattr(value, field.name), character) for field in fields(value)}
        )
    return value


def _written(text: str, character: Mapping[str, str]) -> str:
    for delimiter in sorted(character, key=len, reverse=True):
        text = text.replace(delimiter, character[delimiter])
    return text
