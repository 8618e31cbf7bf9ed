"""Log-probabilities of completions agree with the text that was given out, whole and in parts."""

from __future__ import annotations

from functools import reduce

import pytest

from penstock.gateway.common.options import Shown
from penstock.gateway.openai.legacy_logprobs import LegacyLogprobs, joined
from penstock.producer import TokenLogprob
from penstock.protocol.wire import TopLogprob

SHOWN = Shown(logprobs=True)


def scored(id_: int, data: bytes, *top: TopLogprob) -> TokenLogprob:
    return TokenLogprob(id=id_, token=data.decode(errors="replace"), bytes=data, logprob=-1.0, top=top)


def other(id_: int, data: bytes) -> TopLogprob:
    return TopLogprob(id=id_, token=data.decode(errors="replace"), bytes=data, logprob=-2.0 - id_)


# The text, the bytes of its tokens inside a text, their names and offsets.
TEXTS: dict[str, tuple[str, list[bytes], list[str], list[int]]] = {
    "as spelled": (" Paris a", [b" Paris", b" a"], [" Paris", " a"], [0, 6]),
    "one space less": ("Paris a", [b" Paris", b" a"], ["Paris", " a"], [0, 5]),
    "all spaces less": ("a a", [b"   a", b" a"], ["a", " a"], [0, 1]),
    "a space of its own": (" a", [b" ", b" a"], ["", " a"], [0, 0]),
    "two spaces": ("  a", [b" ", b" a"], [" ", " a"], [0, 1]),
    "parts of a character": ("é!", [b"\xc3", b"\xa9", b"!"], [r"bytes:\xc3", r"bytes:\xa9", "!"], [0, 0, 1]),
    "a character of the prompt": ("😀!", [b"\x98", b"\x80", b"!"], [r"bytes:\x98", r"bytes:\x80", "!"], [0, 0, 1]),
    "a broken character of the prompt": ("\ufffda!", [b"a", b"!"], ["a", "!"], [1, 2]),
    "a backslash in a part": ("\\\ufffda", [b"\\\xf0", b"a"], [r"bytes:\x5c\xf0", "a"], [0, 1]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_names_and_offsets_are_those_of_the_text(name: str) -> None:
    text, data, names, offsets = TEXTS[name]
    tokens = [scored(id_, each) for id_, each in enumerate(data)]
    whole = LegacyLogprobs(SHOWN).part(tokens, text, is_last=True)
    assert (whole["tokens"], whole["text_offset"]) == (names, offsets)
    for late in range(1, len(text) + 1):  # text may come with a later token, or with the end
        writer = LegacyLogprobs(SHOWN)
        parts = [writer.part([token], "") for token in tokens[:-1]]
        parts += [writer.part(tokens[-1:], text[:late]), writer.part((), text[late:], is_last=True)]
        assert reduce(joined, parts) == whole


def test_a_prompt_gives_up_the_space_of_its_first_word() -> None:
    writer = LegacyLogprobs(SHOWN)
    begin, prompt = None, [scored(5, b" the"), scored(6, b" a")]
    found = joined(writer.prompt([begin, *prompt], "the a"), writer.part([scored(7, b" b")], "the a b", is_last=True))
    assert found["tokens"] == ["", "the", " a", " b"]
    assert found["text_offset"] == [0, 0, 3, 5]


def test_no_candidate_overwrites_another() -> None:
    parts = [other(id_, bytes([0xF0 + id_])) for id_ in range(4)]
    alike = [other(10, b" Paris"), other(11, b"Paris"), other(12, b"Paris")]
    (best,) = LegacyLogprobs(SHOWN).part([scored(10, b" Paris", *alike, *parts)], "Paris")["top_logprobs"]
    assert best == {
        "Paris": -1.0, "token_id:11": -13.0, "token_id:12": -14.0,
        **{rf"bytes:\xf{id_}": -2.0 - id_ for id_ in range(4)},
    }  # fmt: skip
