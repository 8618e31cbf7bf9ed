"""The part of a reply's grammar for tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.request import Tool
from penstock.engine.text.response.grammar.argument_grammar import call_body
from penstock.engine.text.response.grammar.lark import ANY, GrammarWriter, either, literal, sequence, without
from penstock.engine.text.response.grammar.rules import CallRule
from penstock.engine.text.response.syntax import Arguments, ReplyFormat


class CallGrammar:
    def __init__(self, writer: GrammarWriter, format_: ReplyFormat, tools: Sequence[Tool], rule: CallRule) -> None:
        self._writer = writer
        self._format = format_
        self._syntax = format_.calls
        self._is_single = rule.at_most_one or format_.has_messages  # of which a call is the last
        opening = format_.pieces(self._syntax.group_begin or self._syntax.begin)
        self._trigger = opening[0] if opening and opening[0] in format_.delimiters else ""
        self._behind_trigger = opening[1:]
        self._body = writer.rule(either(call_body(writer, format_, tool) for tool in tools))

    @property
    def is_anywhere(self) -> bool:
        """Whether calls may follow text, even white space."""
        return bool(self._trigger)

    def run(self) -> str:
        mark = f"({self._spell(self._syntax.group_mark)})?" if self._syntax.group_mark else ""
        return sequence([mark, self._unmarked_run()])

    def marked_run(self) -> str:
        """Returns calls with a mark, for places where text may look like calls."""
        return sequence([self._spell(self._syntax.group_mark), self._unmarked_run()])

    def within_text(self, unlike: str) -> str:
        """Returns the grammar of text and calls, or of text alone. The text may not begin like `unlike`."""
        return self._anywhere(unlike) if self._trigger else self._call_first()

    def _anywhere(self, unlike: str) -> str:
        """Returns text up to a delimiter, which can only begin a call."""
        first = _unlike(unlike) if unlike else ANY
        calls = [self._until_trigger(first), self._behind()]
        has_end = bool(self._syntax.end or self._syntax.group_end)  # otherwise nothing says where text continues
        if not self._is_single:
            again = self._until_trigger(ANY) if has_end else self._spell(self._trigger)
            calls.append(f"({sequence([again, self._behind()])})*")
        if has_end:
            calls.append(self._text(without(self._trigger) if self._is_single else ANY))
        return either([self._text(first), sequence(calls)])

    def _text(self, text: str) -> str:
        return between_marks(self._writer, self._format, self._writer.terminal(text))

    def _until_trigger(self, text: str) -> str:
        if self._writer.is_special(self._trigger):
            return sequence([self._text(text), self._spell(self._trigger)])
        return self._writer.until(self._trigger, text)

    def _behind(self) -> str:
        """Returns what follows the trigger, to the end of a call or of a group of calls."""
        behind = self._writer.spell(self._behind_trigger)
        if self._syntax.group_begin:
            return sequence([behind, self._list(), self._spell(self._syntax.group_end)])
        return sequence([behind, self._body, self._end()])

    def _call_first(self) -> str:
        """Returns calls in place of text, or after a mark in it."""
        opening = self._syntax.group_begin or ("{" if self._syntax.arguments is Arguments.OBJECT else "")
        text = _unlike(opening)
        marked = sequence([self._writer.until(self._syntax.group_mark, text), self._unmarked_run()])
        return either([self._writer.terminal(text), self._unmarked_run(), marked])

    def _unmarked_run(self) -> str:
        return sequence([self._spell(self._syntax.group_begin), self._list(), self._spell(self._syntax.group_end)])

    def _list(self) -> str:
        call = sequence([self._spell(self._syntax.begin), self._body, self._end()])
        more = sequence([self._spell(self._syntax.separator), call])
        return call if self._is_single else f"{call} ({more})*"

    def _end(self) -> str:
        """Returns the end of a call; optional if it ends the turn, as it may then be a token that ends the reply."""
        end = self._spell(self._syntax.end)
        return f"({end})?" if end and self._format.has_messages else end

    def _spell(self, syntax: str) -> str:
        return self._writer.spell(self._format.pieces(syntax))


def between_marks(writer: GrammarWriter, format_: ReplyFormat, text: str) -> str:
    """Returns `text` with or without the marks around it. Marks that are ordinary words are part of any text."""
    pieces = [format_.pieces(mark) for mark in (format_.text_begin, format_.text_end)]
    begin, end = (
        f"({writer.spell(mark)})?" if mark and (writer.is_special(mark[0]) or mark[0].isspace()) else ""
        for mark in pieces
    )
    return sequence([begin, text, end])


def _unlike(beginning: str) -> str:
    return rf"{ANY} & ~(/\s*/ {literal(beginning)} {ANY})"
