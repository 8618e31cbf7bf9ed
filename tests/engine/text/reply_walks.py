"""Draws random replies that a grammar allows, and reads them, without a model."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from llguidance import LLMatcher
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from penstock.engine.request import Request, ResponseSpec
from penstock.engine.structured.compile_process import LIMITS
from penstock.engine.structured.vocabulary import llguidance_tokenizer
from penstock.engine.text.reply import ReplyStreams
from penstock.engine.text.response.formats import FORMATS
from penstock.engine.text.tokenizer import Tokenizer
from penstock.engine.text.vocabulary import vocabulary_of

EOS = "<|endoftext|>"
# Qwen's are ordinary tokens: part of the vocabulary, and text.
ORDINARY = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
_TEXTS = (
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3, "unit": null, "on": true}}',
    "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>",
    '[get_weather(city="Paris", days=3, on=True)] ["a", "b"], {"x": 1.5}\n\n```json\n```',
    "Let me look at the weather in Paris, I think that it is to rain on 2024-05-17T12:30:00Z.",
)


class Vocabulary:
    """A tokenizer with the delimiters of all formats, or with others, as grammars and as replies see it."""

    def __init__(self, special: Sequence[str] = ()) -> None:
        self.tokenizer = Tokenizer(chat_tokenizer(special))
        self.special_token_ids = self.tokenizer.special_token_ids
        eos = self.special_token_ids[EOS]
        vocabulary = vocabulary_of(self.tokenizer, self.tokenizer.vocab_size, (eos,))
        self.for_grammars = llguidance_tokenizer(vocabulary)
        self._streams = ReplyStreams(self.tokenizer)
        self._source: str | None = None
        closing = ('"', "}", "]", "<", "\n", ",", ":", ")")
        self._closing = {
            id_ for id_, data in vocabulary.token_bytes.items() if data.decode(errors="replace") in closing
        }
        self._closing |= set(vocabulary.names)
        texts = {id_: data.decode(errors="replace") for id_, data in vocabulary.token_bytes.items()}
        self._blanks = {id_: len(text) for id_, text in texts.items() if text.isspace()}

    def matcher(self, source: str) -> LLMatcher:
        """Returns a matcher at the start: a copy, as requests get it. The grammar of the last one is not compiled
        again.
        """
        if source != self._source:
            self._source = source
            self._start = LLMatcher(self.for_grammars, source, log_level=0, limits=LIMITS)
        return self._start.deep_copy()

    def accepts(self, source: str, text: str) -> bool:
        """Checks whether `text` is a whole reply; special tokens spelled in it count as those tokens."""
        matcher = self.matcher(source)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.encode(text)
        return matcher.try_consume_tokens(list(ids)) == len(ids) and matcher.is_accepting()

    def walk(self, source: str, rng: random.Random, max_tokens: int = 300) -> Walk:
        """Draws each token evenly from the allowed ones, with a bias to those that end a reply."""
        matcher = self.matcher(source)
        assert not matcher.is_error(), matcher.get_error()
        ids: list[int] = []
        while len(ids) < max_tokens and not matcher.is_stopped():
            allowed = _allowed(matcher)
            assert not matcher.is_error(), f"nothing may follow {self.tokenizer.decode(ids)!r}"
            if not allowed:
                break
            if rng.random() < 0.4:
                allowed = [id_ for id_ in allowed if id_ in self._closing] or allowed
            id_ = rng.choice(allowed)
            if id_ == self.special_token_ids[EOS]:
                return Walk(tuple(ids), is_whole=True)
            assert matcher.consume_token(id_), matcher.get_error()
            ids.append(id_)
        assert not matcher.is_error(), matcher.get_error()
        assert not matcher.is_stopped() or matcher.is_accepting(), f"cut off at {self.tokenizer.decode(ids)!r}"
        return Walk(tuple(ids), is_whole=matcher.is_stopped())

    def longest_blank(self, source: str, rng: random.Random, max_tokens: int = 2000) -> int:
        """Takes white space wherever it is allowed, up to the end; returns the length of the longest."""
        matcher = self.matcher(source)
        longest = length = 0
        for _ in range(max_tokens):
            allowed = _allowed(matcher)
            blanks = [id_ for id_ in allowed if id_ in self._blanks]
            id_ = max(blanks, key=self._blanks.__getitem__) if blanks else rng.choice(allowed)
            if id_ == self.special_token_ids[EOS]:
                return longest
            assert matcher.consume_token(id_), matcher.get_error()
            if matcher.is_stopped():
                return longest
            length = length + self._blanks[id_] if blanks else 0
            longest = max(longest, length)
        raise AssertionError(f"it never ends, and has {longest} blanks")

    def read(self, spec: ResponseSpec, ids: Sequence[int]) -> Reply:
        """Parses the tokens one by one, as a reply."""
        stream = self._streams.stream(Request("request", (0,), response=spec), 0)
        reply = Reply()
        for id_ in ids:
            delta, _ = stream.push(id_)
            reply.add(delta)
        reply.add(stream.finish())
        return reply


@dataclass(frozen=True)
class Walk:
    ids: tuple[int, ...]
    is_whole: bool  # not cut off


@dataclass
class Reply:
    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name and arguments of each

    def add(self, delta: Any) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        for call in delta.tool_calls:
            if call.name is not None:
                self.calls.append([call.name, ""])
            self.calls[call.index][1] += call.arguments

    def arguments(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary()


def chat_tokenizer(special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_TEXTS * 4, trainer)
    delimiters = {delimiter for format_ in FORMATS.values() for delimiter in format_.delimiters}
    backend.add_special_tokens([EOS, *(special or sorted(delimiters.difference(ORDINARY)))])
    backend.add_tokens([] if special else list(ORDINARY))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)


def _allowed(matcher: LLMatcher) -> list[int]:
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
