"""Turns any history into one that a template takes: each call has one result, which follows it.

Models break calls off, clients drop and reorder results, and conversations are cut in front. None of it is refused, and
nothing that was said is lost. A history without such faults stays as it is.

The result depends only on the messages and the template. What becomes of a message depends on no message that comes
after the assistant's next one. So every worker renders the same, and the prompt of one turn begins that of the next.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from penstock.engine.text.bridges.instructions import text_of
from penstock.engine.text.template_needs import Message, TemplateNeeds

NO_RESULT = "This call has no result."

ARGUMENTS_EMPTIED = "arguments_emptied"  # they were not an object, and the template shows objects only
CALLS_SPLIT = "calls_split"  # turns with several calls, for a template that shows one
CALLS_PARTED = "calls_parted"  # from text beside them, for a template that shows only one of the two
CALLS_AS_TEXT = "calls_as_text"  # messages with calls, for a template that shows none
RESULTS_MISSING = "results_missing"
RESULTS_MOVED = "results_moved"  # turns whose results stood elsewhere or in another order
RESULTS_AS_TEXT = "results_as_text"  # results without their calls, or for a template that shows none


def complete(
    messages: Sequence[Message], needs: TemplateNeeds, *, is_open: bool
) -> tuple[list[Message], Mapping[str, int]]:
    """Returns the messages in a form that the template takes, and the number of changes of each kind named above.

    Args:
        messages: the conversation.
        needs: the template's.
        is_open: whether the last message, if it is the assistant's, may still go on: its calls wait for their results.
    """
    messages = [_with_content(message) for message in messages]
    if not any(_calls(message) or message["role"] == "tool" for message in messages):
        return messages, {}
    history = _History(needs, messages[-1] if is_open else None)
    return [message for said, heard in _turns(messages) for message in history.turn(said, heard)], history.changes


class _History:
    """The turns of one conversation, one after the other."""

    def __init__(self, needs: TemplateNeeds, open_message: Message | None) -> None:
        self.changes: Counter[str] = Counter()
        self._needs = needs
        self._open = open_message
        self._num_calls = 0
        self._names: dict[str, str] = {}  # functions by the ids of calls so far

    def turn(self, said: Sequence[Message], heard: Sequence[Message]) -> Iterator[Message]:
        """Yields the assistant's messages, each call with its result, and then all others."""
        spoken = [self._with_ids(message) for message in said]
        calls = [call for message in spoken for call in _calls(message)]
        self._names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
        results = self._results(calls, heard)
        found = [result for result in results if result is not None]
        self.changes[RESULTS_MOVED] += any(one is not other for one, other in zip(found, heard, strict=False))
        rest = iter(results)
        for message, given in zip(spoken, said, strict=True):
            yield from self._message(message, rest, is_open=given is self._open)
        taken = set(map(id, found))
        yield from (self._lone(message) for message in heard if id(message) not in taken)
        self.changes += Counter()  # without zeros

    def _results(self, calls: Sequence[Message], heard: Iterable[Message]) -> list[Message | None]:
        """Returns the result of each call: the one with its id, or else the next one whose id no call has."""
        left = [message for message in heard if message["role"] == "tool"]
        found = [_take(left, partial(_answers, call)) for call in calls]
        strays = [result for result in left if result.get("tool_call_id") not in self._names]
        pairs = zip(calls, found, strict=True)
        return [_take(strays, partial(_may_answer, call)) if result is None else result for call, result in pairs]

    def _message(self, message: Message, results: Iterator[Message | None], *, is_open: bool) -> Iterator[Message]:
        calls = _calls(message)
        if not calls:
            yield message
            return
        if not is_open and self._loses_text(message):
            self.changes[CALLS_PARTED] += 1
            yield {"role": "assistant", "content": message["content"]}
            message = {name: value for name, value in message.items() if name != "content"}
        is_split = len(calls) > 1 and self._needs.shows_calls and not self._needs.shows_several_calls
        self.changes[CALLS_SPLIT] += is_split
        for place, group in enumerate([[call] for call in calls] if is_split else [calls]):
            yield self._calling(message if place == 0 else {"role": "assistant"}, group)
            for call in group:
                result = next(results)
                if result is not None or not is_open:
                    yield self._result(call, result)

    def _loses_text(self, message: Message) -> bool:
        """Whether the template would lose what was said in one message with calls."""
        if not self._needs.shows_calls or not text_of(message).strip():
            return False
        is_shown = self._needs.shows_reasoned_call_texts if message.get("reasoning") else self._needs.shows_call_texts
        return not is_shown

    def _calling(self, message: Message, calls: Sequence[Message]) -> Message:
        """Returns the message with these calls."""
        if not self._needs.shows_calls:
            self.changes[CALLS_AS_TEXT] += 1
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            return {
                **rest,
                "content": [*_parts(message), *({"type": "text", "text": _as_text(call)} for call in calls)],
            }
        return {**message, "tool_calls": [self._with_arguments(call) for call in calls]}

    def _with_arguments(self, call: Message) -> Message:
        """Returns the call with arguments that the template shows."""
        function = call["function"]
        if not isinstance(function["arguments"], str) or self._needs.shows_broken_arguments:
            return call
        self.changes[ARGUMENTS_EMPTIED] += 1
        return {**call, "function": {**function, "arguments": {}}}

    def _result(self, call: Message, result: Message | None) -> Message:
        if result is None:
            self.changes[RESULTS_MISSING] += 1
            result = {"role": "tool", "content": NO_RESULT}
        name = call["function"]["name"]
        if not self._needs.shows_results:
            return self._told(f"The result of {name}:", result)
        if result.get("tool_call_id") != call.get("id") and "id" in call:
            result = {**result, "tool_call_id": call["id"]}
        if not result.get("name") and self._needs.needs_result_names:
            result = {**result, "name": name}
        return result

    def _lone(self, message: Message) -> Message:
        """Returns a message of others than the assistant. A result here has no call, or its call has a result."""
        if message["role"] != "tool":
            return message
        name = message.get("name") or self._names.get(message.get("tool_call_id", ""))
        needs_name, needs_id = self._needs.needs_result_names, self._needs.needs_call_ids
        if self._needs.shows_lone_results and (name or not needs_name) and ("tool_call_id" in message or not needs_id):
            return {**message, "name": name} if needs_name else message
        return self._told(
            f"The result of an earlier call of {name}:" if name else "The result of an earlier call:", message
        )

    def _told(self, introduction: str, result: Message) -> Message:
        self.changes[RESULTS_AS_TEXT] += 1
        return {"role": "user", "content": [{"type": "text", "text": introduction}, *_parts(result)]}

    def _with_ids(self, message: Message) -> Message:
        """Numbers calls that have no id, for a template that needs ids."""
        calls = [self._with_id(call) for call in _calls(message)]
        return {**message, "tool_calls": calls} if calls else message

    def _with_id(self, call: Message) -> Message:
        self._num_calls += 1
        return call if "id" in call or not self._needs.needs_call_ids else {"id": f"unnamed_{self._num_calls}", **call}


def _turns(messages: Iterable[Message]) -> Iterator[tuple[list[Message], list[Message]]]:
    """Yields what the assistant said in a row, and all messages from there until it spoke again."""
    said: list[Message] = []
    heard: list[Message] = []
    for message in messages:
        if message["role"] == "assistant" and heard:
            yield said, heard
            said, heard = [], []
        (said if message["role"] == "assistant" else heard).append(message)
    yield said, heard


def _with_content(message: Message) -> Message:
    """Returns a message of its own, with an empty content if it has none and no calls."""
    return {**message} if message.get("content") or _calls(message) else {**message, "content": ""}


def _calls(message: Message) -> Sequence[Message]:
    return message.get("tool_calls") or ()


def _answers(call: Message, result: Message) -> bool:
    return "id" in call and result.get("tool_call_id") == call["id"]


def _may_answer(call: Message, result: Message) -> bool:
    return not result.get("name") or result["name"] == call["function"]["name"]


def _take(messages: list[Message], is_meant: Callable[[Message], bool]) -> Message | None:
    """Removes and returns the first message that is meant, if there is one."""
    for place, message in enumerate(messages):
        if is_meant(message):
            return messages.pop(place)
    return None


def _parts(message: Message) -> list[Any]:
    """Returns the content as parts; none if it is empty."""
    content = message.get("content") or ()
    return [{"type": "text", "text": content}] if isinstance(content, str) else [*content]


def _as_text(call: Message) -> str:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"[{function['name']} {text}]"
