"""Treats special tokens that messages spell out as ordinary text, as `split_special_tokens` asks for.

Those of the template itself stay special. Special tokens in messages are marked before the template renders them,
because its output does not show which text came from a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import tokenizers

from penstock.engine.errors import InvalidRequest
from penstock.engine.text.conversation import Conversation
from penstock.engine.text.unlocked import token_ids

_MARK, _OPEN, _CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"  # noncharacters, which no text needs
_OURS = re.compile(f"[{_MARK}{_OPEN}{_CLOSE}]")
_OF_THE_MODEL = "assistant"  # what it wrote may hold its own tags, which templates look for


class SplitSpecialTokens:
    """The special tokens of one vocabulary, in messages and in what templates make of them. Any thread may use it."""

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Iterable[str]) -> None:
        names = {token: f"{_OPEN}{number}{_CLOSE}" for number, token in enumerate(special_tokens) if token}
        longest_first = sorted(names, key=len, reverse=True)
        whole = "|".join(map(re.escape, longest_first)) or "(?!)"
        begun = {token[:end] for token in names for end in range(1, len(token))}
        # Templates may join parts of a message: the end of one and the beginning of the next must not form a token.
        cut = "|".join(map(re.escape, sorted(begun, key=len, reverse=True))) or "(?!)"
        self._spelled = re.compile(rf"{whole}|(?:{cut})\Z")
        self._of_template = re.compile(f"(?:{whole})(?!{_MARK})")
        self._names = names
        self._backend = _renamed(backend, names)

    def marked(self, chat: Conversation) -> Conversation:
        """Returns a chat whose messages have their special tokens marked, except those of the assistant.

        Raises:
            InvalidRequest: it holds a character that marks them.
        """
        _refuse_marks((chat.messages, chat.tools, chat.variables))
        messages = [each if each.get("role") == _OF_THE_MODEL else self._mark(each) for each in chat.messages]
        return replace(chat, messages=messages)

    def token_ids(self, text: str) -> list[int]:
        """Encodes a template's output for marked messages. Nothing is added."""
        named = self._of_template.sub(lambda found: self._names[found[0]], text)
        return token_ids(self._backend, unmarked(named), add_special_tokens=False)

    def _mark(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._spelled.sub(lambda found: found[0][:1] + _MARK + found[0][1:], value)
        if isinstance(value, Mapping):
            return {key: self._mark(each) for key, each in value.items()}
        return [self._mark(each) for each in value] if isinstance(value, list | tuple) else value


def unmarked(text: str) -> str:
    """Returns a text without marks."""
    return text.replace(_MARK, "")


def _refuse_marks(values: object) -> None:
    """Raises InvalidRequest if a text within holds a character that marks special tokens."""
    texts = [values]
    while texts:
        value = texts.pop()
        if isinstance(value, str) and (found := _OURS.search(value)):
            raise InvalidRequest(f"U+{ord(found[0]):04X}, a noncharacter, can't be in a chat with split_special_tokens")
        if isinstance(value, Mapping):
            texts += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            texts += value


def _renamed(backend: tokenizers.Tokenizer, names: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Returns the tokenizer with other names for special tokens, and the same ids."""
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"]) if token["special"] else token["content"]
    model = state["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): id_ for piece, id_ in vocab.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return tokenizers.Tokenizer.from_str(json.dumps(state))
