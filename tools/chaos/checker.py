"""Decides from a history alone whether the promises P1 to P5 of `docs/guarantees.md` were kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from penstock.protocol import keys
from penstock.tools.chaos.history import ChaosEvent, History, RequestRecord, Seen
from penstock.tools.chaos.plan import RequestPlan
from penstock.tools.chaos.reading import ChoiceRead, Truth, stop_of, tokens_of

_Anomaly = Literal["lost", "doubled", "out of order", "wrong", "late"]

FAULTS: tuple[_Anomaly, ...] = ("lost", "doubled", "out of order", "wrong", "late")


Truths = Mapping[str, Sequence[Truth]]
"""By request id, one per choice."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A broken promise."""

    fault: _Anomaly
    request_id: str
    text: str


@dataclass(slots=True)
class Verdict:
    """The checker's findings."""

    problems: list[Problem] = field(default_factory=list)
    resumed: int = 0  # times a claim continued exactly where the previous claim's tokens ended
    longest_recovery_s: float = 0.0

    @property
    def is_kept(self) -> bool:
        return not self.problems

    def count(self, fault: _Anomaly) -> int:
        return sum(problem.fault == fault for problem in self.problems)


def check(history: History, truths: Truths, *, recovery_limit_s: float) -> Verdict:
    """Checks every record.

    Args:
        history: that of a run that is over.
        truths: what each request must produce.
        recovery_limit_s: how long a request may stay with a dead worker while nothing else goes wrong.
    """
    verdict = Verdict()
    for record in history.records.values():
        _RecordCheck(record, truths[record.request.id], verdict).run()
        _check_recovery(record, history.events, recovery_limit_s, verdict)
    if history.left_in_queue:
        text = f"{history.left_in_queue} entries stayed in the queue although every reply was waited for"
        verdict.problems.append(Problem("lost", "-", text))
    if history.dead_letters:
        verdict.problems.append(Problem("wrong", "-", f"{history.dead_letters} requests went to the dead letters"))
    verdict.problems += (Problem("wrong", "-", trouble) for trouble in history.troubles)
    return verdict


class _RecordCheck:
    """Checks P1 to P4 for one request."""

    def __init__(self, record: RequestRecord, truths: Sequence[Truth], verdict: Verdict) -> None:
        self._record = record
        self._request: RequestPlan = record.request
        self._truths = truths
        self._verdict = verdict
        self._choices = [ChoiceRead() for _ in truths]
        self._position = (-1, -1)  # of the last entry
        self._epoch = 0  # of the last own entry
        self._end: Seen | None = None

    def run(self) -> None:
        for entry in self._record.seen:
            self._look_at(entry)
        self._check_enqueue()
        self._check_end()
        for index, truth in enumerate(self._truths):
            self._check_choice(index, truth)
        self._check_stored()

    def _say(self, fault: _Anomaly, text: str) -> None:
        self._verdict.problems.append(Problem(fault, self._request.id, text))

    def _look_at(self, entry: Seen) -> None:
        position = _position(entry.entry_id)
        if position == self._position:
            self._say("doubled", f"entry {entry.entry_id} was seen twice")
        elif position < self._position:
            self._say("out of order", f"entry {entry.entry_id} came after {'-'.join(map(str, self._position))}")
        self._position = max(position, self._position)
        if self._end is not None:
            kind = entry.fields.get("type")
            self._say("doubled", f"{kind} entry {entry.entry_id} follows the end {self._end.entry_id}")
            return
        match entry.fields.get("type"):
            case "own":
                self._own(entry, position)
            case "chunk":
                self._chunk(entry, position)
            case "end":
                self._end = entry
            case kind:
                self._say("wrong", f"entry {entry.entry_id} has type {kind}")

    def _own(self, entry: Seen, position: tuple[int, int]) -> None:
        epoch = int(entry.fields["epoch"])
        if position != (epoch, 0):
            self._say("out of order", f"the claim of epoch {epoch} has the entry id {entry.entry_id}")
        self._verdict.resumed += bool(self._epoch) and self._num_tokens > 0
        self._epoch = epoch

    def _chunk(self, entry: Seen, position: tuple[int, int]) -> None:
        index, offset = int(entry.fields["index"]), int(entry.fields["offset"])
        tokens = tokens_of(entry.fields)
        if position[0] != self._epoch:
            self._say("out of order", f"chunk {entry.entry_id} was written while epoch {self._epoch} had the request")
        if not 0 <= index < len(self._choices):
            self._say("wrong", f"chunk {entry.entry_id} is of choice {index}")
            return
        have = self._choices[index].tokens
        if offset > len(have):
            self._say("lost", f"choice {index} has no tokens {len(have)} to {offset} before chunk {entry.entry_id}")
        elif offset < len(have):
            known = have[offset : offset + len(tokens)]
            fault: _Anomaly = "doubled" if known == tokens[: len(known)] else "out of order"
            self._say(fault, f"chunk {entry.entry_id} of choice {index} is at {offset}, {len(have)} tokens came before")
        for trouble in self._choices[index].add(entry.fields):
            self._say("out of order", f"chunk {entry.entry_id} of choice {index}: {trouble}")

    def _check_enqueue(self) -> None:
        entries = set(self._record.entry_ids) - {keys.NO_ENTRY}  # of a sending that came after the end: it added none
        if len(entries) > 1:
            self._say("doubled", f"enqueued once, it has the entries {', '.join(sorted(entries))}")

    def _check_end(self) -> None:
        if self._end is None:
            last = self._record.seen[-1].entry_id if self._record.seen else "nothing"
            self._say("lost", f"no end came, the last entry was {last}")
            return
        fields = self._end.fields
        allowed = {"length", "stop", "tool_calls"}
        if self._request.cancel_after is not None:
            allowed.add("cancelled")
        if self._request.timeout_s is not None:
            allowed.add("expired")
        if fields["finish_reason"] not in allowed:
            self._say("wrong", f"ended with {fields['finish_reason']}: {fields.get('code')} {fields.get('message')}")
        if self._is_whole:
            self._check_reasons(fields)
        if int(fields.get("completion_tokens", 0)) != self._num_tokens:
            self._say("wrong", f"the end counts {fields.get('completion_tokens')} tokens, {self._num_tokens} were seen")

    def _check_reasons(self, fields: Mapping[str, str]) -> None:
        reasons = fields.get("finish_reasons", fields["finish_reason"]).split(",")
        expected = [truth.finish_reason for truth in self._truths]
        if reasons != expected:
            self._say("wrong", f"its choices ended with {', '.join(reasons)}, not {', '.join(expected)}")

    def _check_choice(self, index: int, truth: Truth) -> None:
        tokens = self._choices[index].tokens
        for place, (token, right) in enumerate(zip(tokens, truth.tokens, strict=False)):
            if token != right:
                self._say("wrong", f"token {place} of choice {index} is {token}, not {right}")
                return
        if len(tokens) > len(truth.tokens):
            self._say("doubled", f"choice {index} has {len(tokens)} tokens, not {len(truth.tokens)}")
        elif self._is_whole and len(tokens) < len(truth.tokens):
            self._say("lost", f"choice {index} has {len(tokens)} tokens, not {len(truth.tokens)}")
        elif self._end is not None:
            self._check_said(index, truth, self._end)

    def _check_said(self, index: int, truth: Truth, end: Seen) -> None:
        """Checks that the reply is all of the truth, or its beginning if it was stopped."""
        said = self._choices[index].truth("", stop_of(end.fields))
        for name, found, right in (
            ("text", said.text, truth.text),
            ("reasoning", said.reasoning, truth.reasoning),
            ("tool calls", said.calls, truth.calls),
        ):
            if found != (right if self._is_whole else right[: len(found)]):
                self._say("wrong", f"in choice {index} {name}: {_difference(found, right)}")
        if self._is_whole and said.stop != truth.stop:
            self._say("wrong", f"choice {index} was stopped by {said.stop!r}, not {truth.stop!r}")

    @property
    def _num_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self._choices)

    @property
    def _is_whole(self) -> bool:
        return self._end is not None and self._end.fields["finish_reason"] not in ("cancelled", "expired", "error")

    def _check_stored(self) -> None:
        """Checks that the client saw exactly what the stream holds: nothing came late, nothing was missed."""
        if self._record.stored is None:
            return
        seen = Counter(entry.entry_id for entry in self._record.seen)
        stored = Counter(entry.entry_id for entry in self._record.stored)
        for entry_id in seen - stored:
            self._say("lost", f"entry {entry_id} was seen, but the stream does not hold it any more")
        for entry_id in stored - seen:
            fault: _Anomaly = "doubled" if self._end is not None else "lost"
            self._say(fault, f"the stream holds entry {entry_id}, which its reader did not see")


def _check_recovery(record: RequestRecord, events: Sequence[ChaosEvent], limit_s: float, verdict: Verdict) -> None:
    """Checks P5: after the worker that had a request was killed or frozen, another one takes the request soon.

    Time is counted from the last fault in between, as that may have hit the next worker.
    """
    owner, owned_s = "", 0.0
    for entry in record.seen:
        if entry.fields.get("type") == "own":
            if owner and _was_hit(events, owner, owned_s, entry.at_s):
                started_s = max(event.at_s for event in events if event.at_s <= entry.at_s)
                recovery_s = entry.at_s - started_s
                verdict.longest_recovery_s = max(verdict.longest_recovery_s, recovery_s)
                if recovery_s > limit_s:
                    text = f"{recovery_s:.1f} s from the loss of {owner} to the claim {entry.entry_id}"
                    verdict.problems.append(Problem("late", record.request.id, text))
            owner, owned_s = entry.fields["worker"], entry.at_s


def _was_hit(events: Sequence[ChaosEvent], worker: str, start_s: float, end_s: float) -> bool:
    return any(
        event.worker == worker and event.kind in ("kill", "freeze") and start_s - 1.0 <= event.at_s <= end_s
        for event in events
    )


def _position(entry_id: str) -> tuple[int, int]:
    epoch, number = entry_id.split("-")
    return int(epoch), int(number)


def _difference(text: str, right: str) -> str:
    place = next((at for at, (a, b) in enumerate(zip(text, right, strict=False)) if a != b), min(len(text), len(right)))
    return f"{text[place : place + 20]!r} at character {place}, not {right[place : place + 20]!r}"
