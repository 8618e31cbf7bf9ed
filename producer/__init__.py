"""Penstock's client: sends prompts to a queue on Redis and reads the tokens as they arrive. `penstock` re-exports all
of it.

The names are those that users write: what they call, what they catch, and every type that a public method takes or
returns, to annotate with.
"""

from penstock.producer.aio import AsyncClient
from penstock.producer.blocking.client import BlockingHandle, BlockingReplyStream, Client
from penstock.producer.bulk import BulkResult
from penstock.producer.handle import Handle, ReplyStream
from penstock.producer.progress import BulkProgress, ProgressCallback
from penstock.producer.request import Prompt
from penstock.producer.row_ids import RowIds
from penstock.producer.transport import State
from penstock.protocol.errors import (
    BadAddress,
    CallFailed,
    CallTimedOut,
    ConnectionLost,
    NotDurable,
    PenstockError,
    QueueFull,
    ReplyCorrupt,
    ReplyGone,
    ReplyTimeout,
    RequestFailed,
    RequestRefused,
    ServerRefused,
    TelemetryUnavailable,
    UnknownRequest,
)
from penstock.protocol.queue.status import QueueStatus
from penstock.protocol.reply import Choice, Chunk, Prefill, Reply, Timings, ToolCall, Usage
from penstock.protocol.wire import (
    FinishReason,
    GenerateRequest,
    Message,
    ModelCard,
    Sampling,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
)

__all__ = [
    "AsyncClient",
    "BadAddress",
    "BlockingHandle",
    "BlockingReplyStream",
    "BulkProgress",
    "BulkResult",
    "CallFailed",
    "CallTimedOut",
    "Choice",
    "Chunk",
    "Client",
    "ConnectionLost",
    "FinishReason",
    "GenerateRequest",
    "Handle",
    "Message",
    "ModelCard",
    "NotDurable",
    "PenstockError",
    "Prefill",
    "ProgressCallback",
    "Prompt",
    "QueueFull",
    "QueueStatus",
    "Reply",
    "ReplyCorrupt",
    "ReplyGone",
    "ReplyStream",
    "ReplyTimeout",
    "RequestFailed",
    "RequestRefused",
    "RowIds",
    "Sampling",
    "ServerRefused",
    "State",
    "TelemetryUnavailable",
    "Timings",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "TopLogprob",
    "UnknownRequest",
    "Usage",
]
