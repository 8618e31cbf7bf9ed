"""Calls and answers on the wire; docs/wire.md says the same."""

from __future__ import annotations

import re

import pytest

from penstock.protocol.wire import (
    CALLS,
    DEFAULT_TIMEOUT_MS,
    MAX_TIMEOUT_MS,
    AnswerEntry,
    Envelope,
    ModelCard,
    WireError,
    decode_answer,
    parse_call,
)
from tests.protocol.wire.test_wire_docs import TEXT, rows

ENTRY = "1700000000000-0"


@pytest.mark.parametrize(
    ("fields", "envelope"),
    [
        ({}, Envelope(ENTRY, ENTRY, DEFAULT_TIMEOUT_MS)),
        ({b"id": b"c"}, Envelope("c", "c", DEFAULT_TIMEOUT_MS)),
        ({b"id": b"c", b"to": b"m", b"timeout_ms": b"5"}, Envelope("c", "m", 5)),
        ({b"id": b"{c}", b"to": b"m m"}, Envelope(ENTRY, ENTRY, DEFAULT_TIMEOUT_MS)),
        ({b"id": b"\xff", b"to": b"x" * 129}, Envelope(ENTRY, ENTRY, DEFAULT_TIMEOUT_MS)),
        ({b"timeout_ms": b"60000"}, Envelope(ENTRY, ENTRY, MAX_TIMEOUT_MS)),
        ({b"timeout_ms": b"60001"}, Envelope(ENTRY, ENTRY, DEFAULT_TIMEOUT_MS)),
        ({b"timeout_ms": b"9" * 10**5}, Envelope(ENTRY, ENTRY, DEFAULT_TIMEOUT_MS)),
        ({b"timeout_ms": b"0"}, Envelope(ENTRY, ENTRY, DEFAULT_TIMEOUT_MS)),
        ({b"request": b'{"id": "mine"}'}, Envelope("mine", "mine", DEFAULT_TIMEOUT_MS)),
        ({b"request": b'{"id": "mine"}', b"to": b"m"}, Envelope("mine", "m", DEFAULT_TIMEOUT_MS)),
        ({b"request": b'{"id": "mine"}', b"id": b"c"}, Envelope("c", "c", DEFAULT_TIMEOUT_MS)),
        ({b"request": b'{"id": "{mine}"}'}, Envelope(ENTRY, ENTRY, DEFAULT_TIMEOUT_MS)),
        ({b"request": b'{"id": 7}'}, Envelope(ENTRY, ENTRY, DEFAULT_TIMEOUT_MS)),
        ({b"request": b"[" * 10**5}, Envelope(ENTRY, ENTRY, DEFAULT_TIMEOUT_MS)),
        ({b"request": b"\xff"}, Envelope(ENTRY, ENTRY, DEFAULT_TIMEOUT_MS)),
        ({b"timeout_ms": b"-1"}, Envelope(ENTRY, ENTRY, DEFAULT_TIMEOUT_MS)),
        ({b"timeout_ms": "²".encode()}, Envelope(ENTRY, ENTRY, DEFAULT_TIMEOUT_MS)),
    ],
)
def test_where_an_answer_goes_can_always_be_said(fields: dict[bytes, bytes], envelope: Envelope) -> None:
    assert Envelope.of(ENTRY, fields) == envelope


def test_a_call_is_a_request_with_a_name() -> None:
    fields = {b"call": b"validate", b"to": b"m", b"id": b"c", b"timeout_ms": b"5", b"prompt": b"x", b"n": b"2"}
    call = parse_call(ENTRY, fields, max_body_bytes=1000)
    assert (call.name, call.request.prompt, call.request.n) == ("validate", "x", 2)


def test_what_is_no_call_is_refused_whatever_it_holds() -> None:
    for fields in ({}, {b"call": b"\xff" * 500}, {b"call": b"tokenize"}, {b"call": b"tokenize", b"\xff": b"x"}):
        with pytest.raises(WireError) as caught:
            parse_call(ENTRY, fields, max_body_bytes=1000)
        assert caught.value.code == "invalid_request"
        assert len(str(caught.value)) < 500
    with pytest.raises(WireError) as caught:
        parse_call(ENTRY, {b"id": b"c"}, max_body_bytes=1000, size=2000)
    assert caught.value.code == "too_large"


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        (b"id", b"{c}", r"id: must be 1 to 128 of .*, not '\{c\}'"),
        (b"to", b"m m", "to: must be .*, not 'm m'"),
        (b"to", b"\xff" * 1000, "to: must be "),
        (b"timeout_ms", b"60001", "timeout_ms: must be an integer, 1 to 60000, not '60001'"),
        (b"timeout_ms", b"0", "timeout_ms"),
        (b"timeout_ms", b"1.5", "timeout_ms"),
        (b"timeout_ms", b"9" * 10**5, "timeout_ms"),
    ],
)
def test_what_says_where_the_answer_goes_is_checked(field: bytes, value: bytes, told: str) -> None:
    with pytest.raises(WireError, match=told) as caught:
        parse_call(ENTRY, {b"call": b"tokenize", b"prompt": b"x", field: value}, max_body_bytes=10**6)
    assert (caught.value.code, caught.value.request_id) == ("invalid_request", ENTRY)
    assert len(str(caught.value)) < 500


def test_an_answer_is_read() -> None:
    answer = decode_answer({b"id": b"c", b"worker": b"w", b"tokens": b"1,2", b"news": b"x"})
    assert answer == AnswerEntry.model_validate({"id": "c", "worker": "w", "tokens": "1,2"})
    assert (answer.tokens, answer.text) == ((1, 2), None)
    assert decode_answer({b"id": b"c", b"worker": b"w", b"tokens": b""}).tokens == ()
    for junk in ({}, {b"id": b"c"}, {b"id": b"\xff", b"worker": b"w"}, {b"id": b"c", b"worker": b"w", b"tokens": b"x"}):
        with pytest.raises(ValueError, match="an entry of the answers is not an answer"):
            decode_answer(junk)


def test_the_calls_and_their_answers_are_documented() -> None:
    answers = rows("| `call` | asks | answer |")
    assert tuple(answers) == CALLS
    named = set(re.findall(r"`(\w+)`", " ".join(cells[-1] for cells in answers.values())))
    section = TEXT.split("### Calls\n", 1)[1].split("### The model card", 1)[0]
    assert named | {"id", "worker", "code", "message"} == set(AnswerEntry.model_fields)
    assert all(f"`{name}`" in section for name in AnswerEntry.model_fields)
    fields = rows("| field | values | default | meaning |\n| --- | --- | --- | --- |\n| `call`")
    assert {"to", "timeout_ms"} <= fields.keys()
    assert fields["timeout_ms"][:2] == [f"integer, 1 to {MAX_TIMEOUT_MS}", str(DEFAULT_TIMEOUT_MS)]


def test_the_fields_of_a_card_are_documented() -> None:
    section = TEXT.split("### The model card\n", 1)[1].split("\n## ", 1)[0]
    table = section.split("| field | meaning |", 1)[1].split("\n\n", 1)[0]
    first_cells = " ".join(line.split(" | ")[0] for line in table.splitlines())
    of_the_key = {"ttl_ms"}
    assert set(re.findall(r"`(\w+)`", first_cells)) == set(ModelCard.model_fields) | of_the_key
