"""Tools whose inputs Anthropic's API fixes and that the client runs: a shell, an editor of files, and a memory.

The model is shown a function with the tool's name. A version is a date after the kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.gateway.common.documents import Document
from penstock.gateway.common.schemas import closed_object, described

_VERSION = re.compile(r"_\d{8}$")


@dataclass(frozen=True, slots=True)
class ClientRunTool:
    """One of these tools: its description for the model, and its input."""

    description: str
    properties: Mapping[str, Document]
    required: tuple[str, ...] = ()

    @property
    def input_schema(self) -> Document:
        return closed_object(self.properties, self.required)


def _one_of(*commands: str) -> Document:
    return {"type": "string", "enum": list(commands)}


_EDITS: Mapping[str, Document] = {
    "path": described("string", "The path of the file or directory."),
    "file_text": described("string", "For create: what the file is to hold."),
    "old_str": described("string", "For str_replace: what is replaced. It must be in the file exactly once."),
    "insert_line": described("integer", "For insert: the line after which the text goes; 0: at the start."),
    "view_range": {
        "type": "array", "items": {"type": "integer"},
        "description": "For view: the first and the last line, from 1; -1 is the end of the file.",
    },
}  # fmt: skip

_CLIENT_RUN_TOOLS: Mapping[str, ClientRunTool] = {
    "bash": ClientRunTool(
        "Runs a command in a shell on the user's machine, which stays open between calls, and returns its output.",
        {
            "command": described("string", "The command."),
            "restart": described("boolean", "Starts the shell anew instead of running a command."),
        },
    ),
    "text_editor": ClientRunTool(
        "Views, creates and edits text files on the user's machine.",
        {
            "command": _one_of("view", "create", "str_replace", "insert"),
            **_EDITS,
            "new_str": described("string", "For str_replace: what comes in its place. For insert: the text."),
        },
        ("command", "path"),
    ),
    "memory": ClientRunTool(
        "Keeps notes in files under /memories, which later conversations can read.",
        {
            "command": _one_of("view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDITS,
            "new_str": described("string", "For str_replace: what comes in its place."),
            "insert_text": described("string", "For insert: the text."),
            "old_path": described("string", "For rename: the path that there is."),
            "new_path": described("string", "For rename: the new one."),
        },
        ("command",),
    ),
}


def client_run_tool(tool: Mapping[str, Any]) -> ClientRunTool | None:
    """Returns the tool that a definition's `type` names; None: it is not one of these."""
    kind = tool.get("type")
    if not isinstance(kind, str) or not _VERSION.search(kind):
        return None
    return _CLIENT_RUN_TOOLS.get(_VERSION.sub("", kind))
