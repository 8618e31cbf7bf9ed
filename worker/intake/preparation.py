"""Prepares a request for the engine: its prompt as tokens, and how its reply is to be parsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from penstock.engine.errors import InvalidRequest, PromptTooLong
from penstock.engine.request import ResponseSpec, Tool
from penstock.engine.text.conversation import Conversation, EncodedChat
from penstock.engine.text.fewest_tokens import Check, let_pass
from penstock.protocol.redis.connection import Fields
from penstock.protocol.wire import GenerateRequest, Message
from penstock.worker.config import WorkerConfig
from penstock.worker.intake.constraints import callable_tools, grammar_source
from penstock.worker.threads import Threads, Wait, to_the_end

if TYPE_CHECKING:
    from penstock.engine.structured import Grammar

# OpenAI's `reasoning_effort` "none" turns reasoning off. Templates do that by a variable, under either of these names.
_NO_THINKING = {"enable_thinking": False, "thinking": False}


class TextEncoder(Protocol):
    """Turns prompts into tokens; `engine.text.tokenizer.Tokenizer` does. Called from several threads."""

    vocab_size: int  # token ids from here on have no text

    def encode(self, text: str, check: Check = let_pass) -> Sequence[int]:
        """Encodes a plain prompt. `check` may be given a lower bound of the number of tokens before they are made."""

    def encode_chat(self, chat: Conversation, check: Check = let_pass) -> EncodedChat:
        """Encodes a conversation with the model's chat template; `check` as for `encode`.

        It may block for as long as a template takes, so never call it on the event loop.

        Raises:
            InvalidRequest: the template refuses the messages or fails, or there is none.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens; special tokens have none."""

    def spell_all(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, special ones spelled out."""

    def decode_prompt(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a prompt, without an unfinished character at its end."""

    @property
    def special_token_ids(self) -> Mapping[str, int]:
        """Tokens that are not text, and their ids."""


class Grammars(Protocol):
    """Compiles grammars; `engine.structured.GrammarCompiler` does. Called from several threads."""

    def compile(self, source: str) -> Grammar:
        """Compiles a grammar; blocks for as long as that takes.

        Raises:
            InvalidRequest: the source is not a grammar, or over a limit.
        """


@dataclass(frozen=True, slots=True)
class Preparation:
    """What preparation adds to a request."""

    prompt_token_ids: tuple[int, ...]
    response: ResponseSpec | None = None
    echo: str = ""
    grammar_source: str | None = None
    grammar: Grammar | None = None  # compiled from the source
    ignored: tuple[str, ...] = ()  # request fields without effect: the prompt or the reply has no place for them
    history_changes: Mapping[str, int] = field(default_factory=dict)  # how often each kind of change was made


class Preparer:
    """Prepares requests for one engine. Any thread may use it."""

    def __init__(
        self,
        text: TextEncoder,
        config: WorkerConfig,
        grammars: Grammars | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """Without `grammars`, requests that need one are refused. `max_model_len` is the engine's, if known."""
        self.text = text
        self._config = config
        self._grammars = grammars
        self._max_model_len = max_model_len

    def prepare(self, asked: GenerateRequest, now_s: float | None = None) -> Preparation:
        """Prepares a request: `read`, then `compile`."""
        return self.compile(self.read(asked, now_s))

    def read(self, asked: GenerateRequest, now_s: float | None = None) -> Preparation:
        """Prepares everything but the grammar. May block for as long as a chat template takes.

        Args:
            asked: the request.
            now_s: when it was enqueued, in Unix time; templates take it for the present, so every worker renders the
                same.

        Raises:
            InvalidRequest: the chat template refuses the messages, or no reply could satisfy the request.
            PromptTooLong: the prompt is over max_prompt_tokens.
        """
        preparation = self.encode(asked, now_s, self._check_fewest)
        self._check_length(len(preparation.prompt_token_ids), "")
        return preparation

    def encode(self, asked: GenerateRequest, now_s: float | None = None, check: Check = let_pass) -> Preparation:
        """Reads a prompt of any length that passes `check` (see `TextEncoder.encode`)."""
        return self._read_prompt(asked, check) if asked.messages is None else self._read_chat(asked, now_s, check)

    def _check_fewest(self, num_tokens: int) -> None:
        """Applies the engine's limits to a lower bound of the number of tokens, before all of them are made."""
        self._check_length(num_tokens, "at least ")
        if self._max_model_len is not None and num_tokens >= self._max_model_len:
            raise PromptTooLong(
                f"the prompt has at least {num_tokens} tokens; with max_model_len {self._max_model_len} "
                f"it can have {self._max_model_len - 1}, as an answer takes at least one"
            )

    def _check_length(self, num_tokens: int, at_least: str) -> None:
        limit = self._config.max_prompt_tokens
        if limit is not None and num_tokens > limit:
            raise PromptTooLong(f"the prompt has {at_least}{num_tokens} tokens, the limit max_prompt_tokens is {limit}")

    def compile(self, preparation: Preparation) -> Preparation:
        """Adds the compiled grammar, if there is one. May block for as long as the compiler takes.

        Raises:
            InvalidRequest: the grammar is malformed or over a limit.
        """
        if preparation.grammar_source is None:
            return preparation
        if self._grammars is None:
            raise InvalidRequest("this engine can't constrain replies")
        return replace(preparation, grammar=self._grammars.compile(preparation.grammar_source))

    def _read_chat(self, asked: GenerateRequest, now_s: float | None, check: Check) -> Preparation:
        chat = self.text.encode_chat(conversation(asked, now_s), check)
        if not chat.shows_tools and asked.is_tool_required:
            raise InvalidRequest("tool_choice: the model's chat template shows no tools, so no call can be required")
        tools = callable_tools(asked)
        if not chat.reads_calls:
            _check_unread(asked, tools)
        response = None
        if chat.reply_format is not None:
            callable_ = tools if chat.reads_calls else ()
            response = ResponseSpec(
                chat.reply_format, chat.reply_prefix, callable_, reads_reasoning=chat.reads_reasoning
            )
        source = self._grammar_source(
            asked, response, has_reasoning=chat.has_reasoning, reads_several=chat.reads_several_calls
        )
        if source is not None and asked.add_generation_prompt is False and not asked.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt false: the model then writes the head of its answer itself, "
                "so the answer cannot be held to a form or to calls"
            )
        ignored = () if chat.shows_tools and (chat.reads_calls or not tools) else ("tools",)
        return Preparation(
            chat.token_ids, response, _last_words(asked), source, ignored=ignored, history_changes=chat.history_changes
        )

    def _read_prompt(self, asked: GenerateRequest, check: Check) -> Preparation:
        source = self._grammar_source(asked, None, has_reasoning=False)
        if asked.prompt_token_ids is not None:
            token_ids = asked.prompt_token_ids
            text = self._echo_of(token_ids, is_constrained=source is not None) if asked.echo else ""
        else:
            text = asked.prompt or ""
            token_ids = tuple(self.text.encode(text, check))
        return Preparation(token_ids, None, text if asked.echo else "", source)

    def _echo_of(self, token_ids: Sequence[int], *, is_constrained: bool) -> str:
        """Decodes ids that have text: a model's vocabulary may be padded. The engine refuses ids beyond that.

        An unfinished character belongs to the answer, unless a grammar says how that begins.
        """
        known = [id_ for id_ in token_ids if id_ < self.text.vocab_size]
        return self.text.decode(known) if is_constrained else self.text.decode_prompt(known)

    def _grammar_source(
        self, asked: GenerateRequest, response: ResponseSpec | None, *, has_reasoning: bool, reads_several: bool = True
    ) -> str | None:
        special = self.text.special_token_ids
        return grammar_source(asked, response, special, has_reasoning=has_reasoning, reads_several=reads_several)


async def prepare(
    preparer: Preparer,
    threads: Threads,
    asked: GenerateRequest,
    fields: Fields,
    now_s: float,
    wait: Wait = to_the_end,
) -> Preparation:
    """Runs `Preparer.prepare` off the event loop; `fields` are the queue entry's, and `wait` may give up."""

    def read() -> Preparation:
        return preparer.read(asked, now_s)

    is_chat = asked.messages is not None
    preparation = await (threads.run_chat(read, wait) if is_chat else threads.run(read, fields, wait))
    if preparation.grammar_source is None:
        return preparation
    return await threads.run_grammar(lambda: preparer.compile(preparation), wait)


def conversation(asked: GenerateRequest, now_s: float | None) -> Conversation:
    """Makes the chat of a request with messages."""
    add_prompt = asked.add_generation_prompt
    return Conversation(
        [_message(message) for message in asked.messages or ()],
        asked.tools,
        _variables(asked),
        add_generation_prompt=not asked.continue_final_message if add_prompt is None else add_prompt,
        continue_final_message=asked.continue_final_message,
        now_s=now_s,
    )


def _check_unread(asked: GenerateRequest, tools: Sequence[Tool]) -> None:
    """Refuses requests whose tool calls must be read, if no known format reads this model's calls."""
    strict = next((f"tools: {tool.name} is strict" for tool in tools if tool.strict), None)
    needs = "tool_choice requires a call" if asked.is_tool_required else strict
    if needs:
        raise InvalidRequest(f"{needs}, but no known format reads the calls that this model's chat template writes")


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
            call["function"]["arguments"] = given.function.values()
    else:
        made.pop("tool_calls", None)
    return made


def _last_words(asked: GenerateRequest) -> str:
    """Returns what a chat echoes: only the message that it continues."""
    last = asked.messages[-1] if asked.messages else None
    if not (asked.echo and asked.continue_final_message) or last is None or last.content is None:
        return ""
    return last.content if isinstance(last.content, str) else "\n".join(part.text for part in last.content)
