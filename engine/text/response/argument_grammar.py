"""The part of a reply's grammar that is one call: a tool's name and its arguments."""

from __future__ import annotations

import json
from typing import Any

from penstock.engine.request import Tool
from penstock.engine.text.response.lark import GrammarWriter, literal, sequence
from penstock.engine.text.response.schemas import json_schema, parsed_schema
from penstock.engine.text.response.syntax import Arguments, Format


def call_body(writer: GrammarWriter, format_: Format, tool: Tool) -> str:
    """A call of `tool`, without what stands around every call."""
    syntax = format_.calls
    if syntax.arguments is Arguments.OBJECT:
        head = f'{{"name": {json.dumps(tool.name)}, "{syntax.arguments_key}": '
        return sequence([literal(head), _json(writer, tool), literal("}")])
    name = sequence([literal(tool.name), writer.spell(format_.pieces(syntax.after_name))])
    if syntax.arguments is Arguments.JSON:
        return sequence([name, _json(writer, tool)])
    raise NotImplementedError


def _json(writer: GrammarWriter, tool: Tool) -> str:
    return writer.json(json_schema(_parameters(tool), strict=tool.strict, lenient=not tool.strict))


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of the arguments, which are an object whatever it says."""
    return {"type": "object"} | parsed_schema(tool.parameters, f"the parameters of the tool {tool.name!r}")
