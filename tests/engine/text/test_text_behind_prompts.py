"""The text of an answer is what the same tokenizer says behind its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from penstock.engine.request import Request, SamplingParams
from penstock.engine.text.decoders import DecoderKind
from penstock.engine.text.reply import ReplyDecoder, ReplyStreams
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.tokenizers_for_tests import (
    byte_level,
    gemma,
    llama2,
    metaspace,
    metaspace_that_prepends,
    unigram,
    with_stripping,
    word_level,
)

KINDS: dict[str, Callable[[], Any]] = {
    "byte level": byte_level,
    "SentencePiece": llama2,
    "SentencePiece without a leading space": gemma,
    "Metaspace always": metaspace,
    "Metaspace first": lambda: metaspace_that_prepends("first"),
    "Metaspace never": lambda: metaspace_that_prepends("never"),
    "Unigram": unigram,
    "WordPiece": lambda: word_level(decoders.WordPiece()),
    "WordPiece without clean-up": lambda: word_level(decoders.WordPiece(cleanup=False)),
    "words": word_level,
    "byte level, added tokens that strip": lambda: with_stripping(byte_level()),
    "SentencePiece, added tokens that strip": lambda: with_stripping(llama2()),
}
TOKENIZERS = {name: Tokenizer(make()) for name, make in KINDS.items()}
TEXTS = ("the a b é the", "", " a", "a 😀é the", "the<|user|> a <m> b<left>a <right>  the", "a\ufffdb")


def of_answer(
    tokenizer: Tokenizer, prompt: Sequence[int], answer: Sequence[int], *, begins_turn: bool = False, **sampling: Any
) -> list[str]:
    """Returns what each token of the answer released, and what came at its end."""
    stream = stream_of(tokenizer, prompt, begins_turn=begins_turn, **sampling)
    return [*[stream.push(id_)[0].text for id_ in answer], stream.finish().text]


def stream_of(
    tokenizer: Tokenizer, prompt: Sequence[int], *, begins_turn: bool = False, **sampling: Any
) -> ReplyDecoder:
    request = Request("r", tuple(prompt), SamplingParams(**sampling), begins_turn=begins_turn)
    return ReplyStreams(tokenizer).stream(request, 0)


def by_the_rule(tokenizer: Tokenizer, prompt: Sequence[int], answer: Sequence[int]) -> str:
    """Returns what the library says behind the prompt up to its unfinished character; a run of bytes begins anew."""
    head = tokenizer.decode_prompt(prompt)
    byte_of = tokenizer._spelling.byte_of
    visible = [id_ for id_ in prompt if tokenizer._spelling.is_visible(id_)]
    run = list(takewhile(lambda id_: byte_of(id_) is not None, reversed(visible)))[::-1]
    if tokenizer._spelling._kind is DecoderKind.BYTES or not run:
        return tokenizer.decode([*prompt, *answer])[len(head) :]
    num_unfinished = next(n for n in range(4) if tokenizer.decode(visible[: len(visible) - n]) == head)
    if not is_text(b"".join(byte_of(id_) or b"" for id_ in run[: len(run) - num_unfinished])):
        return tokenizer.decode([*prompt, *answer])[len(head) :]
    (a,) = tokenizer.encode_part("a")[-1:]
    return tokenizer.decode([a, *run[len(run) - num_unfinished :], *answer])[len(tokenizer.decode([a])) :]


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def bytes_as_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    id_of = {tokenizer._spelling.byte_of(id_): id_ for id_ in range(tokenizer.vocab_size)}
    return [id_of[bytes([byte])] for byte in data] if b"\x80" in id_of else []


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_an_answer_is_what_its_tokenizer_says_behind_its_prompt(name: str, data: st.DataObject) -> None:
    """Prompts are cut at every token and byte; chunks are single tokens, which any chunk is made of."""
    tokenizer = TOKENIZERS[name]
    any_id = st.integers(0, tokenizer.vocab_size + 1)
    text = data.draw(st.sampled_from(TEXTS) | st.text("ab é😀", max_size=6))
    ids = list(tokenizer.encode(text)) + bytes_as_tokens(tokenizer, data.draw(st.text("aé😀", max_size=2)).encode())
    ids += data.draw(st.lists(any_id, max_size=6))
    cut = data.draw(st.integers(0, len(ids)))
    prompt, answer = ids[:cut], ids[cut:]
    released = of_answer(tokenizer, prompt, answer)
    assert "".join(released) == by_the_rule(tokenizer, prompt, answer)
    if all(tokenizer._spelling.is_visible(id_) for id_ in answer):
        assert of_answer(tokenizer, prompt, answer, skip_special_tokens=False) == released


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_is_cut_anywhere_is_the_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    for cut in range(len(ids) + 1):
        answer = "".join(of_answer(tokenizer, ids[:cut], ids[cut:]))
        assert tokenizer.decode_prompt(ids[:cut]) + answer == tokenizer.decode(ids), cut


LLAMA2, BYTES = TOKENIZERS["SentencePiece"], TOKENIZERS["byte level"]
PROMPT = LLAMA2.encode("the")
A, BEGIN, END = 3 + 256 + 1, 1, 2


def test_a_prompt_keeps_the_space_of_the_answer_and_a_turn_does_not() -> None:
    assert of_answer(LLAMA2, PROMPT, [A, A]) == [" a", " a", ""]
    assert of_answer(LLAMA2, PROMPT, [A, A], begins_turn=True) == ["a", " a", ""]
    assert of_answer(LLAMA2, [BEGIN], [A, A]) == ["a", " a", ""]


def test_a_stop_string_matches_the_answer_s_first_space_and_its_first_character() -> None:
    assert stream_of(LLAMA2, PROMPT, stop=(" a",)).push(A)[1] == " a"
    half = "é".encode()
    prompt, (rest,) = bytes_as_tokens(BYTES, b"x" + half[:1]), bytes_as_tokens(BYTES, half[1:])
    assert stream_of(BYTES, prompt, stop=("é",)).push(rest)[1] == "é"


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_special_tokens_count_as_no_text_for_the_first_space(skip_special_tokens: bool) -> None:
    shown = "" if skip_special_tokens else "</s>"
    found = of_answer(LLAMA2, [BEGIN], [END, A, END, A], skip_special_tokens=skip_special_tokens)
    assert found == [shown, "a", shown, " a", ""]


@pytest.mark.parametrize("tokenizer", [BYTES, LLAMA2])
def test_a_character_that_a_prompt_began_is_the_answer_s(tokenizer: Tokenizer) -> None:
    data = "é😀".encode()
    a, *_ = bytes_as_tokens(tokenizer, b"a")
    for cut in range(3, len(data)):
        prompt = bytes_as_tokens(tokenizer, data[:cut])
        assert tokenizer.decode_prompt(prompt) == "é"
        assert "".join(of_answer(tokenizer, prompt, bytes_as_tokens(tokenizer, data[cut:]))) == "😀"
        invalid = "\ufffd" * (cut - 2 if tokenizer is LLAMA2 else 1)
        assert "".join(of_answer(tokenizer, prompt, [])) == invalid
        broken = "".join(of_answer(tokenizer, prompt, [a]))
        assert broken == (invalid + "a" if tokenizer is BYTES else invalid + "\ufffd")


def test_a_run_of_bytes_that_the_prompt_broke_stays_broken() -> None:
    prompt = bytes_as_tokens(LLAMA2, b"\x80\xc3")
    assert LLAMA2.decode_prompt(prompt) == "\ufffd"
    assert of_answer(LLAMA2, prompt, bytes_as_tokens(LLAMA2, b"\xa9")) == ["\ufffd" * 2, ""]
    assert of_answer(LLAMA2, prompt, []) == ["\ufffd"]


def test_half_of_a_surrogate_is_no_unfinished_character() -> None:
    for half in (b"\xed\xa0", b"\xed\xbc"):
        assert BYTES.decode_prompt(bytes_as_tokens(BYTES, half)) == "\ufffd" * 2
        assert of_answer(BYTES, bytes_as_tokens(BYTES, half), []) == [""]
