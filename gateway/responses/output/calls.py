"""The calls of an answer, by the kinds of their tools."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain, repeat

from pydantic_core import from_json

from penstock.gateway.common.documents import Document
from penstock.gateway.common.turns import CUSTOM_INPUT
from penstock.gateway.responses.builtin_tools import BUILTIN_TOOLS
from penstock.gateway.responses.output.items import OutputItem, UnnumberedEvent, part
from penstock.gateway.responses.output.strings import StringReader
from penstock.gateway.responses.tools import OfferedTool

_INPUT = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_COMMANDS = re.compile(r'\s*\{\s*"commands"\s*:\s*\[\s*"')
_NEXT = re.compile(r'\s*,\s*"')
_OPERATION = (
    re.compile(r'\s*\{\s*"type"\s*:\s*"'), re.compile(r'\s*,\s*"path"\s*:\s*"'), re.compile(r'\s*,\s*"diff"\s*:\s*"'),
)  # fmt: skip


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
    """A call of a custom tool. Its text is inside of the function's arguments.

    Where they are not an object with this text in front, the arguments are the text.
    """

    prefix = "ctc"
    name = "custom_tool_call_input"

    def __init__(self, request_id: str, index: int, call_id: str, tool: OfferedTool) -> None:
        super().__init__(request_id, index, call_id, tool)
        self._strings = StringReader((_INPUT,))

    def document(self) -> Document:
        return {
            "id": self.id, "type": "custom_tool_call", **self._called(), "input": self.text, "status": self._status,
        }  # fmt: skip

    def argument(self, text: str) -> Iterator[UnnumberedEvent]:
        if more := "".join(each.text for each in self._strings.take(text)):
            yield self.delta(more)

    def _close_content(self) -> Iterator[UnnumberedEvent]:
        if more := self._rest():
            yield self.delta(more)
        yield from super()._close_content()

    def _rest(self) -> str:
        """Returns what the end of the arguments adds to the text."""
        unread = self._strings.unread
        if self._strings.has_begun or f'{{"{CUSTOM_INPUT}":"'.startswith("".join(unread.split())):
            return ""
        given = _object_in(unread).get(CUSTOM_INPUT)
        return given if isinstance(given, str) else unread

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
            tool.holder: tool.held(_object_in(self.text) | self._read()),
            "status": tool.cut_status if self._status == "incomplete" else self._status,
        }

    def _read(self) -> Document:
        """Returns the arguments that were sent in events of their own."""
        return {}

    def argument(self, text: str) -> Iterator[UnnumberedEvent]:
        self._texts.append(text)
        yield from ()

    def _close_content(self) -> Iterator[UnnumberedEvent]:
        yield from ()


class _ShellCall(_BuiltinCall):
    """A call of `shell`. Its commands are sent as they are written."""

    def __init__(self, request_id: str, index: int, call_id: str, tool: OfferedTool) -> None:
        super().__init__(request_id, index, call_id, tool)
        self._strings = StringReader(chain((_COMMANDS,), repeat(_NEXT)))
        self._commands: list[str] = []
        self._num_whole = 0

    def _read(self) -> Document:
        return {"commands": self._commands} if self._commands else {}

    def argument(self, text: str) -> Iterator[UnnumberedEvent]:
        yield from super().argument(text)
        for each in self._strings.take(text):
            if each.is_first:
                yield self._begin()
            elif each.is_last:
                yield self._end()
            else:
                yield self._more(each.text)

    def _close_content(self) -> Iterator[UnnumberedEvent]:
        if self._num_whole < len(self._commands):
            yield self._end()
        if not self._strings.has_begun:  # they came after other arguments, or not at all
            for command in _texts_in(_object_in(self.text).get("commands")):
                yield from (self._begin(), self._more(command), self._end())

    def _begin(self) -> UnnumberedEvent:
        self._commands.append("")
        return self._event("added", command="")

    def _more(self, text: str) -> UnnumberedEvent:
        self._commands[-1] += text
        return self._event("delta", delta=text)

    def _end(self) -> UnnumberedEvent:
        self._num_whole += 1
        return self._event("done", command=self._commands[-1])

    def _event(self, name: str, **fields: str) -> UnnumberedEvent:
        place = {"output_index": self.index, "command_index": len(self._commands) - 1}
        return part(f"response.shell_call_command.{name}", **place, **fields)


class _PatchCall(_BuiltinCall):
    """A call of `apply_patch`. Its item is sent once it says what is done to which file, then the diff as it is
    written.
    """

    name = "apply_patch_call_operation_diff"

    def __init__(self, request_id: str, index: int, call_id: str, tool: OfferedTool) -> None:
        super().__init__(request_id, index, call_id, tool)
        self._strings = StringReader(_OPERATION)
        self._operation = ["", "", ""]
        self._is_shown = False

    def _read(self) -> Document:
        read = dict(zip(("type", "path", "diff"), self._operation, strict=True))
        return {name: value for name, value in read.items() if value}

    def open(self) -> Iterator[UnnumberedEvent]:
        yield from ()

    def argument(self, text: str) -> Iterator[UnnumberedEvent]:
        yield from super().argument(text)
        for each in self._strings.take(text):
            self._operation[each.number] += each.text
            if each.number == 1 and each.is_last:
                yield from self._show()
            elif each.number == 2 and each.text and self._operation[0] != "delete_file":
                yield self._diff_event("delta", delta=each.text)

    def _close_content(self) -> Iterator[UnnumberedEvent]:
        if not self._is_shown:
            yield from self._show()
        operation = self.document()["operation"]
        if "diff" not in operation:
            return
        if operation["diff"] and not self._operation[2]:  # it came in front of other arguments
            yield self._diff_event("delta", delta=operation["diff"])
        yield self._diff_event("done", diff=operation["diff"])

    def _show(self) -> Iterator[UnnumberedEvent]:
        self._is_shown = True
        item = self.document()
        if "diff" in item["operation"]:
            item["operation"]["diff"] = ""  # which its own events have
        yield part("response.output_item.added", output_index=self.index, item=item)

    def _diff_event(self, kind: str, **fields: str) -> UnnumberedEvent:
        return part(f"response.{self.name}.{kind}", **self._place(), **fields)


_KINDS: Mapping[str, type[_FunctionCall]] = {
    "function": _FunctionCall, "custom": _CustomCall, "shell": _ShellCall, "apply_patch": _PatchCall,
}  # fmt: skip


def _object_in(text: str) -> Document:
    """Returns an object as far as it is written."""
    try:
        value = from_json(text, allow_partial="trailing-strings") if text else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _texts_in(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
