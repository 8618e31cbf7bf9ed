"""Reads the tokenizer, chat templates and generation defaults from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from penstock.engine.errors import CheckpointError, ConfigError, shown
from penstock.engine.loading.gguf.header import GGUFHeader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

KEY = "tokenizer.ggml."
MAX_PIECE, MAX_PIECES, MAX_ADDED = 2**9, 2**22, 2**14
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _CL100K.replace("{1,3}", "")
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K, _TEKKEN = _CASED % (_ENDING, _ENDING, "{1,3}"), _CASED % ("", "", "")
_DIGIT = r"\p{N}"

# Regular expressions that split text before bytes are merged, by `tokenizer.ggml.pre`.
SPLITS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("gpt-2", "phi-2", "olmo"), (_GPT2,)),
        **dict.fromkeys(("command-r", "refact", "starcoder", "smollm"), (_DIGIT, _GPT2)),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_CL100K,)),
        **dict.fromkeys(("falcon3", "pixtral"), (_CL100K,)),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
        **dict.fromkeys(("gpt-4o", "llama4"), (_O200K,)),
        "tekken": (_TEKKEN,),
    }
)
WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a whole piece that is a token needs no merges
COMPOSED = ("qwen2", "deepseek-r1-qwen", "command-r")  # NFC comes first
BEGINS_TEXT = ("llama-bpe", "llama3", "llama-v3", "tekken")  # with BOS, unless the file says otherwise

# Control tokens that end a turn, whether or not the file names them so.
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
HARMONY_ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")  # for gpt-oss, where <|end|> only ends a part of the answer
# Which tokens swallow the white space beside them is in llama.cpp's code, not in the file. The code goes by the model's
# name: for Phi-3, all added tokens but these. Files of Phi-3 have other names too. Other such models are embedders.
SWALLOWS = ("phi-3", "phi3")
SWALLOWS_NOT = ("<unk>", "<s>", "<|endoftext|>")

SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def tokenizer_of(header: GGUFHeader) -> PreTrainedTokenizerFast:
    """Returns the tokenizer, with the chat templates.

    Raises:
        CheckpointError: the metadata does not describe one.
        ConfigError: it is of a kind that is not supported.
    """
    from transformers import PreTrainedTokenizerFast  # as in `Folder.tokenizer`

    if f"{KEY}model" not in header.metadata:
        raise CheckpointError(
            f"{header.file.name} holds no tokenizer: it has no {KEY}model; convert the model with its vocabulary"
        )
    kind = header.text(f"{KEY}model")
    vocabulary = _Vocabulary(header)
    if kind not in _KINDS:
        raise ConfigError(
            f"{header.file.name}: {KEY}model = {shown(kind)} is not supported; supported are {', '.join(_KINDS)}"
        )
    try:
        backend = _KINDS[kind](vocabulary)
    except (CheckpointError, ConfigError):
        raise
    except Exception as error:  # for invalid merges the library raises plain Exception
        raise CheckpointError(f"{header.file.name} describes no tokenizer that can be made: {error}") from error
    _refuse_repeated(backend, vocabulary)
    _add_tokens(backend, vocabulary)
    _begin_and_end(backend, vocabulary, kind)
    special = {f"{name}_token": vocabulary.token(id_key) for name, id_key in _SPECIAL.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=_templates(header),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token is not None},
    )


def end_token_ids(header: GGUFHeader) -> tuple[int, ...]:
    """Returns the ids of end tokens: those that the file names, and control tokens that end turns by their names."""
    vocabulary = _Vocabulary(header)
    named = [vocabulary.id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    control = {token: id_ for id_, token in vocabulary.tokens_of_type(TokenType.CONTROL)}
    ends = HARMONY_ENDS if HARMONY_ENDS[0] in control else TURN_ENDS
    found = (*(id_ for id_ in named if id_ is not None), *(control[token] for token in ends if token in control))
    return tuple(dict.fromkeys(found))


def sampling_fields(header: GGUFHeader) -> dict[str, Any]:
    """Returns the fields of a generation_config.json, from what the file recommends."""
    stated = {name: header.metadata.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    fields = {name: value for name, value in stated.items() if value is not None}
    if fields.get("temperature") == 0:
        return {name: value for name, value in fields.items() if name != "temperature"} | {"do_sample": False}
    return {**fields, "do_sample": True}


class _Vocabulary:
    """The tokens of a file, and what its metadata says of them."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.tokens: list[str] = header.items(f"{KEY}tokens", str)
        self.types: list[int] = header.items(f"{KEY}token_type", int) or [TokenType.NORMAL] * len(self.tokens)
        if not self.tokens or len(self.types) != len(self.tokens):
            raise CheckpointError(
                f"{header.file.name} has {len(self.tokens)} {KEY}tokens and {len(self.types)} {KEY}token_type"
            )

    def tokens_of_type(self, kind: TokenType) -> list[tuple[int, str]]:
        return [(id_, self.tokens[id_]) for id_, found in enumerate(self.types) if found == kind]

    def id(self, key: str) -> int | None:
        """Reads the id of a special token. Raises CheckpointError if there is no such token."""
        value = self.header.metadata.get(f"{KEY}{key}")
        if value is not None and (type(value) is not int or not 0 <= value < len(self.tokens)):
            raise CheckpointError(
                f"{self.header.file.name}: {KEY}{key} = {shown(value)}, and there are {len(self.tokens)} tokens"
            )
        return value

    def token(self, key: str) -> str | None:
        id_ = self.id(key)
        return None if id_ is None else self.tokens[id_]

    def flag(self, key: str, default: bool) -> bool:
        """Reads a flag. Raises CheckpointError if it is not a boolean."""
        value = self.header.metadata.get(f"{KEY}{key}", default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.header.file.name}: {KEY}{key} must be true or false, not {shown(value)}")
        return value

    @property
    def pre(self) -> str:
        """The name of the rule by which text is split.

        Raises:
            ConfigError: it is not known.
        """
        value = self.header.metadata.get(f"{KEY}pre", "missing")
        if value not in SPLITS:
            known = ", ".join(SPLITS)
            raise ConfigError(
                f"{self.header.file.name}: {KEY}pre = {shown(value)} is not supported; supported are {known}"
            )
        return str(value)

    def merges(self) -> list[tuple[str, str]]:
        """Reads the merges. Raises CheckpointError if they are not pairs."""
        pairs = [tuple(merge.split(" ")) for merge in self.header.items(f"{KEY}merges", str)]
        wrong = next((number for number, pair in enumerate(pairs) if len(pair) != 2), None)
        if wrong is not None:
            raise CheckpointError(f"{self.header.file.name}: {KEY}merges has no pair at {wrong}")
        return [(first, second) for first, second in pairs]


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    """Builds a byte-level BPE tokenizer, as for GPT-2."""
    pre = vocabulary.pre
    padding = {id_ for id_, _ in vocabulary.tokens_of_type(TokenType.UNUSED)}
    vocab = {token: id_ for id_, token in enumerate(vocabulary.tokens) if id_ not in padding}
    model = models.BPE(vocab=vocab, merges=vocabulary.merges(), ignore_merges=pre in WHOLE_WORDS_FIRST)
    backend = Tokenizer(model)
    if pre in COMPOSED:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in SPLITS[pre]]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """Builds a BPE tokenizer of characters, with bytes for missing ones; without merges, they follow from the tokens'
    scores.
    """
    tokens = _as_pieces(vocabulary)
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    merges = vocabulary.merges() or _implied_merges(vocabulary, tokens)
    unknown = vocabulary.token("unknown_token_id")
    has_bytes = bool(vocabulary.tokens_of_type(TokenType.BYTE))
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    )
    text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    if vocabulary.flag("add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(SPACE))
        text.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(text)
    return backend


def _as_pieces(vocabulary: _Vocabulary) -> list[str]:
    """Returns the tokens as pieces. llama.cpp's converter writes spaces in user-defined tokens, instead of
    SentencePiece's mark.
    """
    tokens = list(vocabulary.tokens)
    for id_, token in vocabulary.tokens_of_type(TokenType.USER_DEFINED):
        if token.strip(" ") == "":
            tokens[id_] = token.replace(" ", SPACE)
    return tokens


def _implied_merges(vocabulary: _Vocabulary, tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Derives merges: any two pieces that form a third one; the better its rank, the earlier the merge."""
    from transformers.tokenization_utils_base import generate_merges

    merged = (TokenType.NORMAL, TokenType.USER_DEFINED)
    longest, total = max(map(len, tokens)), sum(map(len, tokens))
    if longest > MAX_PIECE or total > MAX_PIECES:  # each token is split at every place
        raise CheckpointError(
            f"{vocabulary.header.file.name} has no merges and tokens of up to {longest} characters, {total} in all, "
            f"where {MAX_PIECE} and {MAX_PIECES} may be"
        )
    apart = {token for token, kind in zip(tokens, vocabulary.types, strict=True) if kind not in merged}
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = generate_merges(vocab, _ranks(vocabulary, tokens), apart)
    return merges


def _ranks(vocabulary: _Vocabulary, tokens: Sequence[str]) -> dict[str, float]:
    """Ranks tokens by scores; Gemma's are in the order of its tokens."""
    scores: list[float] = vocabulary.header.items(f"{KEY}scores", float)
    if vocabulary.header.architecture.startswith("gemma") or not scores:
        return {token: -float(id_) for id_, token in enumerate(tokens)}
    if len(scores) != len(tokens):
        raise CheckpointError(f"{vocabulary.header.file.name} has {len(scores)} scores of {len(tokens)} tokens")
    return dict(zip(tokens, scores, strict=True))


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}
_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}


def _refuse_repeated(backend: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Raises CheckpointError if two tokens have the same text: BPE knows one id for each text."""
    ids = backend.get_vocab()
    for kind in (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.BYTE):
        for id_, token in vocabulary.tokens_of_type(kind):
            other = ids.get(token, id_)
            if other != id_:
                raise CheckpointError(
                    f"{vocabulary.header.file.name} has token {shown(token)} twice, as {id_} and as {other}: "
                    "a reply would lose the text of one"
                )


def _add_tokens(backend: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Adds the tokens that are found whole in a text, before anything else."""
    pieces = _as_pieces(vocabulary)
    special = [*vocabulary.tokens_of_type(TokenType.CONTROL), *vocabulary.tokens_of_type(TokenType.UNKNOWN)]
    num_added = len(special) + len(vocabulary.tokens_of_type(TokenType.USER_DEFINED))
    if num_added > MAX_ADDED:
        raise CheckpointError(
            f"{vocabulary.header.file.name} has {num_added} special and added tokens, at most {MAX_ADDED} may be"
        )
    swallows = _swallows_space(vocabulary.header)
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False, rstrip=swallows and token not in SWALLOWS_NOT)
            for _, token in special
        ]
    )
    users = [(pieces[id_], token) for id_, token in vocabulary.tokens_of_type(TokenType.USER_DEFINED)]
    backend.add_tokens(
        [
            AddedToken(piece, normalized=piece != token, rstrip=swallows and token not in SWALLOWS_NOT)
            for piece, token in users
        ]
    )


def _swallows_space(header: GGUFHeader) -> bool:
    """Whether added tokens swallow the white space after them. Phi-4 has Phi-3's architecture, and byte-level BPE."""
    name = str(header.metadata.get("general.name", "")).lower()
    is_phi3 = header.architecture == "phi3" and header.metadata.get(f"{KEY}model") == "llama"
    return is_phi3 or any(part in name for part in SWALLOWS)


def _begin_and_end(backend: Tokenizer, vocabulary: _Vocabulary, kind: str) -> None:
    begins = kind == "llama" or vocabulary.header.metadata.get(f"{KEY}pre") in BEGINS_TEXT
    parts, ids = ["$A"], {}
    if vocabulary.flag("add_bos_token", begins) and (bos := vocabulary.token("bos_token_id")) is not None:
        parts.insert(0, bos)
        ids[bos] = vocabulary.id("bos_token_id")
    if vocabulary.flag("add_eos_token", False) and (eos := vocabulary.token("eos_token_id")) is not None:
        parts.append(eos)
        ids[eos] = vocabulary.id("eos_token_id")
    if ids:
        backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=list(ids.items()))


def _templates(header: GGUFHeader) -> str | dict[str, str] | None:
    """Returns the single template, or all by name if there are some for special cases."""
    if "tokenizer.chat_template" not in header.metadata:
        return None
    default = header.text("tokenizer.chat_template")
    names = header.items("tokenizer.chat_templates", str)
    named = {name: header.text(f"tokenizer.chat_template.{name}") for name in names if name != "default"}
    return {"default": default, **named} if named else default
