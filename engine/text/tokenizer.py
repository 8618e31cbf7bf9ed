"""Converts text to token ids and back, with a Hugging Face fast tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from penstock.engine.errors import CheckpointError, ConfigError, InvalidRequest, shown
from penstock.engine.loading.source import open_checkpoint
from penstock.engine.text.bridges.limits import LIMITS, OF_TOOLS
from penstock.engine.text.bridges.round_trip import Ability, Readback
from penstock.engine.text.conversation import Conversation, ConversationTemplate, EncodedChat
from penstock.engine.text.decoders import decoder_kind
from penstock.engine.text.detokenizer import Detokenizer
from penstock.engine.text.fewest_tokens import Check, fewest_tokens, let_pass
from penstock.engine.text.response.choice import AUTO, NONE, reply_prefix, shows_reasoning, why_no_format
from penstock.engine.text.response.reading.replies import RULES
from penstock.engine.text.spelling import Spelling, bytes_of
from penstock.engine.text.split_special import SplitSpecialTokens, unmarked
from penstock.engine.text.unlocked import token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Tokenizer:
    """The tokenizer and chat template of one checkpoint.

    Several threads may use it at once, detokenizers included: after construction it only calls reading methods of the
    underlying Rust tokenizer, and changes nothing of its own.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, chat_format: str = AUTO, *, split_special_tokens: bool = False
    ) -> None:
        """Takes ownership of the tokenizer: the caller must not use it afterwards.

        Args:
            tokenizer: the checkpoint's tokenizer.
            chat_format: how chat replies are parsed: `auto` (by the chat template), `none`, or a format's name.
            split_special_tokens: whether special tokens that messages spell are text.

        Raises:
            CheckpointError: none of its tokens has text.
            ConfigError: text can't be streamed through its decoder, its chat template is not text, or there is no such
                format.
        """
        special_tokens = dict(tokenizer.special_tokens_map)
        self._templates = {
            name: ConversationTemplate(source, special_tokens) for name, source in _templates_of(tokenizer).items()
        }
        self.templates = {name: template.source for name, template in self._templates.items()}
        """Texts of the chat templates by name; the one that is not for special cases is called `default`."""
        if (why := why_no_format(chat_format)) is not None:
            raise ConfigError(f"chat_format {why}, not {chat_format!r}")
        self._special_tokens = special_tokens
        self._format_setting = chat_format
        self._readbacks: dict[str, Readback] = {}
        self._backend = tokenizer.backend_tokenizer
        # `tokenizer(text)` would set these at every call, while other threads read them.
        self._backend.no_truncation()
        self._backend.no_padding()
        rules = _rules_of(self._backend)
        kind = decoder_kind(rules["decoder"])
        ids = _ids_of(self._backend)
        self.vocab_size: int = max(ids, default=-1) + 1
        """One above the highest token id, added tokens included. A model's own vocabulary may be padded beyond it."""
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids: Mapping[str, int] = {
            token.content: id_ for id_, token in added.items() if token.special
        }
        found = ((id_, self._backend.id_to_token(id_)) for id_ in ids)
        tokens = {id_: token for id_, token in found if token is not None}
        token_bytes = bytes_of(tokens, kind)
        self._special_ids = frozenset(self.special_token_ids.values())
        self._last_own = max((id_ for id_ in tokens if id_ not in added), default=-1)
        ordinary = {id_: token for id_, token in tokens.items() if token not in self.special_token_ids}
        if not any(ordinary.values()):
            raise CheckpointError(f"the tokenizer's vocabulary is empty: of {len(tokens)} tokens none has text")
        ordinary_bytes = {id_: data for id_, data in token_bytes.items() if id_ in ordinary}
        self._spelling = Spelling(self._backend, kind, ordinary, ordinary_bytes, skip_special=True)
        self._full_spelling = Spelling(self._backend, kind, tokens, token_bytes, skip_special=False)
        self._split = SplitSpecialTokens(self._backend, self.special_token_ids) if split_special_tokens else None
        self._fewest = fewest_tokens(self._backend, rules, kind, tokens, token_bytes)

    @classmethod
    def from_dir(cls, path: Path, chat_format: str = AUTO, *, split_special_tokens: bool = False) -> Tokenizer:
        """Loads the tokenizer of a checkpoint: a folder, or a GGUF file. Code in the checkpoint is never run.

        Raises:
            CheckpointError: there is none, or it is malformed.
            ConfigError: the tokenizer is not a fast one, its kind is not supported, or the constructor raises it.
        """
        return cls(open_checkpoint(path).tokenizer(), chat_format, split_special_tokens=split_special_tokens)

    @property
    def chat_format(self) -> str | None:
        """Format in which chat replies are parsed; None: as plain text. Found out on first use, as by `limits`."""
        return self._readback("default").format

    @property
    def reading_rules(self) -> str | None:
        """What decides how replies are read, besides the format: a version, and the abilities that are not read back.

        None if replies are plain text.
        """
        readbacks = [self._readback(name) for name in self._templates]
        if not any(readback.format for readback in readbacks):
            return None
        unread = [one.name.lower() for one in Ability if not all(self._is_read(each, one) for each in readbacks)]
        return " ".join([str(RULES), *unread])

    def _readback(self, name: str) -> Readback:
        """Returns what is read of the replies to a template. A format that the operator has set is used as it is."""
        if name not in self._readbacks:
            self._readbacks[name] = self._found_readback(name)
        return self._readbacks[name]

    def _found_readback(self, name: str) -> Readback:
        setting = None if self._format_setting in (AUTO, NONE) else self._format_setting
        if self._format_setting == NONE or name not in self._templates:
            return Readback(setting)
        return self._templates[name].read_back(self.special_token_ids, setting)

    def _is_read(self, readback: Readback, ability: Ability) -> bool:
        return self._format_setting != AUTO or not readback.fails(ability)

    def limits(self) -> list[str]:
        """Returns what the chat templates cannot do, by the names in `bridges/limits.py`.

        Renders small conversations, so it takes part of a second. What it finds out is kept for later chats.

        Raises:
            CheckpointError: a template does not compile, or takes too much time or memory for such a conversation.
        """
        found: set[str] = set()
        for name, template in self._templates.items():
            try:
                limits = set(template.limits(self._readback(name)))
            except InvalidRequest as error:
                raise CheckpointError(f"the chat template {name!r} cannot be used: {error}") from None
            is_for_tools = name == "tool_use" or "tool_use" not in self._templates
            found |= limits if is_for_tools else limits - OF_TOOLS
        return [name for name in LIMITS if name in found]

    def check_fits(self, vocab_size: int) -> None:
        """Checks that a model of `vocab_size` tokens has all tokens that text becomes.

        Tokens added to a vocabulary may be beyond it: some checkpoints have one for padding or for images there. Only a
        prompt that spells such a token out is refused.

        Raises:
            CheckpointError: the vocabulary itself is larger, so it belongs to another model.
        """
        if self._last_own >= vocab_size:
            raise CheckpointError(
                f"the tokenizer is that of another model: its tokens have ids up to {self._last_own}, "
                f"and the model has {vocab_size} tokens"
            )

    def rules(self) -> str:
        """Returns as JSON all that decides which tokens a text becomes and which text they have, except templates.

        It describes the tokenizer as loaded: two checkpoints whose files say the same in different ways get the same
        result. Takes a second for a large vocabulary.
        """
        backend = json.loads(self._backend.to_str())
        settings = {} if self._split is None else {"split_special_tokens": True}
        return json.dumps({"backend": backend, "special_tokens": self._special_tokens, **settings}, sort_keys=True)

    def encode(self, text: str, check: Check = let_pass) -> tuple[int, ...]:
        """Returns the token ids of a plain prompt, with the special tokens that the tokenizer itself adds, such as BOS.

        Special tokens spelled out in `text` become those tokens, the default of Hugging Face.

        Args:
            text: the prompt.
            check: called with the least number of tokens before they are made; it may refuse.

        Raises:
            InvalidRequest: the text holds lone surrogates.
        """
        return self._encode(text, check, add_special_tokens=True)

    def encode_chat(self, chat: Conversation, check: Check = let_pass) -> EncodedChat:
        """Encodes a conversation by the checkpoint's chat template, up to where the model's answer begins.

        This waits for the template, which runs in a process of its own: do not call it in an event loop.

        Args:
            chat: the conversation.
            check: as for `encode`, for the template's output.

        Raises:
            InvalidRequest: there is no chat template, or it refuses these messages, fails, or takes too much time, text
                or memory.
        """
        name = "tool_use" if chat.tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest("this model's tokenizer has no chat template; send a plain prompt instead of messages")
        template, readback = self._templates[name], self._readback(name)
        rendered = template.render(chat if self._split is None else self._split.marked(chat))
        text = rendered.text if self._split is None else unmarked(rendered.text)
        encoded = EncodedChat(
            self._encode_rendered(rendered.text, text, check),
            text,
            shows_tools=not chat.tools or template.shows_tools,
            reads_calls=self._is_read(readback, Ability.CALL),
            reads_several_calls=self._is_read(readback, Ability.CALLS),
            reads_reasoning=self._is_read(readback, Ability.REASONING),
            history_changes=rendered.history_changes,
        )
        if readback.format is None:
            return encoded
        return replace(
            encoded,
            reply_format=readback.format,
            reply_prefix=reply_prefix(readback.format, text, readback.turn),
            has_reasoning=encoded.reads_reasoning and shows_reasoning(readback.format, template.source),
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids`. Special tokens, and ids outside the vocabulary, have none.

        The text is what the vocabulary says: `clean_up_tokenization_spaces` is not applied, since it only tidies
        English punctuation and damages all other text.
        """
        return self._spelling.decode(token_ids)

    def spell_all(self, token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids` as `decode` does, with special tokens spelled out."""
        return self._full_spelling.decode(token_ids)

    def decode_prompt(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a prompt, without an unfinished last character, which belongs to the text after it."""
        return self._spelling.decode_prompt(token_ids)

    def detokenizer(
        self, *, skip_special_tokens: bool = True, prompt: Sequence[int] | None = None, goes_on: bool = False
    ) -> Detokenizer:
        """Returns a detokenizer for a new sequence of tokens. Special tokens have no text, or else their spelling.

        With a SentencePiece vocabulary there is no space before a text's first word.

        Args:
            skip_special_tokens: whether special tokens have no text.
            prompt: tokens that the sequence continues; None: it is decoded by itself.
            goes_on: whether even the first token has the text that `spell` returns, whatever the prompt is.
        """
        spelling = self._spelling if skip_special_tokens else self._full_spelling
        if goes_on:
            return spelling.detokenizer(self._spelling.inside)
        if prompt is None:
            return spelling.detokenizer()
        return spelling.detokenizer(self._spelling.end_of(prompt), self._special_ids)

    def spell(self, token_id: int) -> tuple[str, bytes]:
        """Returns text and bytes of one token inside a text, as `Spelling` does, with special tokens spelled out."""
        return self._full_spelling.spell(token_id)

    def encode_part(self, text: str) -> list[int]:
        """Returns the token ids of text inside a text: nothing is added."""
        return token_ids(self._backend, text, add_special_tokens=False)

    def _encode_rendered(self, rendered: str, text: str, check: Check) -> tuple[int, ...]:
        """Encodes a template's output, which may have marks, and without them is `text`."""
        if self._split is None:
            return self._encode(text, check, add_special_tokens=False)
        self._check(text, check)
        return tuple(self._split.token_ids(rendered))

    def _encode(self, text: str, check: Check, *, add_special_tokens: bool) -> tuple[int, ...]:
        self._check(text, check)
        return tuple(token_ids(self._backend, text, add_special_tokens=add_special_tokens))

    def _check(self, text: str, check: Check) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text is not valid Unicode: {error}") from error
        if check is not let_pass and self._fewest is not None:
            check(self._fewest.of(text))


def _templates_of(tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """Returns the chat templates by name: `default` and, for conversations with tools, `tool_use`."""
    given: Any = tokenizer.chat_template
    templates = given if isinstance(given, Mapping) else {"default": given}
    found = {name: templates[name] for name in ("default", "tool_use") if templates.get(name) is not None}
    for name, source in found.items():
        if not isinstance(source, str):
            raise ConfigError(f"the tokenizer's chat template {name!r} must be text, not {shown(source)}")
    return found


def _ids_of(backend: tokenizers.Tokenizer) -> list[int]:
    """Returns all ids that may be tokens, in order: few, however high the highest is.

    A vocabulary by piece names one id of each piece. Unigram's vocabulary is a list, which may hold a piece several
    times: its ids are the indices up to its length.
    """
    named = {id_ for has in (False, True) for id_ in backend.get_vocab(with_added_tokens=has).values()}
    return sorted(named.union(range(backend.get_vocab_size(with_added_tokens=False))))


def _rules_of(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """Returns some rules as in `tokenizer.json`, through an empty tokenizer: serializing a whole one takes a second."""
    shell = tokenizers.Tokenizer(tokenizers.models.BPE())
    for name in ("decoder", "normalizer", "pre_tokenizer"):
        if (rule := getattr(backend, name)) is not None:
            setattr(shell, name, rule)
    rules: dict[str, Any] = json.loads(shell.to_str())
    return rules
