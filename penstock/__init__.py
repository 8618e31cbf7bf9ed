"""Penstock: a message-queue worker service for LLM inference. Here is the client; `penstock worker` runs a worker.

from penstock import Client

with Client() as client:
    for chunk in client.stream("12 + 30 ="):
        print(chunk.text, end="", flush=True)
"""

from penstock.producer import (
    AsyncClient,
    Chunk,
    Client,
    ConnectionLost,
    GenerateRequest,
    NotDurable,
    PenstockError,
    QueueFull,
    Reply,
    ReplyCorrupt,
    ReplyGone,
    ReplyTimeout,
    RequestFailed,
    RequestRefused,
    ServerRefused,
)

__all__ = [
    "AsyncClient",
    "Chunk",
    "Client",
    "ConnectionLost",
    "GenerateRequest",
    "NotDurable",
    "PenstockError",
    "QueueFull",
    "Reply",
    "ReplyCorrupt",
    "ReplyGone",
    "ReplyTimeout",
    "RequestFailed",
    "RequestRefused",
    "ServerRefused",
]
