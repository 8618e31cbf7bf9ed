"""The body of a request for a chat completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

from penstock.gateway.common.fields import IGNORED, REFUSED, Policy, Refusal, form_of, forms_of, read_fields
from penstock.gateway.common.kinds import leave_out_tool
from penstock.gateway.common.options import (
    STREAM_OPTIONS,
    Count,
    RequestOptions,
    Shown,
    check_stream_options,
    shown_of,
    takes,
    to_request,
    to_the_end,
)
from penstock.gateway.common.thinking import Thinking, thinking_variables
from penstock.gateway.errors import ApiError
from penstock.gateway.openai.messages import clean
from penstock.producer import GenerateRequest, ModelCard
from penstock.protocol.wire import PARAMETERS
from penstock.protocol.wire.messages import AllowedToolsChoice, NamedTool, ResponseFormat, ToolDefinition
from penstock.protocol.wire.values import spelled

_MODES = ("none", "auto", "required")


def _mode_or_object(value: Any) -> Any:
    if value in _MODES or isinstance(value, dict):
        return value
    raise ValueError(f"must be {', '.join(_MODES)}, or an object that names a function, not {spelled(value)}")


@takes("chat")
class ChatBody(RequestOptions):
    """The body's supported fields."""

    messages: list[dict[str, Any]]
    tool_choice: Annotated[Any, AfterValidator(_mode_or_object)] = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: Count | None = None
    include_reasoning: bool = True
    enable_thinking: bool | None = None
    thinking: Thinking | bool | None = None

    def to_wire(self) -> dict[str, Any]:
        values = super().to_wire() | {name: getattr(self, name) for name in self.model_fields_set & _CHAT_OF_WIRE}
        values["messages"] = clean(self.messages)
        if values.get("tools"):
            values["tools"] = _functions(values["tools"])
        if (is_on := self._thinks) is not None:
            values["chat_template_kwargs"] = thinking_variables(is_on) | (values.get("chat_template_kwargs") or {})
        if self.top_logprobs == 0 and not self.logprobs:
            del values["top_logprobs"]
        return values

    @property
    def _thinks(self) -> bool | None:
        """Whether the body turns reasoning on or off, as other servers' clients spell it."""
        if isinstance(self.thinking, Thinking):
            return self.thinking.is_on
        return self.enable_thinking if self.thinking is None else self.thinking

    def request(self, card: ModelCard) -> GenerateRequest:
        """Returns the request for the queue.

        Raises:
            ApiError: naming the field that is wrong.
        """
        values = self.to_wire()
        if not {"max_tokens", "max_completion_tokens"} & values.keys():
            values |= to_the_end(card)
        return to_request(values)

    def shown(self, prompt_token_ids: tuple[int, ...] | None) -> Shown:
        return shown_of(
            self, logprobs=bool(self.logprobs), reasoning=self.include_reasoning, prompt_token_ids=prompt_token_ids
        )


def _functions(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the tools that are functions. Those that a server would run are left out and reported.

    Raises:
        ApiError: one is the client's, and no function.
    """
    functions = []
    for number, tool in enumerate(tools):
        kind = tool.get("type")
        if kind == "custom":
            message = f"tools[{number}]: custom tools are for POST /v1/responses; use a function with one text"
            raise ApiError(400, message, param=f"tools[{number}].type", code="unsupported_value")
        if isinstance(kind, str) and kind != "function":
            leave_out_tool(f"tools[{number}]", kind, ("function", "custom"))
        else:
            functions.append(tool)
    return functions


_CHAT_OF_WIRE = (ChatBody.model_fields.keys() - RequestOptions.model_fields.keys()) & {
    *PARAMETERS, "top_logprobs", "max_completion_tokens",
}  # fmt: skip

_USE_TOOLS = "is deprecated and not supported; use {}"

CHAT_POLICY = Policy(
    honoured=frozenset(ChatBody.model_fields),
    ignored={
        **IGNORED,
        "store": "chat completions are not stored, and none can be listed; /v1/responses are",
        "prediction": "it would make an answer quicker, and changes none",
        "verbosity": "a hint that the models served here do not know",
        "web_search_options": "there is no search of the web",
    },
    refused={
        **REFUSED,
        "functions": Refusal(_USE_TOOLS.format("tools"), ([],)),
        "function_call": Refusal(_USE_TOOLS.format("tool_choice"), ("none", "auto")),
        "modalities": Refusal("answers are text", (["text"],)),
        "audio": Refusal("answers are text"),
        "moderation": Refusal("there is no moderation"),
        "chat_template": Refusal("the template is the model's own"),
        "add_special_tokens": Refusal("the chat template decides which are added", (False,)),
        "documents": Refusal("they are not handed to the template; put them into a message", ([],)),
        "mm_processor_kwargs": Refusal("prompts are text"),
        "prompt": Refusal("is for POST /v1/completions; use messages"),
        "input": Refusal("is for POST /v1/responses; use messages"),
        **dict.fromkeys(("instructions", "system"), Refusal("is another API's; put it into messages")),
    },
    inner={
        **forms_of(ChatBody),
        "stream_options": STREAM_OPTIONS,
        "tools": form_of(ToolDefinition),
        "tool_choice": form_of(NamedTool, AllowedToolsChoice),
        "response_format": form_of(ResponseFormat),
    },
)


def read_chat(body: Mapping[str, Any]) -> ChatBody:
    """Raises ApiError naming the field that is wrong."""
    chat = read_fields(CHAT_POLICY, ChatBody, body)
    check_stream_options(chat)
    return chat
