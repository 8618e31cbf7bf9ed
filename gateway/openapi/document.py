"""The API as an OpenAPI document: https://spec.openapis.org/oas/v3.1.0.

Bodies follow from what reads them: their models, the table of parameters, and the policies of fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from penstock.gateway.common.documents import Document
from penstock.gateway.common.fields import Policy
from penstock.gateway.openapi.operations import OPERATIONS, Operation
from penstock.parameters import MODEL, Parameter
from penstock.protocol.version import __version__
from penstock.protocol.wire import PARAMETERS

IGNORED, REFUSED = "x-penstock-ignored", "x-penstock-refused"
"""Extensions of a body's schema: known fields, with the reason why they are passed over, or refused."""

_REF = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"{(\w+)}")
_FORM = {
    "type": "object", "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string"}},
}  # fmt: skip
_ERROR = {
    "description": "An error, in the form of the API that was called.",
    "content": {"application/json": {"schema": {"type": "object", "properties": {"error": {"type": "object"}}}}},
}


@cache
def openapi() -> Document:
    """Returns the document. Nobody may change it."""
    paths: Document = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(path, operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock's gateway", "version": __version__,
            "description": "Language models behind a queue, by the APIs of OpenAI and Anthropic.",
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }  # fmt: skip


def _operation(path: str, operation: Operation) -> Document:
    parameters = [_parameter(name, "path") for name in _PARAMETER.findall(path)]
    parameters += [_parameter(name, "query") for name in operation.query]
    answers: Document = {"application/json": {"schema": {"type": "object"}}}
    if operation.is_streamed or "stream" in operation.query:
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    made: Document = {
        "summary": operation.says,
        "responses": {"200": {"description": "The answer.", "content": answers}, "default": _ERROR},
    }
    if parameters:
        made["parameters"] = parameters
    if operation.body is not None:
        schema = {"$ref": _REF.format(model=operation.body.__name__)}
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    elif operation.is_form:
        made["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
    return made


def _parameter(name: str, place: str) -> Document:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}


def _schemas() -> Document:
    """Returns the schemas of bodies, and of the objects inside of them."""
    bodies = {each.body: each.policy for each in OPERATIONS.values() if each.body is not None}
    refs, document = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    schemas: Document = document["$defs"]
    for body, policy in bodies.items():
        name = refs[body, "validation"]["$ref"].rpartition("/")[2]
        if policy is not None:
            schemas[name] = _with_policy(schemas[name], body, policy)
    return {name: _without_nulls(schema) for name, schema in schemas.items()}


def _with_policy(schema: Document, body: type[BaseModel], policy: Policy) -> Document:
    """Returns a body's schema with the fields that are honoured, as the table of parameters has them."""
    properties = {name: _described(name, each) for name, each in _honoured(schema, body, policy)}
    made: Document = {
        "type": "object", "description": "Unknown fields are passed over, unless they look misspelled.",
        "properties": properties, "required": [name for name in schema.get("required", ()) if name in properties],
        IGNORED: dict(policy.ignored),
        REFUSED: {name: refusal.reason for name, refusal in policy.refused.items()},
    }  # fmt: skip
    return {name: value for name, value in made.items() if value}


def _honoured(schema: Document, body: type[BaseModel], policy: Policy) -> Iterator[tuple[str, Document]]:
    for name, field in body.model_fields.items():
        if name in policy.honoured:
            yield name, schema["properties"][field.alias or name]


def _described(name: str, schema: Document) -> Document:
    parameter = PARAMETERS.get(name)
    return schema if parameter is None else schema | _of_parameter(parameter)


def _of_parameter(parameter: Parameter) -> Document:
    """Returns the schema of a parameter. Its bounds are words: some APIs take values beyond, too."""
    bounds = f"Range: {parameter.range}." if parameter.range else ""
    model = "Default: the model's own." if parameter.otherwise == MODEL and parameter.default is None else ""
    return {"description": " ".join(filter(None, (parameter.text, parameter.more, bounds, model)))}


def _without_nulls(schema: Any) -> Any:
    """Returns a schema without null where that is the same as leaving a field out."""
    if isinstance(schema, list):
        return [_without_nulls(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: each for name, each in schema.items() if name != "title" or isinstance(each, dict)}
    kinds = [each for each in made.get("anyOf", ()) if each != {"type": "null"}]
    if len(kinds) == 1:
        made = kinds[0] | {name: each for name, each in made.items() if name != "anyOf"}
    elif kinds:
        made["anyOf"] = kinds
    return {name: _without_nulls(each) for name, each in made.items() if (name, each) != ("default", None)}
