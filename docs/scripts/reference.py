"""Maps public names to the reference's pages, and to the modules that define them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import penstock


class Section(NamedTuple):
    """One page. It begins with `lead`, and shows `names` in this order."""

    title: str
    lead: str
    names: tuple[str, ...]


SECTIONS: Mapping[str, Section] = {
    "clients": Section(
        "Clients",
        "All of them are in `penstock`: `from penstock import Client`. `LLM` needs the worker extra. "
        "[The client library](../client.md) shows how they are used.",
        ("Client", "AsyncClient", "BlockingHandle", "Handle", "BlockingReplyStream", "ReplyStream", "LLM"),
    ),
    "requests": Section(
        "Requests",
        "What is asked. [The wire](../wire.md#parameters) has the ranges and defaults of all fields.",
        ("Prompt", "Sampling", "GenerateRequest", "Message", "RowIds"),
    ),
    "replies": Section(
        "Replies",
        "What comes back, while it is written and at its end.",
        (
            "Reply", "Choice", "Chunk", "FinishReason", "ToolCall", "ToolCallDelta", "TokenLogprob", "TopLogprob",
            "Usage", "Timings", "Prefill", "BulkResult", "BulkProgress", "ProgressCallback",
        ),
    ),
    "errors": Section(
        "Errors",
        "[Troubleshooting](../troubleshooting.md#the-client-library-raises) says what to do about each.",
        (
            "PenstockError", "BadAddress", "ConnectionLost", "ServerRefused", "TelemetryUnavailable", "QueueFull",
            "NotDurable", "RequestRefused", "RequestFailed", "CallFailed", "CallTimedOut", "ReplyTimeout",
            "UnknownRequest", "ReplyGone", "ReplyCorrupt",
        ),
    ),
    "status": Section(
        "Cards and status", "What is known of a queue, and of a request.", ("ModelCard", "QueueStatus", "State")
    ),
}  # fmt: skip

_ALIASES = {
    "FinishReason": "penstock.protocol.wire.replies",
    "LLM": "penstock.local.llm",  # without loading JAX
    "ProgressCallback": "penstock.producer.progress",
    "Prompt": "penstock.producer.request",
    "State": "penstock.producer.transport",
}
"""Names that do not know their own module."""


def defined_in(name: str) -> str:
    """Returns the module of a public name."""
    return _ALIASES.get(name) or str(getattr(penstock, name).__module__)


def page_of(section: Section) -> str:
    """Returns the page's Markdown for mkdocstrings."""
    parts = [f"# {section.title}", section.lead]
    parts += [f"::: {defined_in(name)}.{name}" for name in section.names]
    return "\n\n".join(parts) + "\n"
