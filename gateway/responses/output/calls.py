"""The calls of an answer, by the kinds of their tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from pydantic_core import from_json

from penstock.gateway.common.documents import Document
from penstock.gateway.responses.builtin_tools import BUILTIN_TOOLS
from penstock.gateway.responses.output.items import OutputItem, UnnumberedEvent, part
from penstock.gateway.responses.tools import INPUT, OfferedTool


def call_of(request_id: str, index: int, call_id: str, tool: OfferedTool) -> OutputItem:
    """Returns the item of a call."""
    return _KINDS.get(tool.kind, _BuiltinCall)(request_id, index, call_id, tool)


class _FunctionCall(OutputItem):
    prefix = "fc"
    name = "function_call_arguments"

    def __init__(self, request_id: str, index: int, call_id: str, tool: OfferedTool) -> None:
        super().__init__(request_id, index)
        self._call_id = call_id
        self._tool = tool

    def document(self) -> Document:
        return {
            "id": self.id,
            "type": "function_call",
            **self._called(),
            "arguments": self.text,
            "status": self._status,
        }

    def _called(self) -> Document:
        namespace = {} if self._tool.namespace is None else {"namespace": self._tool.namespace}
        return {"call_id": self._call_id, "name": self._tool.name, **namespace}

    def _done(self) -> UnnumberedEvent:
        return part(f"response.{self.name}.done", **self._place(), name=self._tool.name, arguments=self.text)


class _CustomCall(_FunctionCall):
    """A call of a custom tool: its text is inside of the function's arguments."""

    prefix = "ctc"
    name = "custom_tool_call_input"

    def __init__(self, request_id: str, index: int, call_id: str, tool: OfferedTool) -> None:
        super().__init__(request_id, index, call_id, tool)
        self._input = InputText()

    def document(self) -> Document:
        return {
            "id": self.id, "type": "custom_tool_call", **self._called(), "input": self.text, "status": self._status,
        }  # fmt: skip

    def argument(self, text: str) -> Iterator[UnnumberedEvent]:
        if more := self._input.take(text):
            yield self.delta(more)

    def _close_content(self) -> Iterator[UnnumberedEvent]:
        if more := self._input.rest():
            yield self.delta(more)
        yield from super()._close_content()

    def _done(self) -> UnnumberedEvent:
        return part(f"response.{self.name}.done", **self._place(), input=self.text)


class _BuiltinCall(_FunctionCall):
    """A call of a built-in tool. Its item is sent at its beginning and at its end."""

    prefix = "btc"
    name = "builtin_call"

    def document(self) -> Document:
        tool = BUILTIN_TOOLS[self._tool.kind]
        return {
            "id": self.id,
            "type": f"{self._tool.kind}_call",
            "call_id": self._call_id,
            tool.holder: tool.held(_object_in(self.text)),
            "status": tool.cut_status if self._status == "incomplete" else self._status,
        }

    def argument(self, text: str) -> Iterator[UnnumberedEvent]:
        self._texts.append(text)
        yield from ()

    def _close_content(self) -> Iterator[UnnumberedEvent]:
        yield from ()


_KINDS: Mapping[str, type[_FunctionCall]] = {"function": _FunctionCall, "custom": _CustomCall}

_OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_CHARACTERS = re.compile(
    r"""(?:
        [^"\\] | \\[^u]
        | \\u(?!d[89ab])[0-9a-f]{4}
        | \\ud[89ab][0-9a-f]{2} (?: \\ud[c-f][0-9a-f]{2} | (?=[^\\] | \\[^u] | \\u(?!d[c-f])[0-9a-f]{4}) )
    )*""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
"""Whole characters of a JSON string: no escape or pair of surrogates is torn."""


class InputText:
    """A custom tool's text, read from the arguments as they come. Each of their characters is looked at once.

    Where they are no object with this text in front, the arguments are the text.
    """

    def __init__(self) -> None:
        self._head: str | None = ""  # all so far; None: the text has begun
        self._open = ""  # the beginning of a character
        self._has_ended = False

    def take(self, arguments: str) -> str:
        """Returns what the next piece of the arguments adds to the text."""
        if self._has_ended:
            return ""
        if self._head is not None:
            self._head += arguments
            opening = _OPENING.match(self._head)
            if opening is None:
                return ""
            arguments, self._head = self._head[opening.end() :], None
        self._open += arguments
        found = _CHARACTERS.match(self._open)
        whole = found.group() if found else ""
        self._open = self._open[len(whole) :]
        self._has_ended = self._open.startswith('"')
        return _read(whole)

    def rest(self) -> str:
        """Returns what the end of the arguments adds to the text."""
        if self._head is None or f'{{"{INPUT}":"'.startswith("".join(self._head.split())):
            return ""
        given = _object_in(self._head).get(INPUT)
        return given if isinstance(given, str) else self._head


def _read(spelled: str) -> str:
    """Returns the text of whole characters of a JSON string. What is no JSON stays as it is."""
    if "\\" not in spelled:
        return spelled
    try:
        text: str = json.loads(f'"{spelled}"', strict=False)
    except ValueError:
        return spelled
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _object_in(text: str) -> Document:
    """Returns an object as far as it is written."""
    try:
        value = from_json(text, allow_partial="trailing-strings") if text else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
