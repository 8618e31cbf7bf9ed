"""Calls and answers as they travel over Redis: questions about a prompt that a worker answers while it generates.

A call is a request entry with four more fields: `call`, `to`, `timeout_ms`, and an `id` of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError

from penstock.protocol.wire.errors import WireError
from penstock.protocol.wire.requests import ID_PATTERN, GenerateRequest, parse_request
from penstock.protocol.wire.token_lists import read_tokens
from penstock.protocol.wire.values import explain

CallName = Literal["count_tokens", "tokenize", "detokenize", "validate"]
CALLS: tuple[CallName, ...] = get_args(CallName)

DEFAULT_TIMEOUT_MS = 10_000
MAX_TIMEOUT_MS = 60_000


@dataclass(frozen=True, slots=True)
class Envelope:
    """Fields of a call's entry about the call itself. They can be read whatever else the entry holds."""

    id: str
    mailbox: str  # names the stream for the answer
    timeout_ms: int  # from the moment Redis accepted the call; nothing is answered later

    @classmethod
    def of(cls, entry_id: str, fields: Mapping[bytes, bytes]) -> Envelope:
        """Reads the envelope. Ids that cannot be valid count as missing.

        Without a valid id, the call has its entry's id; without a valid mailbox, the mailbox has the call's id. For a
        large entry with a JSON document, this takes as long as parsing the document.
        """
        call_id = _name(fields.get(b"id")) or _id_of_document(fields) or entry_id
        return cls(call_id, _name(fields.get(b"to")) or call_id, _timeout_ms(fields.get(b"timeout_ms")))


@dataclass(frozen=True, slots=True)
class Call:
    """A question: `name` says what is asked about `request`."""

    name: CallName
    request: GenerateRequest


class AnswerEntry(BaseModel):
    """The answer to the call `id`: either the result, or `code` and `message`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str
    worker: str
    prompt_tokens: int | None = None
    tokens: Annotated[tuple[int, ...], PlainValidator(read_tokens)] | None = None
    text: str | None = None
    code: str | None = None
    message: str | None = None


def parse_call(entry_id: str, fields: Mapping[bytes, bytes], *, max_body_bytes: int, size: int | None = None) -> Call:
    """Reads an entry of the stream of calls. The arguments are those of `parse_request`.

    Raises:
        WireError: it is not a call.
    """
    envelope = Envelope.of(entry_id, fields)
    name = fields.get(b"call", b"").decode(errors="replace")
    whole = size is None or size <= max_body_bytes
    if whole and name not in CALLS:
        message = f"call: must be one of {', '.join(CALLS)}, not {name[:80]!r}"
        raise WireError("invalid_request", message, request_id=envelope.id)
    asked = {key: value for key, value in fields.items() if key not in _OF_CALL}
    if whole:
        _check_envelope(fields, envelope.id)
    request = parse_request(entry_id, asked, max_body_bytes=max_body_bytes, size=size)
    if name == "detokenize" and request.prompt_token_ids is None:
        raise WireError("invalid_request", "detokenize: needs prompt_token_ids", request_id=envelope.id)
    return Call(cast("CallName", name), request)


def decode_answer(fields: Mapping[bytes, bytes]) -> AnswerEntry:
    """Reads an answer. Fields that a later version has are ignored.

    Raises:
        ValueError: it is not an answer.
    """
    try:
        values: dict[str, Any] = {name.decode(): value.decode() for name, value in fields.items()}
        return AnswerEntry.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"an entry of the answers is not an answer: {explain(error)}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"an entry of the answers is not an answer: {error}") from None


_OF_CALL = (b"call", b"id", b"to", b"timeout_ms")


_MS = re.compile(r"[1-9][0-9]{0,8}")


def _check_envelope(fields: Mapping[bytes, bytes], call_id: str) -> None:
    """Checks what `Envelope` tolerates in order to have somewhere to send the error."""
    for name in (b"id", b"to"):
        if name in fields and _name(fields[name]) is None:
            message = f"{name.decode()}: must be 1 to 128 of A-Z a-z 0-9 _ . : -, not {_shown(fields[name])}"
            raise WireError("invalid_request", message, request_id=call_id)
    timeout = fields.get(b"timeout_ms")
    if timeout is not None and _milliseconds(timeout) is None:
        message = f"timeout_ms: must be an integer, 1 to {MAX_TIMEOUT_MS}, not {_shown(timeout)}"
        raise WireError("invalid_request", message, request_id=call_id)


def _shown(value: bytes) -> str:
    return repr(value.decode(errors="replace"))[:80]


def _id_of_document(fields: Mapping[bytes, bytes]) -> str | None:
    """Returns the `id` in the field `request`, if it can be read."""
    if b"id" in fields or b"request" not in fields:
        return None
    try:
        document = json.loads(fields[b"request"])
    except (ValueError, RecursionError):
        return None
    value = document.get("id") if isinstance(document, dict) else None
    return value if isinstance(value, str) and ID_PATTERN.fullmatch(value) else None


def _name(value: bytes | None) -> str | None:
    text = "" if value is None else value.decode(errors="replace")
    return text if ID_PATTERN.fullmatch(text) else None


def _milliseconds(value: bytes) -> int | None:
    text = value.decode(errors="replace")
    ms = int(text) if _MS.fullmatch(text) else 0
    return ms if 0 < ms <= MAX_TIMEOUT_MS else None


def _timeout_ms(value: bytes | None) -> int:
    return DEFAULT_TIMEOUT_MS if value is None else _milliseconds(value) or DEFAULT_TIMEOUT_MS
