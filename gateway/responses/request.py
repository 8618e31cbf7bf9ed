"""The body of a request for a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, ConfigDict, Field

from penstock.gateway.common.documents import Document
from penstock.gateway.common.fields import IGNORED, REFUSED, Body, Policy, Refusal, forms_of, read_fields
from penstock.gateway.common.options import RequestOptions, to_request, to_the_end
from penstock.gateway.errors import ApiError
from penstock.gateway.responses.builtin_tools import BUILTIN_TOOLS
from penstock.gateway.responses.tools import full_name, offered, read_tools
from penstock.producer import GenerateRequest, ModelCard
from penstock.protocol.ranks import LOWEST_PRIORITY
from penstock.protocol.wire import PARAMETERS

Window: TypeAlias = Literal["soonest", "2h", "8h"]

_WINDOWS_S: Mapping[Window, int] = {"2h": 7200, "8h": 28_800}
_LOGPROBS = "message.output_text.logprobs"

Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",  # reasoning is sent in plain text, and can be sent back like that
    "message.input_image.image_url",  # the rest is about tools and images, which no answer has
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class TextFormat(Body):
    """`text.format`."""

    model_config = ConfigDict(validate_by_alias=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """`text`. A verbosity is a hint that the models here do not know."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Body):
    """`reasoning`. It is sent in full, so there are no summaries, and that of earlier turns is never left out."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "all_turns"] | None = None


class BackgroundOptions(Body):
    """`background_options`."""

    completion_window: Window = "soonest"


class ResponseStreamOptions(Body):
    """`stream_options`."""

    include_obfuscation: bool = False  # of the lengths of events: a protection between client and OpenAI, not offered


def described(values: dict[str, str]) -> dict[str, str]:
    if len(values) > 16 or any(len(name) > 64 or len(value) > 512 for name, value in values.items()):
        raise ValueError("has at most 16 pairs, of names of 64 and values of 512 characters")
    return values


class ResponseBody(RequestOptions):
    """The body's supported fields, in addition to those of `RequestOptions` that the policy names."""

    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    background: bool = False
    background_options: BackgroundOptions | None = None
    store: bool | None = None  # None: if possible
    metadata: Annotated[dict[str, str], AfterValidator(described)] = Field(default_factory=dict)
    include: list[Includable] = Field(default_factory=list)
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of log-probabilities besides each text token's own; None: they are not requested."""
        return self.top_logprobs or 0 if self.top_logprobs or _LOGPROBS in self.include else None

    def request(self, messages: Sequence[Document], card: ModelCard) -> GenerateRequest:
        """Returns the request for the queue.

        Raises:
            ApiError: naming the field that is wrong.
        """
        instructions = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        values = self.to_wire() | self._chat()
        values |= to_the_end(card) if self.max_output_tokens is None else {"max_tokens": self.max_output_tokens}
        values["messages"] = [*instructions, *messages]
        try:
            return to_request(values, form=_OUR_NAMES["response_format"])
        except ApiError as error:
            raise _renamed(error) from None

    def _chat(self) -> dict[str, Any]:
        """Returns the queue's fields for chats, without those left open."""
        window_s = _WINDOWS_S.get(self.background_options.completion_window) if self.background_options else None
        values = {
            "tools": [{"type": "function", "function": each.function} for each in offered(self.tools).values()] or None,
            "tool_choice": None if self.tool_choice in _NO_CHOICE and not self.tools else _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls if self.tools else None,
            "reasoning_effort": self.reasoning.effort,
            "response_format": _response_format(self.text.format),
            "chat_template_kwargs": self.chat_template_kwargs,
            "logprobs": self.num_logprobs,
            **({"timeout_s": window_s, "priority": LOWEST_PRIORITY} if window_s else {}),
        }
        return {name: value for name, value in values.items() if value is not None}


_NO_CHOICE = ("none", "auto")
_BUILTIN = tuple(BUILTIN_TOOLS)
_OUR_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "logprobs": "top_logprobs",
}

_OF_OPTIONS = {
    name
    for name in RequestOptions.model_fields.keys() - {"return_token_ids", "return_tokens_as_token_ids"}
    if name not in PARAMETERS or "responses" in PARAMETERS[name].takers
}
_OF_CHOICE = frozenset({"type", "name", "namespace", "mode"})
_ECHOED = frozenset({"metadata", "user", "safety_identifier", "prompt_cache_key"})

RESPONSE_POLICY = Policy(
    honoured=(frozenset(ResponseBody.model_fields) - frozenset(RequestOptions.model_fields)) | _OF_OPTIONS,
    ignored={
        **{name: reason for name, reason in IGNORED.items() if name not in _ECHOED},
        "max_tool_calls": "it limits calls of built-in tools, of which there are none",
        "access_programs": "there are none",
        "client_metadata": "no answer is stored that it could describe",
        "truncation": "no conversation is cut: one that is too long is refused",
        "context_management": "no conversation is compacted",
    },
    refused={
        **REFUSED,
        "n": Refusal("a response has one answer", (1,)),
        "max_tokens": Refusal("is max_output_tokens here"),
        "max_completion_tokens": Refusal("is max_output_tokens here"),
        "messages": Refusal("is input here"),
        "response_format": Refusal("is text.format here"),
        "reasoning_effort": Refusal("is reasoning.effort here"),
        "conversation": Refusal("there are no conversations; previous_response_id goes on from a response"),
        "prompt": Refusal("there are no stored prompts"),
        "moderation": Refusal("there is no moderation"),
        "image": Refusal("answers are text"),
        "modalities": Refusal("answers are text", (["text"],)),
        "echo": Refusal("the prompt is not part of a response", (False,)),
        "prompt_logprobs": Refusal("a response has none"),
        "return_token_ids": Refusal("a response has no place for them", (False,)),
        "return_tokens_as_token_ids": Refusal("a response has no place for them", (False,)),
    },
    inner={
        **forms_of(ResponseBody),
        "tool_choice": Policy(_OF_CHOICE | {"tools"}, inner={"tools": Policy(_OF_CHOICE)}),
    },
)


def read_response(body: Mapping[str, Any]) -> ResponseBody:
    """Raises ApiError naming the field that is wrong."""
    asked = read_fields(RESPONSE_POLICY, ResponseBody, body)
    asked = asked.model_copy(update={"tools": read_tools(asked.tools)}) if asked.tools else asked
    if asked.background and asked.store is False:
        message = "background: needs a response that is stored, and store is false"
        raise ApiError(400, message, param="background", code="invalid_value")
    if asked.background_options and not asked.background:
        message = "background_options: goes with background true only"
        raise ApiError(400, message, param="background_options", code="invalid_value")
    return asked


def _choice(choice: Any) -> Any:
    """Returns `tool_choice` in the form of chat completions."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") in ("function", "custom", *_BUILTIN):
        return _named(choice)
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_named(tool) if isinstance(tool, dict) else tool for tool in choice["tools"]]
        allowed = {name: value for name, value in choice.items() if name != "type"}
        return {"type": "allowed_tools", "allowed_tools": allowed | {"tools": tools}}
    message = "tool_choice: is none, auto, required, a tool that the client runs, or allowed_tools"
    raise ApiError(400, message, param="tool_choice", code="unsupported_value")


def _named(tool: Document) -> Document:
    """Returns a named tool in the form of chat completions, which have functions only."""
    kind, name, namespace = (tool.get(each) for each in ("type", "name", "namespace"))
    if kind in _BUILTIN:
        name = kind
    if isinstance(name, str) and isinstance(namespace, str):
        name = full_name(name, namespace)
    return {"type": "function" if kind in ("custom", *_BUILTIN) else kind, "function": {"name": name}}


def _response_format(asked: TextFormat | None) -> Document | None:
    if asked is None:
        return None
    rest = asked.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": asked.type, "json_schema": rest} if rest else {"type": asked.type}


def _renamed(error: ApiError) -> ApiError:
    """Renames a field in an error from the queue's name to this API's."""
    theirs = (error.param or "").partition(".")[0].partition("[")[0]
    ours = _OUR_NAMES.get(theirs)
    if ours is None:
        return error
    param = ours + (error.param or "").removeprefix(theirs)
    message = error.message.removeprefix(f"{error.param}: ")
    return ApiError(error.status, f"{param}: {message}", param=param, code=error.code)
