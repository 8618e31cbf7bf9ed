"""Bodies of requests for a message, and for the count of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.gateway.anthropic.blocks import to_messages
from penstock.gateway.anthropic.tools import MessagesToolChoice, to_choice, to_tools
from penstock.gateway.common.documents import Document
from penstock.gateway.common.fields import CACHED, Body, Policy, Refusal, forms_of, read_fields
from penstock.gateway.common.options import SMALLEST_TOP_P, takes, to_request
from penstock.gateway.common.thinking import Thinking
from penstock.producer import GenerateRequest
from penstock.protocol.wire import PARAMETERS


class OutputFormat(Body):
    """A schema for the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesPrompt(Body):
    """The part of the body that the model is shown, and whose tokens can be counted."""

    model: Annotated[str, Field(min_length=1)]
    messages: list[dict[str, Any]]
    system: Any = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking = Thinking(type="disabled")
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def to_wire(self) -> Document:
        messages = to_messages(self.system, self.messages)
        values: Document = {
            "messages": messages,
            "continue_final_message": bool(messages) and _goes_on(messages[-1]),
            "chat_template_kwargs": {**self.thinking.variables, **self.chat_template_kwargs},
        }
        if self.tools:
            values["tools"] = to_tools(self.tools)
        if self.tool_choice is not None:
            values |= to_choice(self.tool_choice)
        if self.output_config.effort is not None:
            values["reasoning_effort"] = self.output_config.effort
        if self.output_config.format is not None:
            schema = self.output_config.format.schema_
            values["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        return values

    def request(self) -> GenerateRequest:
        """Returns the request for the queue.

        Raises:
            ApiError: naming the field that is wrong.
        """
        return to_request(self.to_wire(), form="output_config.format")


@takes("messages")
class MessageBody(MessagesPrompt):
    """The body's supported fields."""

    max_tokens: int
    stream: bool = False
    stop_sequences: list[str] = Field(default_factory=list)

    def to_wire(self) -> Document:
        values = super().to_wire() | {name: getattr(self, name) for name in self.model_fields_set & _OF_WIRE}
        if values.get("top_p") == 0:
            values["top_p"] = SMALLEST_TOP_P
        return {**values, "stop": self.stop_sequences}

    @property
    def shows_thinking(self) -> bool:
        """Whether to send thinking. A client that has not requested it gets none, as it takes the first block for the
        text.
        """
        return self.thinking.is_on and self.thinking.display != "omitted"


def _goes_on(message: Document) -> bool:
    """Whether the answer continues this final message. One with calls is over: they wait for results."""
    return bool(message["role"] == "assistant" and not message.get("tool_calls"))


_OF_WIRE = (MessageBody.model_fields.keys() - MessagesPrompt.model_fields.keys()) & PARAMETERS.keys()

_BY_KEY = "whom a request is for comes from its API key"

IGNORED: Mapping[str, str] = {
    "cache_control": CACHED,
    "context_management": "messages are used as they are sent",
    "diagnostics": "there is nothing to say of a cache that needs no asking",
    "mcp_servers": "the client runs the tools",
    "metadata": _BY_KEY,
    "service_tier": "`priority` orders requests",
    "speed": "there is one speed",
    "user_profile_id": _BY_KEY,
    "workspace_id": _BY_KEY,
}
REFUSED: Mapping[str, Refusal] = {
    "container": Refusal("no code is run"),
    "inference_geo": Refusal("the gateway does not know where workers are", ("global",)),
    "output_format": Refusal("is deprecated; use output_config.format"),
    "thread": Refusal(
        "there are no threads; send the whole conversation",
        details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
    ),
    "n": Refusal("an answer is one message", (1,)),
    **dict.fromkeys(("max_tokens_to_sample", "max_completion_tokens"), Refusal("is another API's name for max_tokens")),
    "response_format": Refusal("is output_config.format here"),
    "stop": Refusal("is another API's name for stop_sequences"),
}

COUNT_POLICY = Policy(frozenset(MessagesPrompt.model_fields), IGNORED, REFUSED, forms_of(MessagesPrompt))
MESSAGE_POLICY = Policy(frozenset(MessageBody.model_fields), IGNORED, REFUSED, forms_of(MessageBody))


def read_message(body: Mapping[str, Any]) -> MessageBody:
    """Raises ApiError naming the field that is wrong."""
    return read_fields(MESSAGE_POLICY, MessageBody, body)


def read_count(body: Mapping[str, Any]) -> MessagesPrompt:
    """Raises ApiError naming the field that is wrong."""
    return read_fields(COUNT_POLICY, MessagesPrompt, body)
