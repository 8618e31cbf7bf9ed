"""A conversation in a model's chat template: the text that `apply_chat_template` of transformers makes of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.errors import InvalidRequest
from penstock.engine.text.chat_template import ChatTemplate
from penstock.engine.text.template_needs import TemplateNeeds, shaped

_END = "CONTINUE_FINAL_MESSAGE_TAG "
_NAMES_DEVELOPER = re.compile(r"""(['"])developer\1""")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template gets. Messages and tools are those of OpenAI's API, but that `arguments` are mappings."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)  # that this template knows, such as `enable_thinking`
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    now_s: float | None = None  # what a template that asks takes for the present, in Unix time


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as a prompt."""

    token_ids: tuple[int, ...]
    text: str  # that the chat template made
    reply_format: str | None = None  # in which the model writes its answer; None: nothing is known of it
    reply_prefix: str = ""  # what `text` has of that answer already, such as `<think>`
    has_reasoning: bool = False  # whether the template knows the reasoning of this format


class ConversationTemplate:
    """One template of one checkpoint. Any thread may use it.

    Args:
        source: of the template.
        special_tokens: by the names that templates know them by, such as `bos_token`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._knows_developer = _NAMES_DEVELOPER.search(source) is not None
        self._template = ChatTemplate(source)
        self._needs = TemplateNeeds(lambda messages, tools: self._rendered(messages, Conversation(messages, tools)))

    def render(self, chat: Conversation) -> str:
        """Blocks for as long as the template takes.

        Raises:
            InvalidRequest: the template refuses the conversation, fails, or takes too much time, text or memory; a
                variable has the name of a special token.
        """
        if not chat.messages:
            raise InvalidRequest("messages is empty")
        if taken := sorted(self._special_tokens.keys() & chat.variables.keys()):
            raise InvalidRequest(f"chat_template_kwargs may not set {', '.join(taken)}, a special token of this model")
        known = [self._with_role(message) for message in chat.messages]
        messages = [_with_reasoning(message) for message in shaped(known, self._needs)]
        if not chat.continue_final_message:
            return self._rendered(messages, chat)
        said = _mark_end(messages, self.source)
        return _cut(self._rendered(messages, chat), said)

    def _with_role(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A developer is what OpenAI's API called the system before."""
        if message["role"] != "developer" or self._knows_developer:
            return message
        return {**message, "role": "system"}

    def _rendered(self, messages: Sequence[Mapping[str, Any]], chat: Conversation) -> str:
        variables = {
            **self._special_tokens,
            **chat.variables,
            "messages": messages,
            "tools": list(chat.tools) or None,
            "documents": None,
            "add_generation_prompt": chat.add_generation_prompt and not chat.continue_final_message,
        }
        return self._template.render(variables, now_s=chat.now_s)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Under each name that templates read it by, as in transformers."""
    if "reasoning" not in message:
        return message
    return {"thinking": message["reasoning"], **message, "reasoning_content": message["reasoning"]}


def _mark_end(messages: list[dict[str, Any]], source: str) -> str:
    """Marks where the final message's content ends, and returns that content."""
    content = messages[-1].get("content")
    if content is None:
        raise InvalidRequest("continue_final_message: the final message has no content to continue")
    if "content" not in source:
        raise InvalidRequest("continue_final_message: the model's chat template shows no content of messages")
    if isinstance(content, str):
        messages[-1]["content"] = content + _END
        return content
    *before, last = content
    messages[-1]["content"] = [*before, {**last, "text": last["text"] + _END}]
    return str(last["text"])


def _cut(text: str, said: str) -> str:
    """The text up to the mark; where the template trimmed the message, without space at its end."""
    place = text.rfind(_END.strip())
    if place < 0 or said.strip() not in text:
        raise InvalidRequest(
            "continue_final_message: the model's chat template does not show the final message as it is"
        )
    return text[:place] if text.startswith(_END, place) else text[:place].rstrip()
