"""Decides when drafts pay, and how many."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import takewhile

from penstock.engine.scheduling.pace import Pace
from penstock.engine.scheduling.sequence import Sequence, SequenceFailed
from penstock.engine.scheduling.slack import StepClock
from penstock.engine.scheduling.step_plan import StepPlan
from penstock.engine.speculation.acceptance import Acceptance, count_right
from penstock.engine.speculation.drafter import Draft, Drafter

_BEST_CHANCE = 0.95  # best chance assumed when checking whether any draft could pay
_TURN_S = 0.25e-3  # the host's turn is rounded up to a multiple of this


class Speculation:
    """Asks a drafter how sequences continue, and proposes as many drafts as are worth their rows.

    `within` restricts a draft to what a sequence's grammar allows or forces.

    A drafter is judged by its guesses at each step, used or not, against the actual tokens. So drafting stops where it
    fails and resumes where it would succeed, at no cost but the guessing. If a step has so many rows that even good
    drafts would not pay, the drafter is not called.
    """

    def __init__(
        self,
        drafter: Drafter,
        within: Callable[[Sequence, Draft], Draft],
        *,
        max_tokens: int,  # per sequence and step
        max_rows: int,  # most rows that draw tokens in a step
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        clock: StepClock,
    ) -> None:
        self._drafter = drafter
        self._within = within
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._records: dict[Sequence, _Record] = {}
        self._of_kind: dict[int, Acceptance] = {}  # of all sequences
        self._pace: Pace | None = None
        self._can_pay: dict[tuple[int, int], bool] = {}  # at this pace, by a step's sequences and the host's turn

    def propose(self, sequences: Collection[Sequence], pace: Pace, room: int) -> dict[Sequence, tuple[int, ...]]:
        """Implements `scheduler.Drafts`."""
        if not self._is_worth_asking(len(sequences), pace):
            return {}
        counts = dict.fromkeys(sequences, 0)
        for sequence in self._worth_it(sequences, pace, room):
            counts[sequence] += 1
        return {
            sequence: self._records[sequence].draft.token_ids[:count] for sequence, count in counts.items() if count
        }

    def has_to_know(self, plan: StepPlan, pace: Pace) -> bool:
        """Whether the results of `plan`, which is in flight, should be known before the next step is planned.

        That is so if it has drafts, or the next step is likely to: drafts follow the tokens that `plan` draws.
        """
        if plan.has_drafts:
            return True
        sequences = [row.sequence for row in plan.rows if row.num_sampled and not row.sequence.is_finished]
        if len(sequences) < len(plan.rows) or not self._is_worth_asking(len(sequences), pace):
            return False
        return any(self._worth_it(sequences, pace, self._max_rows - len(sequences)))

    def forget(self, sequence: Sequence) -> None:
        if self._records.pop(sequence, None) is not None:
            self._drafter.forget(sequence)

    def _is_worth_asking(self, num_rows: int, pace: Pace) -> bool:
        if pace is not self._pace:
            self._pace, self._can_pay = pace, {}
        turn = math.ceil(self._clock.turn_s / _TURN_S)
        if (num_rows, turn) not in self._can_pay:
            most = min(self._max_rows - num_rows, num_rows * self._max_tokens)
            chances = (_BEST_CHANCE,) * most
            self._can_pay[num_rows, turn] = pace.num_drafts(num_rows, 0, chances, turn * _TURN_S) > 0
        return self._can_pay[num_rows, turn]

    def _worth_it(self, sequences: Collection[Sequence], pace: Pace, room: int) -> Iterator[Sequence]:
        """Yields a sequence for each drafted token that is worth verifying, the likeliest tokens first."""
        chances = sorted(self._chances(sequences), key=lambda chance: -chance[0])[:room]
        num_pairs = sum(sequence.num_tokens for sequence in sequences)
        count = pace.num_drafts(len(sequences), num_pairs, [chance for chance, _ in chances], self._clock.turn_s)
        return (sequence for _, sequence in chances[:count])

    def _chances(self, sequences: Iterable[Sequence]) -> Iterator[tuple[float, Sequence]]:
        """Yields for each drafted token the chance that it and all before it are right.

        Drafts in place of tokens in flight are left out: they are drafted again once these are known.
        """
        for sequence in sequences:
            record = self._asked(sequence)
            chance = record.chance
            for number in range(1, len(record.draft.token_ids) - sequence.num_in_flight + 1):
                yield chance**number, sequence

    def _asked(self, sequence: Sequence) -> _Record:
        """Returns the record with the draft after a sequence's known tokens."""
        record = self._records.get(sequence)
        if record is None:
            record = self._records[sequence] = _Record()
        if record.end != len(sequence.token_ids):
            record.judge(sequence.token_ids)
            try:
                draft = self._draft(sequence)
            except Exception as error:
                raise SequenceFailed(sequence) from error
            record.take(len(sequence.token_ids), draft, self._of_kind)
        return record

    def _draft(self, sequence: Sequence) -> Draft:
        """Drafts tokens, up to the first impossible one or one that ends the sequence.

        The draft begins in place of the tokens in flight, and may be longer by their number: several steps in one
        dispatch may leave as many in flight as a draft can have.
        """
        ends = sequence.request.sampling.stop_ids(self._eos_token_ids)
        most = self._max_tokens + sequence.num_in_flight
        draft = self._drafter.draft(sequence, most)
        usable = takewhile(lambda id_: 0 <= id_ < self._vocab_size, draft.token_ids)
        draft = self._within(sequence, draft._replace(token_ids=tuple(usable)))
        usable = takewhile(lambda id_: id_ not in ends, draft.token_ids[:most])
        return draft._replace(token_ids=tuple(usable))


class _Record:
    """One sequence's last draft, and how often each kind was right."""

    __slots__ = ("_of_kind", "draft", "end")

    def __init__(self) -> None:
        self.draft = Draft()
        self.end = 0  # number of tokens when it was made
        self._of_kind: dict[int, Acceptance] = {}

    @property
    def chance(self) -> float:
        """Probability that a token of the draft is right, if those before it are."""
        return self._of_kind[self.draft.kind].chance

    def judge(self, token_ids: list[int]) -> None:
        """Judges the draft by the tokens that came since."""
        drafts = self.draft.token_ids
        if drafts:
            new = token_ids[self.end : self.end + len(drafts)]
            num_right = count_right(drafts, new)
            self._of_kind[self.draft.kind].note(num_right, num_right + (num_right < len(new)))

    def take(self, end: int, draft: Draft, of_kind: dict[int, Acceptance]) -> None:
        """Takes a new draft; `of_kind` has the acceptance over all sequences."""
        self.end, self.draft = end, draft
        if draft.kind not in self._of_kind:
            known = of_kind.setdefault(draft.kind, Acceptance())
            self._of_kind[draft.kind] = Acceptance(known)
