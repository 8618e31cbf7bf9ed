"""Writes an answer for people: text and tool calls to stdout, reasoning to stderr."""

from __future__ import annotations

import sys
from typing import Literal

import typer

from penstock.producer import Choice, Chunk


class AnswerWriter:
    """Takes the chunks of one choice, or a whole choice. Each kind of content begins on its own line."""

    def __init__(self, label: str = "") -> None:
        self._label = label  # precedes each first line
        self._now: Literal["", "reasoning", "text", "call"] = ""
        self._at_start = True  # of a line

    def add(self, chunk: Chunk) -> None:
        """Writes one chunk, in the order in which models do."""
        self._reason(chunk.reasoning)
        self._say(chunk.text)
        for delta in chunk.tool_calls:
            self._call(delta.name, delta.arguments)

    def add_whole(self, choice: Choice) -> None:
        self._reason(choice.reasoning)
        self._say(choice.text)
        for call in choice.tool_calls:
            self._call(call.name, call.arguments)

    def end(self) -> None:
        """Ends the line; an answer without content becomes an empty line."""
        if not self._now:
            typer.echo(self._label)
            return
        self._begin("")
        if not self._at_start:
            typer.echo()

    def _reason(self, text: str) -> None:
        if text:
            self._begin("reasoning")
            self._write(text)

    def _say(self, text: str) -> None:
        if text:
            self._begin("text")
            self._write(text)

    def _call(self, name: str | None, arguments: str) -> None:
        if name is not None:
            self._begin("call", anew=True)
            self._write(f"{name}(")
        self._write(arguments)

    def _begin(self, kind: Literal["", "reasoning", "text", "call"], *, anew: bool = False) -> None:
        if kind == self._now and not anew:
            return
        if self._now == "call":
            self._write(")")
        if kind and not self._at_start:
            self._write("\n")
        self._now = kind
        if kind:
            self._write(self._label)

    def _write(self, text: str) -> None:
        if not text:
            return
        self._at_start = text.endswith("\n")
        if self._now == "reasoning":
            typer.secho(text, nl=False, err=True, dim=sys.stderr.isatty())
        else:
            typer.echo(text, nl=False)
