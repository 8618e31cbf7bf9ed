"""The API as a page for people, made from its OpenAPI document. It runs nothing, and loads a style sheet of ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from penstock.gateway.common.documents import Document
from penstock.gateway.openapi.document import IGNORED, REFUSED

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Penstock: API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="page/style.css">
<link rel="stylesheet" href="page/docs.css">
</head>
<body>
<header><h1>Penstock: API</h1><a href="openapi.json">openapi.json</a></header>
<main>"""


def page(document: Document) -> str:
    """Returns the page."""
    return "\n".join([_HEAD, *_operations(document), *_schemas(document), "</main>\n</body>\n</html>\n"])


def _operations(document: Document) -> Iterator[str]:
    yield "<h2>Routes</h2>"
    rows = [
        [f"<code>{method.upper()} {escape(path)}</code>", escape(operation["summary"]), _body(operation)]
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    yield _table(("route", "what", "body"), rows)


def _body(operation: Document) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    return " ".join(_kind(each["schema"]) for each in content.values())


def _schemas(document: Document) -> Iterator[str]:
    for name, schema in document["components"]["schemas"].items():
        yield f'<h2 id="{escape(name)}">{escape(name)}</h2>'
        yield f"<p>{_text(schema)}</p>"
        required = schema.get("required", ())
        rows = [
            [f"<code>{escape(field)}</code>{' (required)' if field in required else ''}", _kind(each), _text(each)]
            for field, each in schema.get("properties", {}).items()
        ]
        if rows:
            yield _table(("field", "type", "what"), rows)
        for title, key in (("ignored", IGNORED), ("refused", REFUSED)):
            if key in schema:
                reasons = [[f"<code>{escape(field)}</code>", escape(why)] for field, why in schema[key].items()]
                yield _table((title, "why"), reasons)


def _text(schema: Document) -> str:
    return escape(" ".join(schema.get("description", "").split()))


def _kind(schema: Document) -> str:
    """Returns the type of a value in words, with links to the schemas of objects."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "const" in schema or "enum" in schema:
        return " | ".join(f"<code>{escape(repr(value))}</code>" for value in schema.get("enum", [schema.get("const")]))
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            return " | ".join(dict.fromkeys(map(_kind, schema[union])))
    kind = escape(str(schema.get("type", "any")))
    inner = schema.get("items")
    return f"{kind} of {_kind(inner)}" if isinstance(inner, dict) and inner else kind


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
