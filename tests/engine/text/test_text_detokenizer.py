from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from penstock.engine.errors import ConfigError
from penstock.engine.text.decoders import DecoderKind, decoder_kind
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.tokenizers_for_tests import byte_level, llama2, metaspace, unigram, word_level

BYTE_LEVEL = Tokenizer(byte_level())
LLAMA2 = Tokenizer(llama2())
OTHERS = {
    "metaspace": Tokenizer(metaspace()),
    "unigram": Tokenizer(unigram()),
    "word-level": Tokenizer(word_level()),
    "word-piece": Tokenizer(word_level(decoders.WordPiece())),
}
ALL = {"byte-level": BYTE_LEVEL, "llama2": LLAMA2, **OTHERS}


def pieces(tokenizer: Tokenizer, ids: list[int] | tuple[int, ...], *, skip_special_tokens: bool = True) -> list[str]:
    """Returns what each push released, and then the flush."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    return [*[detokenizer.push(id_) for id_ in ids], detokenizer.flush()]


def llama2_bytes(data: bytes) -> list[int]:
    return [3 + byte for byte in data]


@pytest.mark.parametrize("name", ALL)
@given(data=st.data())
def test_joined_text_is_the_decode_of_all_ids(name: str, data: st.DataObject) -> None:
    tokenizer = ALL[name]
    any_id = st.integers(0, tokenizer.vocab_size + 2)  # some are in no vocabulary
    one_of_the_last = st.integers(max(tokenizer.vocab_size - 14, 0), tokenizer.vocab_size - 1)  # longer than one byte
    ids = data.draw(st.lists(any_id | one_of_the_last, max_size=40))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)
    spelled = tokenizer._backend.decode(ids, skip_special_tokens=False)
    assert "".join(pieces(tokenizer, ids, skip_special_tokens=False)) == spelled


@pytest.mark.parametrize("name", ALL)
def test_each_token_of_the_library_has_its_text_in_a_stream(name: str) -> None:
    """The library is asked for ids one by one: a map of pieces has one id for each piece."""
    tokenizer = ALL[name]
    ids = [id_ for id_ in range(tokenizer.vocab_size + 2) if tokenizer._backend.id_to_token(id_) is not None]
    assert max(ids) + 1 == tokenizer.vocab_size
    for id_ in ids:
        twice = [id_, id_]
        assert "".join(pieces(tokenizer, twice)) == tokenizer._backend.decode(twice, skip_special_tokens=True), id_
        spelled = "".join(pieces(tokenizer, twice, skip_special_tokens=False))
        assert spelled == tokenizer._backend.decode(twice, skip_special_tokens=False), id_
        alone = tokenizer.detokenizer(skip_special_tokens=False, goes_on=True)
        assert alone.push(id_) + alone.flush() == tokenizer.spell(id_)[0], id_


@pytest.mark.parametrize("name", ["byte-level", "llama2"])
@given(text=st.text())
def test_joined_text_of_encoded_unicode(name: str, text: str) -> None:
    tokenizer = ALL[name]
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(ids=st.lists(st.sampled_from([*range(128, 259), 2, 259, 260, 261, 262, 267]), max_size=30))
def test_byte_runs_broken_in_every_way(ids: list[int]) -> None:
    assert "".join(pieces(LLAMA2, ids)) == LLAMA2.decode(ids)


def test_every_short_byte_string_is_replaced_as_the_library_does() -> None:
    """Strings have one byte of each class that UTF-8 distinguishes, in every order."""
    classes = (0x41, 0x80, 0x90, 0xA0, 0xBF, 0xC1, 0xC3, 0xE0, 0xE1, 0xED, 0xF0, 0xF1, 0xF4, 0xF5)
    id_of = {BYTE_LEVEL.spell(id_)[1]: id_ for id_ in range(256)}
    for length in range(1, 5):
        for combination in itertools.product(classes, repeat=length):
            ids = [id_of[bytes([byte])] for byte in combination]
            assert "".join(pieces(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids), bytes(combination).hex()


@given(data=st.binary(max_size=30))
def test_byte_level_holds_back_three_bytes_at_most(data: bytes) -> None:
    id_of = {BYTE_LEVEL.spell(id_)[1]: id_ for id_ in range(256)}
    detokenizer = BYTE_LEVEL.detokenizer()
    released = ""
    for end, byte in enumerate(data, start=1):
        released += detokenizer.push(id_of[bytes([byte])])
        certain = BYTE_LEVEL.decode([id_of[bytes([byte])] for byte in data[: max(end - 3, 0)]]).rstrip("\ufffd")
        assert released.startswith(certain)


@pytest.mark.parametrize("name", ["metaspace", "word-level", "word-piece"])
@given(data=st.data())
def test_tokens_that_are_text_are_never_held_back(name: str, data: st.DataObject) -> None:
    tokenizer = ALL[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=10))
    assert pieces(tokenizer, ids)[-1] == ""


def test_an_invalid_run_of_bytes_is_released_as_it_comes() -> None:
    assert pieces(LLAMA2, llama2_bytes(b"\x80\x80a")) == ["\ufffd", "\ufffd", "\ufffd", ""]
    assert pieces(LLAMA2, llama2_bytes("é".encode() + b"\xe4a")) == ["", "", "", "\ufffd" * 4, ""]


def test_a_run_of_bytes_ends_at_the_next_piece_and_not_at_a_special_token() -> None:
    a = 3 + 256 + 1
    assert pieces(LLAMA2, [a, *llama2_bytes("é".encode()), a]) == ["a", "", "", "é a", ""]
    assert pieces(LLAMA2, [*llama2_bytes("é".encode()), 2, *llama2_bytes(b"\xe4")]) == ["", "", "", "", "\ufffd" * 3]


def test_only_the_first_space_is_dropped_even_after_special_tokens() -> None:
    a = 3 + 256 + 1
    assert pieces(LLAMA2, [1, a, 2, a, 3 + 256, a]) == ["", "a", "", " a", " ", " a", ""]


def test_a_piece_with_no_text_is_no_context() -> None:
    a, empty = 3 + 256 + 1, LLAMA2.vocab_size - 1
    assert pieces(LLAMA2, [a, empty, a]) == ["a", "", " a", ""]
    assert pieces(LLAMA2, [*llama2_bytes(b"\x80"), empty, *llama2_bytes(b"!"), a]) == ["\ufffd", "", "", "! a", ""]
    assert pieces(LLAMA2, [*llama2_bytes(b"!"), empty, a]) == ["", "!", " a", ""]
    assert pieces(LLAMA2, [empty, 3 + 256, empty, a]) == ["", "", "", " a", ""]


def test_a_detokenizer_is_a_function_of_the_ids() -> None:
    ids = BYTE_LEVEL.encode("the 🛁é")
    resumed = BYTE_LEVEL.detokenizer()
    for id_ in ids[:6]:
        resumed.push(id_)
    assert [resumed.push(id_) for id_ in ids[6:]] == pieces(BYTE_LEVEL, ids)[6:-1]


@pytest.mark.parametrize(
    ("decoder", "kind"),
    [
        (None, DecoderKind.TEXT),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}, DecoderKind.BYTES),
        ({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}, DecoderKind.BYTE_RUNS),
        ({"type": "Sequence", "decoders": [{"type": "Metaspace"}, {"type": "Fuse"}]}, DecoderKind.TEXT),
    ],
)
def test_kinds_of_decoder(decoder: dict[str, object] | None, kind: DecoderKind) -> None:
    assert decoder_kind(decoder) is kind


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        ({"type": "BPEDecoder", "suffix": "</w>"}, "BPEDecoder"),
        ({"type": "CTC"}, "CTC"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Replace"}]}, "Fuse > Replace"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "start": 0, "stop": 1}]}, "Strip"),
        ({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Metaspace"}]}, "Metaspace"),
    ],
)
def test_a_decoder_that_can_take_text_back_is_refused(decoder: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        decoder_kind(decoder)
