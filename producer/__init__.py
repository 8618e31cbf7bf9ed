"""Penstock's client: send prompts to a queue on Redis, read the tokens as they come.

from penstock.producer import Client

with Client() as client:
    for chunk in client.stream("12 + 30 ="):
        print(chunk.text, end="", flush=True)
"""

from penstock.producer.aio import AsyncClient
from penstock.producer.client import Client
from penstock.producer.errors import (
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
from penstock.producer.reply import Chunk, Reply
from penstock.producer.wire import GenerateRequest

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
