"""Makes the grammar that a reply must follow from what its request demands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from penstock.engine.errors import InvalidRequest
from penstock.engine.request import ResponseSpec, Tool
from penstock.engine.text.response.grammar.reply_grammar import reply_grammar
from penstock.engine.text.response.grammar.rules import CallRule, ChoiceText, JsonText, LarkText, RegexText, TextRule
from penstock.protocol.wire import GenerateRequest, NamedTool, ResponseFormat


def grammar_source(
    asked: GenerateRequest,
    response: ResponseSpec | None,
    special_token_ids: Mapping[str, int],
    *,
    has_reasoning: bool,
    reads_several: bool = True,
) -> str | None:
    """Returns the source for a `GrammarCompiler`; None: nothing constrains the reply.

    Args:
        asked: the request.
        response: how its reply is parsed.
        special_token_ids: the ids of the tokenizer's special tokens.
        has_reasoning: whether the model reasons at all.
        reads_several: whether several calls of one reply are read.

    Raises:
        InvalidRequest: no reply could satisfy the request.
    """
    text = text_rule(asked)
    if text is None and not (asked.tools or asked.is_tool_required):
        return None
    if response is None and not asked.is_tool_required:
        _check_free(callable_tools(asked))
    return reply_grammar(
        response,
        text=text,
        calls=call_rule(asked, reads_several=reads_several),
        has_reasoning=has_reasoning,
        special_token_ids=special_token_ids,
    )


def text_rule(asked: GenerateRequest) -> TextRule | None:
    if asked.regex is not None:
        return RegexText(asked.regex)
    if asked.choice:
        return ChoiceText(asked.choice)
    if asked.grammar is not None:
        return LarkText(asked.grammar)
    return None if asked.response_format is None else _json_rule(asked.response_format)


def call_rule(asked: GenerateRequest, *, reads_several: bool = True) -> CallRule:
    is_named = isinstance(asked.tool_choice, NamedTool)
    is_held = asked.is_tool_required or any(tool.strict for tool in callable_tools(asked))  # by a grammar anyway
    return CallRule(
        required=asked.is_tool_required,
        at_most_one=is_named or not asked.parallel_tool_calls or (is_held and not reads_several),
        restricted=asked.chosen_tools() is not None,
    )


def callable_tools(asked: GenerateRequest) -> tuple[Tool, ...]:
    chosen = asked.chosen_tools()
    functions = [tool["function"] for tool in asked.tools]
    return tuple(
        Tool(function["name"], json.dumps(function.get("parameters") or {}), function.get("strict") is True)
        for function in functions
        if chosen is None or function["name"] in chosen
    )


def _check_free(tools: Sequence[Tool]) -> None:
    """Refuses strict tools: in an unknown format, nothing can be enforced."""
    strict = [tool.name for tool in tools if tool.strict]
    if strict:
        raise InvalidRequest(f"tools: {strict[0]} is strict, but this model has no known format of calls (chat_format)")


def _json_rule(asked: ResponseFormat) -> TextRule | None:
    if asked.type == "json_object":
        return JsonText()
    schema = asked.json_schema
    return None if schema is None else JsonText(json.dumps(schema.schema_), strict=schema.strict is True)
