"""What a request needs before an engine can take it: its prompt as tokens, and how its reply is to be read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.engine.errors import PromptTooLong
from penstock.engine.request import ResponseSpec, Tool
from penstock.engine.text.conversation import Conversation, EncodedChat
from penstock.producer.redis.connection import Fields
from penstock.producer.wire import GenerateRequest, Message
from penstock.worker.config import WorkerConfig
from penstock.worker.delivery.threads import Threads

# What OpenAI's API calls no reasoning is a variable of its own to the templates that know it, by either name.
_NO_THINKING = {"enable_thinking": False, "thinking": False}


class TextEncoder(Protocol):
    """What turns prompts into tokens; `engine.text.tokenizer.Tokenizer` is one. Called from several threads."""

    vocab_size: int  # token ids from here on have no text

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a plain prompt."""

    def encode_chat(self, chat: Conversation) -> EncodedChat:
        """A conversation under the model's chat template.

        It may block for as long as a template may take: not for the event loop.

        Raises:
            InvalidRequest: the template refuses the messages or fails, or there is none.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens; special ones have none."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """What was made of a request, beside what it says itself."""

    prompt_token_ids: tuple[int, ...]
    response: ResponseSpec | None = None
    echo: str = ""


class Preparer:
    """Prepares requests for one engine. Any thread may use it."""

    def __init__(self, text: TextEncoder, config: WorkerConfig) -> None:
        self._text = text
        self._config = config

    def prepare(self, asked: GenerateRequest, now_s: float | None = None) -> Preparation:
        """May block for as long as a chat template takes.

        Args:
            asked: what is to be prepared.
            now_s: when it was enqueued, in Unix time: what a chat template takes for the present, whoever renders it.

        Raises:
            InvalidRequest: the chat template refuses the messages.
            PromptTooLong: over max_prompt_tokens.
        """
        preparation = self.encode(asked, now_s)
        self._check_length(preparation)
        return preparation

    def encode(self, asked: GenerateRequest, now_s: float | None = None) -> Preparation:
        """As `prepare`, of a prompt of any length."""
        if asked.messages is not None:
            chat = self._text.encode_chat(conversation(asked, asked.messages, now_s))
            return Preparation(chat.token_ids, _response(asked, chat), _last_words(asked))
        if asked.prompt_token_ids is not None:
            text = self._text.decode(asked.prompt_token_ids) if asked.echo else ""
            return Preparation(asked.prompt_token_ids, echo=text)
        prompt = asked.prompt or ""
        return Preparation(tuple(self._text.encode(prompt)), echo=prompt if asked.echo else "")

    def _check_length(self, preparation: Preparation) -> None:
        limit, num_tokens = self._config.max_prompt_tokens, len(preparation.prompt_token_ids)
        if limit is not None and num_tokens > limit:
            raise PromptTooLong(f"the prompt has {num_tokens} tokens, the limit max_prompt_tokens is {limit}")


async def prepare(
    preparer: Preparer, threads: Threads, asked: GenerateRequest, fields: Fields, now_s: float
) -> Preparation:
    """As `Preparer.prepare`, off the event loop; `fields` are those of the queue entry."""

    def work() -> Preparation:
        return preparer.prepare(asked, now_s)

    return await (threads.run(work, fields) if asked.messages is None else threads.run_chat(work))


def conversation(asked: GenerateRequest, messages: Sequence[Message], now_s: float | None) -> Conversation:
    """The chat of a request."""
    add_prompt = asked.add_generation_prompt
    return Conversation(
        [_message(message) for message in messages],
        asked.tools,
        _variables(asked),
        add_generation_prompt=not asked.continue_final_message if add_prompt is None else add_prompt,
        continue_final_message=asked.continue_final_message,
        now_s=now_s,
    )


def _response(asked: GenerateRequest, chat: EncodedChat) -> ResponseSpec | None:
    if chat.reply_format is None:
        return None
    return ResponseSpec(chat.reply_format, chat.reply_prefix, callable_tools(asked))


def callable_tools(asked: GenerateRequest) -> tuple[Tool, ...]:
    """The tools that an answer may call."""
    chosen = asked.chosen_tools()
    functions = [tool["function"] for tool in asked.tools]
    return tuple(
        Tool(function["name"], json.dumps(function.get("parameters") or {}), function.get("strict") is True)
        for function in functions
        if chosen is None or function["name"] in chosen
    )


def _variables(asked: GenerateRequest) -> Mapping[str, Any]:
    effort = asked.reasoning_effort
    if effort is None:
        return asked.chat_template_kwargs
    without = _NO_THINKING if effort == "none" else {}
    return {**without, **asked.chat_template_kwargs, "reasoning_effort": effort}


def _message(message: Message) -> dict[str, Any]:
    made = message.model_dump(exclude_none=True)
    if message.tool_calls:
        for call, given in zip(made["tool_calls"], message.tool_calls, strict=True):
            call["function"]["arguments"] = given.function.mapping()
    else:
        made.pop("tool_calls", None)
    return made


def _last_words(asked: GenerateRequest) -> str:
    """Of a chat only what the assistant has begun to say is echoed."""
    last = asked.messages[-1] if asked.messages else None
    if not asked.echo or last is None or last.role != "assistant" or last.content is None:
        return ""
    return last.content if isinstance(last.content, str) else "\n".join(part.text for part in last.content)
