"""What a chat template cannot do, by name: for the model card, for `penstock doctor`, and for the digest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.engine.text.bridges.instructions import Instructions
from penstock.engine.text.bridges.probe import Probe, conversation
from penstock.engine.text.bridges.round_trip import Ability, Readback
from penstock.engine.text.bridges.tools import Tools
from penstock.engine.text.bridges.turns import Turns
from penstock.engine.text.template_needs import CallIds, TemplateNeeds

RULES = 1
"""Version of the rules by which conversations are made to fit a template. A change of what is rendered raises it."""

TOOLS = "tools"
"""The limit of a template that shows no tools."""
MESSAGES = "messages"
"""The limit of a template that fails for a single question."""
UNREAD_CALLS = "unread_calls"
"""The limit of a template whose calls no format reads back."""
OF_TOOLS = frozenset({TOOLS, "tool_place", "tool_keys", UNREAD_CALLS, "unread_several_calls", "unread_types"})

_PLACES = ("user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Template:
    """What was found out about one template."""

    needs: TemplateNeeds
    probe: Probe
    instructions: Instructions
    turns: Turns
    tools: Tools
    readback: Readback | None = None  # None: replies are text

    def fails(self, ability: Ability) -> bool:
        """Whether something that the template writes comes back wrong."""
        return self.readback is not None and self.readback.fails(ability)

    def limits(self) -> list[str]:
        """Returns the names of its limits. A template that does not show a question has but one."""
        if not self.probe.shows("user"):
            return [MESSAGES]
        return [name for name, limit in LIMITS.items() if limit.holds(self)]


@dataclass(frozen=True, slots=True)
class Limit:
    """Something that a template cannot do."""

    means: str  # in words, after "the chat template"
    holds: Callable[[Template], bool]
    changes_prompts: bool = True  # whether conversations are made to fit


def rules_of(limits: Iterable[str]) -> str | None:
    """Returns what decides, besides the template, how conversations are rendered; None: they go in as they are."""
    changing = [name for name in limits if LIMITS[name].changes_prompts]
    return f"{RULES} {' '.join(changing)}" if changing else None


def _leads(template: Template, roles: Sequence[str]) -> bool:
    """Checks whether instructions can go in front, with and without tools, no matter who speaks last."""
    lasts = _PLACES if _shows_calls(template) else _PLACES[:2]
    with_tools = (False, True) if _has_tools(template) else (False,)
    return all(
        template.instructions.leads(roles, last=last, tools=tools)
        for last, tools in itertools.product(lasts, with_tools)
    )


def _has_tools(template: Template) -> bool:
    return template.tools.place is not None


def _loses_later(template: Template) -> bool:
    """Checks whether an instruction is lost somewhere after the first turn, where something can be put."""
    instructions = template.instructions
    places = [place for place in itertools.product(_PLACES, ("", *_PLACES[:2])) if instructions.can_follow(*place)]
    lead = "system" if _leads(template, ["system"]) else ""
    return not all(instructions.takes(["system"], before, after, lead=lead) for before, after in places)


def _shows_calls(template: Template) -> bool:
    return template.needs.shows_calls and template.needs.shows_results


def _loses_reasoning(template: Template) -> bool:
    messages = conversation(("user", "call", "tool"))
    messages[1]["reasoning"] = "penstock-thought"
    return "penstock-thought" not in (template.probe.text(messages) or "")


def _reads_one(template: Template, ability: Ability) -> bool:
    """Checks that a call comes back, but not this kind of it."""
    return template.fails(ability) and not template.fails(Ability.CALL)


LIMITS: Mapping[str, Limit] = {
    MESSAGES: Limit("fails for a single question", lambda it: not it.probe.shows("user"), False),
    "system": Limit("takes no system message: it becomes a marked user turn", lambda it: not _leads(it, ["system"])),
    "systems": Limit(
        "takes one system message in front: several are merged",
        lambda it: _leads(it, ["system"]) and not _leads(it, ["system", "system"]),
    ),
    "later_system": Limit(
        "takes no system message after the first turn: it becomes a marked user turn at its place", _loses_later
    ),
    "turns": Limit("wants turns that alternate: two in a row are merged", lambda it: it.turns.alternate),
    "empty": Limit(
        "refuses empty messages: they say that they are empty", lambda it: any(map(it.turns.refuses_empty, _PLACES))
    ),
    "several_calls": Limit(
        "takes one tool call a turn: several become several turns",
        lambda it: _shows_calls(it) and not it.needs.shows_several_calls,
    ),
    "call_texts": Limit(
        "shows no text beside a tool call: it becomes a turn in front",
        lambda it: _shows_calls(it) and not (it.needs.shows_call_texts and it.needs.shows_reasoned_call_texts),
    ),
    "call_ids": Limit(
        "shows a call's function in its id alone: ids are made of both", lambda it: it.needs.calls.ids is CallIds.NAMED
    ),
    "calls": Limit("shows no tool calls with their results: they become text", lambda it: not _shows_calls(it)),
    TOOLS: Limit("shows no tools: answers say that they were ignored", lambda it: not _has_tools(it), False),
    "tool_place": Limit(
        "takes tools under another name or only beside a system message",
        lambda it: it.tools.place is not None and not it.tools.place.is_usual,
    ),
    "tool_keys": Limit("fails for tools that lack what is optional: it is filled in", lambda it: bool(it.tools.lacks)),
    "parts": Limit("reads text alone: parts are joined", lambda it: not it.needs.reads_parts("user"), False),
    "reasoning": Limit("shows no earlier reasoning", _loses_reasoning, False),
    "unread_reasoning": Limit(
        "writes reasoning that no known format reads: it stays text", lambda it: it.fails(Ability.REASONING), False
    ),
    UNREAD_CALLS: Limit(
        "writes calls that no known format reads: they stay text", lambda it: it.fails(Ability.CALL), False
    ),
    "unread_several_calls": Limit(
        "writes several calls in a way that is not read: one is", lambda it: _reads_one(it, Ability.CALLS), False
    ),
    "unread_types": Limit(
        "writes arguments of some types in a way that is not read: they are strings",
        lambda it: _reads_one(it, Ability.TYPES),
        False,
    ),
}
"""The limits by their names on the model card, in the order in which they are listed."""
