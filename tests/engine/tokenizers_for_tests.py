"""Builds small tokenizers of the kinds that checkpoints come with."""

from __future__ import annotations

from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

LLAMA2_PIECES = ("▁", "▁a", "▁the", "a", "b", "the", "é", "▁é", "\N{REPLACEMENT CHARACTER}", ".", "<0x>", "<0xZZ>", "")
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% if m.content == 'refused' %}{{ raise_exception('not that') }}{% endif %}"
    "<|start|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)


def byte_level(**kwargs: Any) -> PreTrainedTokenizerFast:
    """Builds byte-level BPE like that of GPT-2, Llama 3 and Qwen: 256 bytes, some merges, special and other added
    tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ã", "©"), ("ð", "Ł"), ("ðŁ", "ĺ"), ("Ľ", "Ġ")]
    pieces = [*alphabet, *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE(vocab={piece: id_ for id_, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|start|>", "<|end|>"])
    backend.add_tokens(["<tool>", AddedToken("é à", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", **kwargs)


def llama2(**kwargs: Any) -> PreTrainedTokenizerFast:
    """Builds SentencePiece-style BPE like that of Llama 2 and Mistral 7B: a leading space, bytes for what the pieces
    lack.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *LLAMA2_PIECES]
    vocab = {piece: id_ for id_, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **kwargs)


def gemma(**kwargs: Any) -> PreTrainedTokenizerFast:
    """Builds SentencePiece-style BPE without a leading space, as of Gemma."""
    tokenizer = llama2(**kwargs)
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def metaspace() -> PreTrainedTokenizerFast:
    return metaspace_that_prepends("always")


def metaspace_that_prepends(scheme: Literal["always", "first", "never"]) -> PreTrainedTokenizerFast:
    pieces = ["<unk>", "</s>", "▁", "▁a", "▁b", "a", "b▁c", "é"]
    backend = Tokenizer(
        models.BPE(vocab={piece: id_ for id_, piece in enumerate(pieces)}, merges=[], unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def unigram() -> PreTrainedTokenizerFast:
    """Builds a list of pieces with some twice, one of these special, as nothing forbids."""
    pieces = ["<unk>", "</s>", "▁a", "a", "▁", "é", "a", "b▁c", "▁a", "</s>", "a"]
    backend = Tokenizer(models.Unigram([(piece, -float(id_)) for id_, piece in enumerate(pieces)], unk_id=0))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def word_level(decoder: Any = None) -> PreTrainedTokenizerFast:
    """Builds a tokenizer of whole words; without a decoder they are joined by spaces."""
    pieces = ["[UNK]", "[EOS]", "a", "the", "##s", "é", ".", "n't", ""]
    backend = Tokenizer(models.WordLevel({piece: id_ for id_, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["[EOS]"])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def with_stripping(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Adds tokens that swallow white space beside them."""
    backend = tokenizer.backend_tokenizer
    backend.add_tokens([AddedToken("<left>", lstrip=True), AddedToken("<right>", rstrip=True, normalized=False)])
    backend.add_special_tokens([AddedToken("<|user|>", rstrip=True, normalized=False), AddedToken("<m>", lstrip=True)])
    return tokenizer
