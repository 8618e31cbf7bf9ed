"""The part of a reply's grammar for one call: a tool's name and its arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType

from penstock.engine.errors import InvalidRequest
from penstock.engine.request import Tool
from penstock.engine.text.response.grammar.bare_text import OTHER_VALUES, bare_text, text_before
from penstock.engine.text.response.grammar.json_grammar import JsonGrammar
from penstock.engine.text.response.grammar.lark import GrammarWriter, literal, separated, sequence
from penstock.engine.text.response.grammar.schemas import Schema, closed, edited, parsed_schema
from penstock.engine.text.response.grammar.value_grammar import ValueGrammar
from penstock.engine.text.response.syntax import Arguments, ReplyFormat

_PYTHON_WORDS: Mapping[str, str] = MappingProxyType({"true": "True", "false": "False", "null": "None"})
_PLAIN_KEY = re.compile(r"[^\s<>{}()\[\]\"'=,;:|]+")
_MAX_MEMBERS = 128  # each member's rule is nested in the one before
_NEW_KEY = "/[a-zA-Z_][a-zA-Z0-9_]{0,40}/"
# Keywords that a schema of arguments may have.
_UNDERSTOOD = frozenset(
    ("$schema", "$id", "$defs", "definitions", "$comment", "title", "description", "default", "examples", "type",
     "properties", "required", "additionalProperties")
)  # fmt: skip


def call_body(writer: GrammarWriter, format_: ReplyFormat, tool: Tool) -> str:
    """Returns the grammar of a call of `tool`, without what surrounds every call.

    Raises:
        InvalidRequest: its parameters are not a schema, or it is strict and the format has no syntax for it.
    """
    schema = _parameters(tool)
    syntax = format_.calls
    if syntax.arguments is Arguments.OBJECT:
        head = f'"{syntax.name_key}": {json.dumps(tool.name)}, "{syntax.arguments_key}": '
        parts = [literal("{"), _id(writer, format_), literal(head), _object(writer, tool, schema), literal("}")]
        return sequence(parts)
    named = [_id(writer, format_), literal(tool.name)]
    if syntax.id is not None and syntax.id.is_behind_name:
        named.reverse()
    name = sequence([*named, writer.spell(format_.pieces(syntax.after_name))])
    if syntax.arguments is Arguments.JSON:
        return sequence([name, _object(writer, tool, schema)])
    return sequence([name, _Members(writer, format_, tool, schema).all()])


def _id(writer: GrammarWriter, format_: ReplyFormat) -> str:
    marks = format_.calls.id
    if marks is None:
        return ""
    before, after = (writer.spell(format_.pieces(syntax)) for syntax in (marks.before, marks.after))
    written = sequence([before, f"/{marks.pattern}/", after])
    return f"({written})?" if marks.is_optional else written


def _object(writer: GrammarWriter, tool: Tool, schema: Schema) -> str:
    made = edited(schema, of=_described(tool), strict=tool.strict, lenient=not tool.strict)
    return JsonGrammar(writer, made, of=_described(tool), lenient=not tool.strict).all()


def _parameters(tool: Tool) -> Schema:
    """Returns the schema of the arguments: always an object, and without properties if the tool gives no schema."""
    schema = parsed_schema(tool.parameters, _described(tool))
    return {"type": "object"} | (schema or {"properties": {}, "additionalProperties": False})


def _described(tool: Tool) -> str:
    return f"the parameters of the tool {tool.name!r}"


class _Members:
    """Writes the arguments of one tool, one by one, in the order of its schema."""

    def __init__(self, writer: GrammarWriter, format_: ReplyFormat, tool: Tool, schema: Schema) -> None:
        self._writer = writer
        self._format = format_
        self._syntax = format_.calls
        self._tool = tool
        is_python = self._syntax.arguments is Arguments.PYTHON
        self._values = ValueGrammar(
            writer,
            schema,
            _PYTHON_WORDS if is_python else {},
            self._text,
            self._lexeme,
            self._other,
            reads_json=self._syntax.parameter is None,
            strict=tool.strict,
            of=_described(tool),
        )
        resolved = self._values.resolved(schema)
        self._schema = self._checked(closed(resolved) if tool.strict else resolved)

    def all(self) -> str:
        members, required = self._members()
        if self._syntax.parameter is not None:
            return sequence(member if name in required else f"({member})?" for name, member in members.items())
        opener, closer = "()" if self._syntax.arguments is Arguments.PYTHON else "{}"
        separator = literal(", " if self._syntax.arguments is Arguments.PYTHON else ",")
        inner = separated(self._writer, [(member, name in required) for name, member in members.items()], separator)
        return sequence([literal(opener), inner, literal(closer)])

    def _checked(self, schema: Schema) -> Schema:
        beyond = sorted(schema.keys() - _UNDERSTOOD)
        if beyond and self._tool.strict:
            raise InvalidRequest(f"{_described(self._tool)}: {beyond[0]!r:.80} can't be held to in this model's format")
        return schema

    def _members(self) -> tuple[dict[str, str], frozenset[str]]:
        """Returns the arguments by name, and the required names."""
        properties = self._schema.get("properties")
        said = self._schema.get("required")
        required = said if isinstance(said, list) else []
        known = dict(properties) if isinstance(properties, dict) else {}
        schemas = known | {name: {} for name in required if name not in known}
        if len(schemas) > _MAX_MEMBERS:
            raise InvalidRequest(
                f"{_described(self._tool)}: {len(schemas)} arguments, at most {_MAX_MEMBERS} in this model's format"
            )
        members = {name: self._member(self._key(name), schema) for name, schema in schemas.items()}
        rest = self._schema.get("additionalProperties", True)
        if not members and rest is not False:
            members["*"] = self._member(_NEW_KEY, rest)
        return members, frozenset(required)

    def _key(self, name: str) -> str:
        if not _PLAIN_KEY.fullmatch(name):
            raise InvalidRequest(f"{_described(self._tool)}: {name!r:.80} can't be an argument in this model's format")
        return literal(name)

    def _member(self, key: str, schema: object) -> str:
        parameter, value = self._syntax.parameter, self._values.value(schema)
        if parameter is None:
            equals = literal("=" if self._syntax.arguments is Arguments.PYTHON else ":")
            return sequence([key, equals, value])
        return sequence([self._spell(parameter.before_key), key, value])

    def _before(self, *, is_text: bool = False) -> str:
        """Returns what comes between a key and its value."""
        parameter = self._syntax.parameter
        if parameter is None:
            return ""
        return self._spell((parameter.before_text if is_text else "") or parameter.before_value)

    def _other(self, rule: str) -> str:
        """Returns a value with what surrounds it. llguidance panics where a long number may be followed by nothing but
        a special token, so a line break may come between.
        """
        if self._syntax.parameter is None:
            return rule
        end = self._syntax.parameter.end
        gap = "/\\n?/" if self._writer.is_special(self._format.pieces(end)[0]) else ""
        return sequence([self._before(), rule, gap, self._spell(end)])

    def _lexeme(self, text: str, *, is_text: bool = False) -> str:
        """Returns a value with what surrounds it. Between tags, all kinds end with the tag: lexers prefer longer
        matches.
        """
        if self._syntax.parameter is None:
            return text
        end = self._syntax.parameter.end
        tag, *rest = self._format.pieces(end.lstrip())
        gap = end.removesuffix(end.lstrip())  # a line break, which the model may leave out
        ended = self._writer.until(tag.rstrip(), text, gap)
        behind = self._writer.spell([tag.removeprefix(tag.rstrip()), *rest])
        return sequence([self._before(is_text=is_text), ended, behind])

    def _text(self, schema: Schema, is_mixed: bool) -> str:
        """Returns a string: bare up to the next tag, in the format's quotes, or as JSON, which Python reads too."""
        parameter, quote = self._syntax.parameter, self._syntax.quote
        if parameter is None and not quote:
            return _object(self._writer, self._tool, schema)
        strict, of = self._tool.strict, _described(self._tool)
        if parameter is None:
            return sequence([self._spell(quote), self._writer.until(quote, bare_text(schema, strict=strict, of=of))])
        tag = self._format.pieces(parameter.end.lstrip())[0].rstrip()
        text = text_before(tag, schema, strict=strict, of=of)
        is_unclear = is_mixed and not parameter.before_text
        return self._lexeme(f"{text} & ~({OTHER_VALUES})" if is_unclear else text, is_text=True)

    def _spell(self, syntax: str) -> str:
        return self._writer.spell(self._format.pieces(syntax))
