"""Parts of a chat: messages, tools, which tools may be called, and the form of the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    Tag,
    ValidationError,
    model_validator,
)

from penstock.protocol.wire.values import (
    FAIL_FAST,
    FunctionName,
    JsonObject,
    Text,
    WireModel,
    check_json,
    explain,
    from_json,
)

MAX_MESSAGES = 4096
MAX_PARTS = 256  # of one message's content
MAX_CALLS = 4096  # of one message: a model that repeats itself makes many
MAX_TOOLS = 512

Role = Literal["system", "developer", "user", "assistant", "tool"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(WireModel):
    """A text part of a message's content, the only kind so far."""

    type: Literal["text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, values: object) -> object:
        kind = values.get("type") if isinstance(values, Mapping) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"a part of type {kind!r:.80} is not supported, only `text`")
        return values


def _kind_of_content(value: object) -> str:
    return "<list>" if isinstance(value, list | tuple) else "<str>"


Parts = Annotated[tuple[TextPart, ...], FAIL_FAST, Field(max_length=MAX_PARTS)]
Content = Annotated[Annotated[Text, Tag("<str>")] | Annotated[Parts, Tag("<list>")], Discriminator(_kind_of_content)]


def _as_json_text(value: object) -> object:
    """Accepts arguments as the JSON value that their text spells."""
    return value if isinstance(value, str) else json.dumps(check_json(value), ensure_ascii=False)


class FunctionCall(WireModel):
    """The function of a call that was made: name and arguments as the model wrote them, complete or not."""

    name: Text
    arguments: Annotated[Text, BeforeValidator(_as_json_text)] = "{}"

    def values(self) -> dict[str, Any] | str:
        """Returns the arguments as the JSON object that their text spells, or that text if it spells none."""
        text = self.arguments.strip() or "{}"  # OpenAI's models call functions without parameters like this
        try:
            values = check_json(from_json(text))
        except ValueError:
            return self.arguments
        return values if isinstance(values, dict) else self.arguments


class MessageToolCall(WireModel):
    """A call that the assistant made in an earlier turn."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


MessageToolCalls = Annotated[tuple[MessageToolCall, ...], FAIL_FAST, Field(max_length=MAX_CALLS)]

_MAY_BE_SILENT = frozenset({"assistant", "tool"})
_OWNERS: Mapping[str, Role] = {"reasoning": "assistant", "tool_calls": "assistant", "tool_call_id": "tool"}


class Message(WireModel):
    """One message of a chat. What was said before is not judged: an assistant may have said nothing."""

    other_names: ClassVar[Mapping[str, str]] = {"reasoning_content": "reasoning"}

    role: Role
    content: Content | None = None
    name: Text | None = None  # the speaker, or the answering function
    reasoning: Text | None = None  # the assistant's
    tool_calls: MessageToolCalls | None = None  # the assistant's
    tool_call_id: Text | None = None  # the call that a tool's message answers

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        for name in _OWNERS.keys() & self.model_fields_set:
            if getattr(self, name) and self.role != _OWNERS[name]:
                raise ValueError(f"{name} is for the role {_OWNERS[name]}, not {self.role}")
        if self.content is None and self.role not in _MAY_BE_SILENT:
            raise ValueError("content is missing")
        return self


class Function(WireModel):
    """A tool's function. `parameters` is the JSON schema of its arguments, which `strict` calls always follow.

    Nothing is converted: a tool is used as it was given, and not as it was parsed.
    """

    name: FunctionName
    description: Text | None = None
    parameters: Annotated[dict[str, Any], BeforeValidator(check_json)] | None = None
    strict: StrictBool | None = None


class ToolDefinition(WireModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


def _checked_tool(value: object) -> object:
    """Checks the tool and returns it unchanged: a template shows it to the model, which may be sensitive to the order
    of keys.
    """
    return check_json(value if not isinstance(value, ToolDefinition) else value.model_dump(exclude_unset=True))


def _is_tool(value: dict[str, Any]) -> dict[str, Any]:
    try:
        ToolDefinition.model_validate(value)
    except ValidationError as error:
        raise ValueError(explain(error)) from None
    return value


ToolObject = Annotated[dict[str, Any], AfterValidator(_is_tool), BeforeValidator(_checked_tool)]


class FunctionReference(WireModel):
    """A reference to a tool by name."""

    name: FunctionName


class NamedTool(WireModel):
    """`tool_choice`: exactly this tool must be called."""

    type: Literal["function"]
    function: FunctionReference


class AllowedTools(WireModel):
    """A subset of the tools; `required`: one of them has to be called."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[tuple[NamedTool, ...], FAIL_FAST, Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(WireModel):
    """`tool_choice`: only these tools may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_from_json(value: object) -> object:
    return from_json(value) if isinstance(value, str) and value.startswith("{") else value


def _kind_of_choice(value: object) -> str:
    if isinstance(value, str):
        return "<mode>"
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return f"<{kind}>" if kind in ("function", "allowed_tools") else "<mode>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedTool, Tag("<function>")]
    | Annotated[AllowedToolsChoice, Tag("<allowed_tools>")],
    Discriminator(_kind_of_choice),
    BeforeValidator(_choice_from_json),
]


class JsonSchema(WireModel):
    """A schema for the answer."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    name: FunctionName | None = None
    description: Text | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(WireModel):
    """The form of the answer, as in OpenAI's API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_together(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is for the type json_schema, which needs it")
        return self
