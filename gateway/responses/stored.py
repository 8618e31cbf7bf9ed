"""A response in the store: its input. Its answer is the reply in the queue, which is kept as long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from penstock.gateway.common.documents import Document
from penstock.gateway.context import Caller
from penstock.gateway.damage import tell
from penstock.gateway.errors import ApiError
from penstock.gateway.responses.request import ResponseBody
from penstock.gateway.store import names
from penstock.gateway.store.records import Records, StoredDocument
from penstock.producer import GenerateRequest, Reply

KIND = "response"
PREFIX = "resp_"

RUNNING_S = 86_400
"""How long a record is kept beyond `keep_s`, which begins when the reply ends."""

EXPECTED_TOKENS = 4096
"""Most tokens assumed for a reply that nobody has read yet and whose client has set no limit. The reader of its end
counts it.
"""

TOKEN_BYTES = 32  # of a reply in Redis: text, id, and share of an entry
LOGPROB_BYTES = 80


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Everything that a response's body and events depend on, besides its reply.

    Attributes:
        request_id: the id of the request in the queue.
        queue: its queue.
        owner: the API key's id; empty: callers without a key.
        created_at: seconds since 1970 on the server's clock; None: it is not stored, and the beginning of the reply
            counts.
        asked: the fields of the body that repeat the request.
        has_logprobs: whether texts have log-probabilities.
        items: the input, each item with an id.
        history: the messages of earlier turns.
        record: the stored record; None: it is not stored.
    """

    request_id: str
    queue: str
    owner: str
    created_at: int | None
    asked: Mapping[str, Any]
    has_logprobs: bool
    items: Sequence[Document]
    history: Sequence[Document]
    record: StoredDocument | None = None

    @property
    def id(self) -> str:
        return PREFIX + self.request_id

    @property
    def is_background(self) -> bool:
        return bool(self.asked["background"])


_KEPT = ("queue", "owner", "asked", "has_logprobs", "items", "history")


class ResponseStore:
    """Responses by id. Each belongs to its creator; for all others it does not exist."""

    def __init__(self, records: Records) -> None:
        self._records = records

    async def create(self, response: StoredResponse, request: GenerateRequest) -> StoredResponse:
        """Stores a response's input, unless it is stored already.

        Raises:
            ApiError: it is too much to keep (507).
            ConnectionLost, ServerRefused: Redis is away or refuses.
        """
        document = {name: getattr(response, name) for name in _KEPT}
        ttl_s = round((request.keep_s or 0) + (request.timeout_s or RUNNING_S))
        num_tokens = response.asked["max_output_tokens"] or min(request.max_tokens, EXPECTED_TOKENS)
        more_bytes = num_tokens * (TOKEN_BYTES + _logprob_bytes(request.logprobs))
        record = await self._records.create(KIND, response.request_id, document, ttl_s=ttl_s, more_bytes=more_bytes)
        return _restored(record) or response

    async def read(self, response_id: str, caller: Caller, *, param: str | None = None) -> StoredResponse:
        """Returns a response. Raises ApiError (404): the caller has none with this id, or it has expired."""
        if response_id.startswith(PREFIX):
            record = await self._records.read_owned(KIND, response_id.removeprefix(PREFIX), caller.owner)
            response = None if record is None else _restored(record)
            if response is not None:
                return response
        raise not_found(response_id, param=param)

    async def delete(self, response: StoredResponse) -> None:
        if response.record is not None:
            await self._records.delete(KIND, response.request_id)

    async def count(self, response: StoredResponse, reply: Reply) -> None:
        """Counts the size of a stored response's reply after its end."""
        if response.record is not None:
            await self._records.correct(response.record, _bytes_of(reply))


def not_found(response_id: str, *, param: str | None = None) -> ApiError:
    message = f"response {response_id[:200]!r} is not there: it never was, was not stored, was deleted, or has expired"
    return ApiError(404, message, param=param, code="not_found")


_ASKED = (
    "model", "instructions", "metadata", "background", "previous_response_id", "max_output_tokens",
    "temperature", "top_p", "user", "safety_identifier", "prompt_cache_key",
)  # fmt: skip


def asked_for(body: ResponseBody) -> Document:
    """Returns the fields of a response's body that repeat its request, as long as that is not stored."""
    asked = {name: getattr(body, name) for name in _ASKED}
    text = body.text.model_dump(exclude_none=True)
    return asked | {
        "store": False,
        "max_tool_calls": None,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "service_tier": "default",
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools,
        "top_logprobs": body.num_logprobs or 0,
        "truncation": "disabled",
    }


_STORED = TypeAdapter(StoredResponse)


def _restored(record: StoredDocument) -> StoredResponse | None:
    """Reads a response from a record; None: it cannot be read."""
    made = record.restored(_STORED, request_id=record.id)
    if made is not None and not made.asked.keys() >= set(_ASKED):
        tell(names.record(KIND, record.id))
        return None
    return None if made is None else replace(made, record=record)


def _logprob_bytes(num_others: int | None) -> int:
    return 0 if num_others is None else (1 + num_others) * LOGPROB_BYTES


def _bytes_of(reply: Reply) -> int:
    """Estimates a reply's size in Redis: an entry has a token or more."""
    size = 0
    for choice in reply.choices:
        texts = (choice.text, choice.reasoning, *(call.arguments for call in choice.tool_calls))
        size += sum(len(text.encode()) for text in texts) + len(choice.tokens) * TOKEN_BYTES
        size += sum(1 + len(token.top) for token in choice.logprobs or ()) * LOGPROB_BYTES
    return size
