"""What travels over Redis: requests and reply entries, as versioned pydantic models. `docs/wire.md` is the prose of it.

A request entry holds either one JSON field `request` or flat fields; a reply stream holds `own`, `chunk` and `end`
entries.
"""

from penstock.producer.wire.errors import REFUSED_CODES, WireError
from penstock.producer.wire.replies import (
    ChunkEntry,
    EndEntry,
    FinishReason,
    OwnEntry,
    ReplyEntry,
    TokenLogprob,
    TopLogprob,
    decode_reply,
    encode_reply,
)
from penstock.producer.wire.requests import (
    ID_PATTERN,
    MAX_FIELDS,
    VERSION,
    GenerateRequest,
    Message,
    entry_size,
    explain,
    parse_request,
)

__all__ = [
    "ID_PATTERN",
    "MAX_FIELDS",
    "REFUSED_CODES",
    "VERSION",
    "ChunkEntry",
    "EndEntry",
    "FinishReason",
    "GenerateRequest",
    "Message",
    "OwnEntry",
    "ReplyEntry",
    "TokenLogprob",
    "TopLogprob",
    "WireError",
    "decode_reply",
    "encode_reply",
    "entry_size",
    "explain",
    "parse_request",
]
