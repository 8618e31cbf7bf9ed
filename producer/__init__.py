"""Penstock's client: send prompts to a queue on Redis, read the tokens as they come.

from producer import Client

with Client() as client:
    for chunk in client.stream("12 + 30 ="):
        print(chunk.text, end="", flush=True)
"""

from producer.aio import AsyncClient
from producer.client import Client
from producer.errors import (
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
)
from producer.reply import Chunk, Reply
from producer.wire import GenerateRequest

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
