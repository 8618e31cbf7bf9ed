"""The text that one token stands for within other text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.tokenizers_for_tests import byte_level, llama2, metaspace, word_level

BYTE_LEVEL = Tokenizer(byte_level())
LLAMA2 = Tokenizer(llama2())
METASPACE = Tokenizer(metaspace())
WORD_PIECE = Tokenizer(word_level(decoders.WordPiece()))


def ids_of(tokenizer: Tokenizer) -> dict[str, int]:
    return tokenizer._backend.get_vocab(with_added_tokens=True)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA2], ids=["byte-level", "llama2"])
@given(text=st.text())
def test_the_bytes_of_all_tokens_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = [id_ for id_ in tokenizer.encode(text) if id_ != ids_of(tokenizer).get("<s>")]
    space = b" " if tokenizer is LLAMA2 and text else b""  # the one that decoding drops at the beginning
    assert b"".join(tokenizer.spell(id_)[1] for id_ in ids) == space + text.encode()


@pytest.mark.parametrize(
    ("tokenizer", "token", "text", "data"),
    [
        (BYTE_LEVEL, "Ġthe", " the", b" the"),
        (BYTE_LEVEL, "Ã©", "é", "é".encode()),
        (BYTE_LEVEL, "ðŁ", "\ufffd", b"\xf0\x9f"),  # half a character
        (BYTE_LEVEL, "<|end|>", "<|end|>", b"<|end|>"),  # special
        (BYTE_LEVEL, "é à", "é à", "é à".encode()),  # added, not in the byte alphabet
        (LLAMA2, "▁the", " the", b" the"),
        (LLAMA2, "the", "the", b"the"),
        (LLAMA2, "<0x41>", "A", b"A"),
        (LLAMA2, "<0xE4>", "\ufffd", b"\xe4"),
        (LLAMA2, "</s>", "</s>", b"</s>"),
        (METASPACE, "▁a", " a", b" a"),
        (METASPACE, "b▁c", "b c", b"b c"),
        (METASPACE, "</s>", "</s>", b"</s>"),
        (WORD_PIECE, "the", " the", b" the"),
        (WORD_PIECE, "##s", "s", b"s"),
        (WORD_PIECE, "[EOS]", " [EOS]", b" [EOS]"),
    ],
)
def test_the_text_of_one_token(tokenizer: Tokenizer, token: str, text: str, data: bytes) -> None:
    assert tokenizer.spell(ids_of(tokenizer)[token]) == (text, data)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA2], ids=["byte-level", "llama2"])
def test_an_id_beyond_the_vocabulary_has_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.spell(tokenizer.vocab_size + 3) == ("", b"")
