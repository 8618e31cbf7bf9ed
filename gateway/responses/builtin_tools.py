"""Tools whose arguments OpenAI's API fixes and that the client runs: `local_shell`, `shell` and `apply_patch`.

The model is shown a function with the same name. Its arguments are the `action` or the `operation` of the call's item.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.gateway.common.documents import Document
from penstock.gateway.common.schemas import closed_object, described

BuiltinName = Literal["local_shell", "shell", "apply_patch"]


@dataclass(frozen=True, slots=True)
class BuiltinTool:
    """One of these tools.

    Attributes:
        description: the function's.
        properties: its parameters.
        required: those that every call has.
        holder: the field of a call's item that has the arguments.
        always: what that field has, unless the arguments say otherwise.
        cut_status: the status of a call that was cut off.
    """

    description: str
    properties: Mapping[str, Document]
    required: tuple[str, ...]
    holder: Literal["action", "operation"]
    always: Document
    cut_status: Literal["incomplete", "in_progress"] = "incomplete"
    needless: Mapping[tuple[str, str], str] = field(default_factory=dict)  # a parameter, where another has this value

    def function(self, name: str) -> Document:
        """Returns the function. Calls always follow its schema."""
        parameters = closed_object(self.properties, self.required)
        return {"name": name, "description": self.description, "parameters": parameters, "strict": True}

    def held(self, arguments: Mapping[str, Any]) -> Document:
        """Returns what a call's item has in its holder."""
        made = self.always | {name: value for name, value in arguments.items() if self._has(name, value)}
        for (name, value), needless in self.needless.items():
            if made.get(name) == value:
                made.pop(needless, None)
        return made

    def _has(self, name: str, value: object) -> bool:
        """Whether a parameter can have this value, which may be half written."""
        return name in self.properties and value in self.properties[name].get("enum", (value,))

    def arguments(self, held: Mapping[str, Any]) -> Document:
        """Returns the arguments of a call from its holder, as a model writes them."""
        given = {name: held.get(name) for name in self.properties}
        needed = {name: self.always[name] for name in self.required}
        said = {name: value for name, value in given.items() if value not in (None, self.always.get(name))}
        return {name: (needed | said)[name] for name in self.properties if name in needed or name in said}


def _texts(description: str) -> Document:
    return {"type": "array", "items": {"type": "string"}, "description": description}


BUILTIN_TOOLS: Mapping[str, BuiltinTool] = {
    "local_shell": BuiltinTool(
        "Runs a program on the user's machine and returns its output.",
        {
            "command": _texts('The program and its arguments, such as ["bash", "-lc", "ls"].'),
            "working_directory": described("string", "The directory to run it in."),
            "timeout_ms": described("integer", "How long it may take, in milliseconds."),
            "env": {
                "type": "object", "additionalProperties": {"type": "string"},
                "description": "Environment variables to set.",
            },
        },
        ("command",),
        "action",
        {"type": "exec", "command": [], "env": {}},
    ),
    "shell": BuiltinTool(
        "Runs shell commands on the user's machine, one after the other, and returns what they print.",
        {
            "commands": _texts("The commands."),
            "timeout_ms": described("integer", "How long they may take, in milliseconds."),
            "max_output_length": described("integer", "How many characters of output to return."),
        },
        ("commands",),
        "action",
        {"commands": [], "timeout_ms": None, "max_output_length": None},
    ),
    "apply_patch": BuiltinTool(
        "Creates, updates or deletes one file. A diff has lines that begin with a space (kept), - (removed) or + "
        "(added), below a line @@ that may name what they are in. Each line of a new file begins with +. To delete a "
        "file, leave the diff empty.",
        {
            "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            "path": described("string", "The path of the file."),
            "diff": described("string", "The changes."),
        },
        ("type", "path", "diff"),
        "operation",
        {"type": "update_file", "path": "", "diff": ""},
        cut_status="in_progress",
        needless={("type", "delete_file"): "diff"},
    ),
}  # fmt: skip
