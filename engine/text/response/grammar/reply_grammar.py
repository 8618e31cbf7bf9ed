"""The grammar of a reply: REASONING? (text | CALLS)*, in the syntax of the model's format."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from penstock.engine.errors import InvalidRequest
from penstock.engine.request import ResponseSpec
from penstock.engine.text.response.formats import FORMATS
from penstock.engine.text.response.grammar.call_grammar import CallGrammar, between_marks
from penstock.engine.text.response.grammar.json_grammar import JsonGrammar
from penstock.engine.text.response.grammar.lark import ANY, GrammarWriter, either, literal, regex, sequence
from penstock.engine.text.response.grammar.rules import FREE, CallRule, ChoiceText, JsonText, RegexText, TextRule
from penstock.engine.text.response.grammar.schemas import edited, parsed_schema
from penstock.engine.text.response.syntax import ReplyFormat

_GAP = r"/[ \t\n]{1,2}/"  # allowed before text that follows a rule, and before a call


def reply_grammar(
    response: ResponseSpec | None,
    *,
    text: TextRule | None = None,
    calls: CallRule = FREE,
    has_reasoning: bool = True,
    special_token_ids: Mapping[str, int] = MappingProxyType({}),
) -> str | None:
    """Returns the source of the grammar that a reply must follow, for `GrammarCompiler`; None if nothing constrains it.

    One grammar covers reasoning, text and calls, so that they can't disagree; `text` is what follows the reasoning.

    A tool's arguments follow its schema. If the tool is `strict`, what llguidance can't handle is refused when the
    grammar is compiled, and objects have only the listed properties. Otherwise such parts are left out.

    Args:
        response: format, beginning and tools of a reply to a chat; None for a plain prompt, or a model without a known
            format.
        text: what the text must be. With tools that need not be called, a reply is such a text, or calls.
        calls: which calls are allowed. Without a rule, and without strict tools, calls are as free as text.
        has_reasoning: whether the model reasons at all, if the format has reasoning.
        special_token_ids: the ids of the tokenizer's special tokens. Everything else is ordinary text.

    Raises:
        InvalidRequest: calls are required that the model can't make, at this point or at all; a schema is invalid; or
            the format has no syntax for arguments of such a schema.
    """
    tools = () if response is None else response.tools
    if calls.required and not tools:
        why = "there are no tools" if response is not None else "this model has no known format of calls (chat_format)"
        raise InvalidRequest(f"tool_choice requires a call, but {why}")
    is_bound = bool(tools) and (calls != FREE or any(tool.strict for tool in tools))
    if text is None and not is_bound:
        return None
    writer = GrammarWriter(special_token_ids)
    if response is None:
        return writer.source(_text(writer, text))
    return writer.source(_Reply(writer, response, text, calls, has_reasoning=has_reasoning).start())


class _Reasoning(Enum):
    NONE = "none"
    OPTIONAL = "optional"
    OPEN = "open"


class _Reply:
    def __init__(
        self,
        writer: GrammarWriter,
        response: ResponseSpec,
        text: TextRule | None,
        rule: CallRule,
        *,
        has_reasoning: bool,
    ) -> None:
        self._writer = writer
        format_ = FORMATS[response.format]
        self._format = format_ if response.reads_reasoning else format_.without_reasoning()
        self._prefix = response.prefix
        self._reasoning = _reasoning(self._format, response.prefix, has_reasoning)
        self._text = None if text is None else _text(writer, text)
        self._rule = rule
        self._calls = CallGrammar(writer, self._format, response.tools, rule) if response.tools else None

    def start(self) -> str:
        return self._messages() if self._format.has_messages else self._plain()

    def _plain(self) -> str:
        begin, end = self._tags()
        if self._reasoning is _Reasoning.NONE:
            return self._body("")
        last, *more = self._format.pieces(end)
        rest = sequence([self._writer.until(last), self._writer.spell(more), self._body(_optional(_GAP))])
        if self._reasoning is _Reasoning.OPEN:
            return rest
        return either([sequence([self._spell(begin), rest]), self._body("", unlike=begin)])

    def _body(self, gap: str, unlike: str = "") -> str:
        """Returns what follows the reasoning. It may not begin like `unlike`, the beginning of reasoning."""
        text = between_marks(self._writer, self._format, self._text or "")
        if self._calls is None:
            return sequence([gap, text])
        if self._rule.required:
            return self._required_calls(self._calls)
        if self._text is not None:
            return either([sequence([gap, text]), sequence([gap, self._calls.marked_run()])])
        return self._calls.within_text(unlike)

    def _required_calls(self, calls: CallGrammar) -> str:
        """Returns required calls. After text that the prompt already has, calls without a mark would be text too."""
        if calls.is_anywhere:
            return sequence([_optional(_GAP), calls.run()])
        return calls.marked_run() if self._prefix.strip() else calls.run()

    def _messages(self) -> str:
        """Returns the grammar of a format in which every part of a reply has a header."""
        format_, writer = self._format, self._writer
        _, end = self._tags()
        if format_.text_begin in self._prefix:
            if self._rule.required:
                raise InvalidRequest("tool_choice requires a call, and the final message that is continued is text")
            return self._text or ANY
        if self._reasoning is _Reasoning.NONE:
            return self._last_messages([])
        ended = sequence([writer.until(end), self._spell(format_.next_part)])
        reasoning = sequence([self._spell(format_.reasoning.begin if format_.reasoning else ""), ended])
        rest = self._last_messages([reasoning])
        return sequence([ended, rest]) if self._reasoning is _Reasoning.OPEN else rest

    def _last_messages(self, before: list[str]) -> str:
        format_ = self._format
        header = self._spell(format_.text_begin)
        last = [] if self._calls is None else [self._calls.run()]
        if not self._rule.required:
            last.append(sequence([header, self._text or self._writer.terminal(ANY)]))
        if self._calls is not None and not self._rule.required and self._text is None:
            ended = sequence([self._writer.until(format_.text_end), self._spell(format_.next_part)])
            before = [*before, sequence([header, ended])]
        return sequence([f"{either(before)}*" if before else "", either(last)])

    def _tags(self) -> tuple[str, str]:
        reasoning = self._format.reasoning
        return (reasoning.begin.strip(), reasoning.end.strip()) if reasoning else ("", "")

    def _spell(self, syntax: str) -> str:
        return self._writer.spell(self._format.pieces(syntax))


def _reasoning(format_: ReplyFormat, prefix: str, has_reasoning: bool) -> _Reasoning:
    """Returns which reasoning a reply may still have, given the `prefix` in the prompt."""
    if format_.reasoning is None:
        return _Reasoning.NONE
    begin, end = format_.reasoning.begin.strip(), format_.reasoning.end.strip()
    if begin in prefix:
        return _Reasoning.NONE if end in prefix.rpartition(begin)[2] else _Reasoning.OPEN
    return _Reasoning.NONE if prefix.strip() or not has_reasoning else _Reasoning.OPTIONAL


def _text(writer: GrammarWriter, rule: TextRule | None) -> str:
    if rule is None:
        return writer.terminal(ANY)
    if isinstance(rule, JsonText):
        of = "response_format"
        schema = edited(parsed_schema(rule.schema, of), of=of, strict=rule.strict)
        return JsonGrammar(writer, schema, of=of, lenient=False).all()
    if isinstance(rule, RegexText):
        return writer.terminal(regex(rule.pattern))
    if isinstance(rule, ChoiceText):
        return writer.terminal(either(literal(option) for option in rule.options))
    return writer.lark(rule.grammar)


def _optional(expression: str) -> str:
    return f"({expression})?"
