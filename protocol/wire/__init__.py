"""Schema of what travels over Redis: requests and reply entries, as versioned pydantic models. `docs/wire.md` describes
it.

A request entry holds either one JSON field `request` or flat fields; a reply stream holds `own`, `chunk` and `end`
entries.
"""

from penstock.protocol.wire.calls import (
    CALLS,
    DEFAULT_TIMEOUT_MS,
    MAX_TIMEOUT_MS,
    AnswerEntry,
    Call,
    CallName,
    Envelope,
    decode_answer,
    parse_call,
)
from penstock.protocol.wire.cards import ModelCard, decode_card
from penstock.protocol.wire.errors import REFUSED_CODES, WireError
from penstock.protocol.wire.messages import (
    AllowedTools,
    AllowedToolsChoice,
    FunctionCall,
    Message,
    MessageToolCall,
    NamedTool,
    ResponseFormat,
    TextPart,
    ToolChoice,
)
from penstock.protocol.wire.parameters import MAX_KEEP_S, MIN_KEEP_S, PARAMETERS, Sampling
from penstock.protocol.wire.replies import (
    ChunkEntry,
    EndEntry,
    FinishReason,
    OwnEntry,
    ReplyEntry,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
    decode_reply,
    encode_reply,
)
from penstock.protocol.wire.requests import ID_PATTERN, MAX_FIELDS, VERSION, GenerateRequest, entry_size, parse_request
from penstock.protocol.wire.token_lists import spell_tokens
from penstock.protocol.wire.trace_context import trace_context
from penstock.protocol.wire.values import explain, in_python

__all__ = [
    "CALLS",
    "DEFAULT_TIMEOUT_MS",
    "ID_PATTERN",
    "MAX_FIELDS",
    "MAX_KEEP_S",
    "MAX_TIMEOUT_MS",
    "MIN_KEEP_S",
    "PARAMETERS",
    "REFUSED_CODES",
    "VERSION",
    "AllowedTools",
    "AllowedToolsChoice",
    "AnswerEntry",
    "Call",
    "CallName",
    "ChunkEntry",
    "EndEntry",
    "Envelope",
    "FinishReason",
    "FunctionCall",
    "GenerateRequest",
    "Message",
    "MessageToolCall",
    "ModelCard",
    "NamedTool",
    "OwnEntry",
    "ReplyEntry",
    "ResponseFormat",
    "Sampling",
    "TextPart",
    "TokenLogprob",
    "ToolCallDelta",
    "ToolChoice",
    "TopLogprob",
    "WireError",
    "decode_answer",
    "decode_card",
    "decode_reply",
    "encode_reply",
    "entry_size",
    "explain",
    "in_python",
    "parse_call",
    "parse_request",
    "spell_tokens",
    "trace_context",
]
