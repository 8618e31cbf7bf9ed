"""Renders a conversation by a model's chat template, with the same text as transformers' `apply_chat_template`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.errors import InvalidRequest
from penstock.engine.text.bridges.history import complete
from penstock.engine.text.bridges.instructions import Instructions
from penstock.engine.text.bridges.limits import Template
from penstock.engine.text.bridges.probe import Probe
from penstock.engine.text.bridges.round_trip import Readback, read_back
from penstock.engine.text.bridges.tools import Tools
from penstock.engine.text.bridges.turns import Turns
from penstock.engine.text.chat_template import ChatTemplate, accepted
from penstock.engine.text.template_needs import TemplateNeeds, shaped

_END = "CONTINUE_FINAL_MESSAGE_TAG "
_NAMES_DEVELOPER = re.compile(r"""(['"])developer\1""")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Input of a chat template. Messages and tools are those of OpenAI's API, except that `arguments` are mappings, or
    the text that the model wrote if that spells none.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)  # of this template, such as `enable_thinking`
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    now_s: float | None = None  # current time for templates that use it, in Unix time


@dataclass(frozen=True, slots=True)
class EncodedChat:
    token_ids: tuple[int, ...]
    text: str  # the chat template's output
    reply_format: str | None = None  # format of the model's answer; None: unknown
    reply_prefix: str = ""  # start of the answer that `text` already contains, such as `<think>`
    has_reasoning: bool = False  # whether the template uses this format's reasoning
    shows_tools: bool = True  # whether the template shows the tools, if there are any
    reads_calls: bool = True  # whether calls come back as the template writes them, as far as is known
    reads_several_calls: bool = True
    reads_reasoning: bool = True
    history_changes: Mapping[str, int] = field(default_factory=dict)  # as in `bridges/history.py`


@dataclass(frozen=True, slots=True)
class RenderedChat:
    text: str
    history_changes: Mapping[str, int]


class ConversationTemplate:
    """One template of one checkpoint. Any thread may use it.

    Args:
        source: the template's source.
        special_tokens: special tokens by their names in templates, such as `bos_token`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._knows_developer = _NAMES_DEVELOPER.search(source) is not None
        self._template = ChatTemplate(source)
        # The objects below do not refer to this one. So its processes end as soon as the last reference to it is gone,
        # not at the next garbage collection.
        self._plain = plain = _Plain(self._template, self._special_tokens)
        self._needs = TemplateNeeds(plain.render_raw)
        self._shaped = fitted = _Shaped(plain, self._needs)
        self._tools = tools = Tools(fitted.render, source, self._template.variables)
        self._probe = Probe(lambda messages, shown: fitted.render(*tools.put(messages, shown)))
        self._instructions = Instructions(self._probe)
        self._turns = Turns(self._probe)

    @property
    def shows_tools(self) -> bool:
        """Whether tools reach the prompt."""
        return self._tools.place is not None

    def limits(self, readback: Readback | None = None) -> list[str]:
        """Returns what the template cannot do, and what of its replies cannot be read back, by the names of `LIMITS`.

        Raises:
            InvalidRequest: the template does not compile.
            RenderingEnded: it takes too much time or memory.
        """
        self._template.variables()
        known = Template(self._needs, self._probe, self._instructions, self._turns, self._tools, readback)
        return known.limits()

    def read_back(self, special_tokens: Iterable[str], setting: str | None) -> Readback:
        """Finds the format of the template's replies, as `round_trip.read_back` does.

        Raises:
            RenderingEnded: the template takes too much time or memory.
        """
        return read_back(self._render_turn, self.source, special_tokens, setting)

    def render(self, chat: Conversation) -> RenderedChat:
        """Renders a conversation. Blocks while the template runs.

        Raises:
            InvalidRequest: the template refuses the conversation, fails, or takes too much time, text or memory; or a
                variable has the name of a special token.
        """
        if not chat.messages:
            raise InvalidRequest("messages is empty")
        if taken := sorted(self._special_tokens.keys() & chat.variables.keys()):
            raise InvalidRequest(f"chat_template_kwargs may not set {', '.join(taken)}, a special token of this model")
        if chat.continue_final_message and chat.messages[-1].get("content") is None:
            raise InvalidRequest("continue_final_message: the final message has no content to continue")
        is_open = chat.continue_final_message or not chat.add_generation_prompt
        history, changes = complete(chat.messages, self._needs, is_open=is_open)
        known, variables = self._tools.put(self._fitted(history, chat), chat.tools)
        messages = [_with_reasoning(message) for message in shaped(known, self._needs)]
        if not chat.continue_final_message:
            return RenderedChat(self._plain.render(messages, variables, chat), changes)
        said = _mark_end(messages, self.source)
        return RenderedChat(_cut(self._plain.render(messages, variables, chat), said), changes)

    def _fitted(self, history: Sequence[Mapping[str, Any]], chat: Conversation) -> list[Mapping[str, Any]]:
        """Returns the messages as the template takes them, with nothing lost."""
        known = [self._with_role(message) for message in history]
        tools = bool(chat.tools)
        if not self._probe.shows("user", tools=tools):  # for example because it needs a variable from the client
            return known
        placed = self._instructions.placed(known, tools=tools)
        turns = self._turns.alternated(placed, tools=tools)
        num_whole = len(turns) - chat.continue_final_message  # a message that is continued may still be empty
        return [*self._turns.filled(turns[:num_whole]), *turns[num_whole:]]

    def _with_role(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Renames the developer role to `system`, its former name, unless the template knows it."""
        if message["role"] != "developer" or self._knows_developer:
            return message
        return {**message, "role": "system"}

    def _render_turn(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], has_head: bool
    ) -> str | None:
        """Renders with the head of an answer or without; None: the template does not accept it."""
        known, variables = self._tools.put(messages, tools)
        return accepted(lambda: self._shaped.render(known, variables, has_head=has_head))


@dataclass(frozen=True, slots=True)
class _Plain:
    """Renders messages as they are, with the special tokens."""

    template: ChatTemplate
    special_tokens: Mapping[str, Any]

    def render_raw(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        return self.render(messages, {"tools": list(tools) or None}, Conversation(messages))

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], chat: Conversation) -> str:
        every = {
            **self.special_tokens,
            **variables,
            **chat.variables,
            "messages": messages,
            "documents": None,
            "add_generation_prompt": chat.add_generation_prompt and not chat.continue_final_message,
        }
        return self.template.render(every, now_s=chat.now_s)


@dataclass(frozen=True, slots=True)
class _Shaped:
    """Renders messages in the shape that the template needs."""

    plain: _Plain
    needs: TemplateNeeds

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, has_head: bool = True
    ) -> str:
        made = [_with_reasoning(message) for message in shaped(messages, self.needs)]
        return self.plain.render(made, variables, Conversation(made, add_generation_prompt=has_head))


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Copies the reasoning to each name that templates read it by, as transformers does."""
    if "reasoning" not in message:
        return message
    return {"thinking": message["reasoning"], **message, "reasoning_content": message["reasoning"]}


def _mark_end(messages: list[dict[str, Any]], source: str) -> str:
    """Marks the end of the final message's content, and returns that content."""
    content = messages[-1]["content"]
    if "content" not in source:
        raise InvalidRequest("continue_final_message: the model's chat template shows no content of messages")
    if isinstance(content, str):
        messages[-1]["content"] = content + _END
        return content
    *before, last = content
    messages[-1]["content"] = [*before, {**last, "text": last["text"] + _END}]
    return str(last["text"])


def _cut(text: str, said: str) -> str:
    """Returns the text up to the mark; if the template trimmed the message, without trailing space."""
    place = text.rfind(_END.strip())
    if place < 0 or said.strip() not in text:
        raise InvalidRequest(
            "continue_final_message: the model's chat template does not show the final message as it is"
        )
    return text[:place] if text.startswith(_END, place) else text[:place].rstrip()
