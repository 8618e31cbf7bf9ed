"""Decides what each step computes. Plain Python, no device: the same calls give the same plans."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from penstock.engine.length_rule import LengthRule
from penstock.engine.scheduling.admission import Admission
from penstock.engine.scheduling.memory.amounts import NOTHING
from penstock.engine.scheduling.memory.page_pool import PagePool
from penstock.engine.scheduling.pace import Pace, PromptBudget
from penstock.engine.scheduling.sequence import Sequence, SequenceFailed
from penstock.engine.scheduling.sequence_pages import SequencePages
from penstock.engine.scheduling.sharing import shares
from penstock.engine.scheduling.step_plan import Row, StepPlan, row_of

UNPACED = Pace()


class Drafts(Protocol):
    """Source of guesses at how sequences continue."""

    def propose(self, sequences: Collection[Sequence], pace: Pace, room: int) -> dict[Sequence, tuple[int, ...]]:
        """Returns draft tokens for some of these sequences, `room` in total, if that pays.

        Raises:
            SequenceFailed: drafting failed for one of them.
        """


class Scheduler:
    """Token-budget scheduling over a page pool.

    There are no phases: each sequence has `num_computed` tokens chasing `num_tokens`. A step gives each decoding
    sequence a token, then hands the rest of its budget to prompts in order of (priority, arrival). Shorter prompts of
    the same priority get up to half of it (`shares`). A sequence that runs out of pages preempts the last in that
    order; a preempted sequence keeps its tokens and is recomputed later. Smaller prompts may pass one whose pages are
    not available, until `Admission` stops them. A sequence that outgrows the rotary frequencies of its keys, by the
    model's length rule, is preempted as well.

    A prompt whose log-probabilities are wanted takes a row of the head for each of its tokens, out of the rows that the
    step's sequences leave free.

    Sequences of a failed step are suspects: each then runs alone until a step of its own has succeeded.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_batch_tokens: int,
        max_model_len: int,
        max_rows: int | None = None,  # head rows; None: one per sequence
        length_rule: LengthRule | None = None,
    ) -> None:
        self._pool = pool
        self._pages = SequencePages(pool, max_batch_tokens)
        self._max_num_seqs = max_num_seqs
        self._max_batch_tokens = max_batch_tokens
        self._max_model_len = max_model_len
        self._max_rows = max_rows or max_num_seqs
        self._length_rule = length_rule
        self._waiting: list[Sequence] = []  # ordered by rank
        self._running: list[Sequence] = []  # ordered by rank; exactly those that hold a batch slot
        self._suspects: set[Sequence] = set()
        self._free_batch_slots = list(range(max_num_seqs))
        self.num_preemptions = 0
        self.num_queried_tokens = 0  # looked up in the prefix cache for sequences that then started
        self.num_found_tokens = 0  # tokens found among them

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    @property
    def num_available_pages(self) -> int:
        """Free pages of all kinds, and pages that only the prefix cache holds."""
        return self._pool.num_available

    def add(self, sequence: Sequence) -> None:
        sequence.max_tokens = min(sequence.num_prompt + sequence.request.sampling.max_tokens, self._max_model_len)
        insort(self._waiting, sequence, key=_rank)

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence, running or waiting. Its pages are free for the next plan."""
        if sequence.is_finished:
            return
        sequence.is_finished = True
        self._clear(sequence)
        if sequence.batch_slot >= 0:
            self._running.remove(sequence)
            self._release(sequence)
        else:
            self._waiting.remove(sequence)

    def plan(self, pace: Pace = UNPACED, drafts: Drafts | None = None) -> StepPlan | None:
        """Returns the next step, or None if there is nothing to compute. Counts its tokens as computed, except drafts.

        If all sequences are decoding, the step verifies what `drafts` proposes. Without drafts, and if nobody waits, it
        holds as many decode steps as `pace` allows.

        Raises:
            SequenceFailed: call `finish` for that sequence, and plan again.
        """
        chosen = {}
        if self._suspects:
            chosen = self._choose(min(self._suspects, key=_rank), pace)
        if not chosen:
            chosen = self._choose(None, pace)
        if not chosen:
            return None
        drafted = {} if drafts is None else self._draft(chosen, pace, drafts)
        num_steps = 1 if drafted else self._num_steps(chosen, pace.max_steps(len(chosen)))
        rows = tuple(
            row_of(sequence, count, self._num_sampled(sequence, num_steps), drafted.get(sequence, ()))
            for sequence, count in chosen.items()
        )
        for row in rows:
            row.sequence.num_computed += row.num_tokens - len(row.drafts) + max(0, row.num_sampled - 1)
            row.sequence.num_in_flight += row.num_sampled
        rows = self._pages.route(rows)
        return StepPlan(rows, sum(row.num_tokens for row in rows), num_steps)

    def commit(self, row: Row, token_id: int | None, *, is_behind_draft: bool = False) -> None:
        """Appends the token that a row sampled; None if it sampled none.

        Call it once for each row of each step of a plan, in order, unless its sequence has finished meanwhile. Then
        call it once for each accepted draft of the row, with `is_behind_draft` and the token sampled after that draft.

        A sequence that was preempted meanwhile takes its token like all others: it was computed from valid pages, and
        is part of what will be recomputed.
        """
        sequence = row.sequence
        if token_id is not None:
            sequence.token_ids.append(token_id)
            if not is_behind_draft:
                sequence.num_in_flight -= 1
            elif sequence.batch_slot >= 0:  # a draft's keys and values count from here on, unless they are gone
                sequence.num_computed += 1
        if row.num_scored:
            sequence.num_scored = max(sequence.num_scored, row.start + row.num_scored)
        self._clear(sequence)
        self._pages.index_full(sequence)

    def roll_back(self, blamed: StepPlan, lost: StepPlan | None) -> None:
        """Undoes everything uncommitted and drops the cache's content: every sequence is recomputed.

        The sequences of `blamed`, the failed step, become suspects; those of `lost`, the next step, do not.
        """
        for plan in (blamed, lost):
            for row in plan.rows if plan is not None else ():
                row.sequence.num_in_flight = 0
        for row in blamed.rows:
            if not row.sequence.is_finished:
                row.sequence.is_suspect = True
                self._suspects.add(row.sequence)
        for sequence in list(self._running):
            self._preempt(sequence)
        self._pool.forget_contents()

    def check(self) -> None:
        """Checks that pages and sequences agree.

        Raises:
            AssertionError: an invariant does not hold.
        """
        self._pages.check(self._running)
        if any(sequence.pages or sequence.states.held or sequence.batch_slot >= 0 for sequence in self._waiting):
            raise AssertionError("a waiting sequence holds pages, states or a batch slot")
        batch_slots = sorted([*self._free_batch_slots, *(sequence.batch_slot for sequence in self._running)])
        if batch_slots != list(range(self._max_num_seqs)):
            raise AssertionError(f"batch slots of running sequences and free ones are {batch_slots}")
        if len(self._running) > self._max_num_seqs:
            raise AssertionError(f"{len(self._running)} sequences run, the limit is {self._max_num_seqs}")

    def _choose(self, suspect: Sequence | None, pace: Pace) -> dict[Sequence, int]:
        """Returns how many tokens each chosen sequence computes; pages for them are held on return."""
        if suspect is not None:
            running = [suspect] if suspect.batch_slot >= 0 else []
        else:
            running = [sequence for sequence in self._running if not sequence.is_suspect]
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in running:
            num_tokens = sequence.num_tokens
            num_pending = num_tokens - sequence.num_computed
            # Skip it if the token in flight is its last allowed one.
            if num_pending and not (sequence.num_in_flight and num_tokens >= sequence.max_tokens):
                (decoding if num_pending == 1 else prefilling).append(sequence)
        num_waiting = len(self._waiting) if suspect is None else 1 - len(running)
        prompts = pace.prompt_budget((sequence.num_tokens for sequence in decoding), len(prefilling) + num_waiting)
        # Each sequence keeps one row for the token that it may sample.
        prompts.num_free_rows = self._max_rows - len(decoding) - len(prefilling)
        chosen: dict[Sequence, int] = {}
        budget = self._continue_all(decoding, chosen, self._max_batch_tokens, prompts)
        if suspect is None and prefilling:
            budget = self._share(prefilling, chosen, budget, prompts)
        budget = self._continue_all(prefilling, chosen, budget, prompts)
        self._admit_waiting(suspect, chosen, budget, prompts)
        return chosen

    def _share(
        self, prefilling: list[Sequence], chosen: dict[Sequence, int], budget: int, prompts: PromptBudget
    ) -> int:
        """Chooses prompts that go before the first running one. Returns the rest of the budget.

        The first one keeps half of what it could compute alone, in tokens and in time for its attention.
        """
        first = prefilling[0]
        limit = prompts.tokens(first.num_computed)
        most = budget if limit is None else min(budget, limit)
        floor = min(first.num_pending, most - most // 2)
        shared = shares(prefilling, self._waiting, budget, floor, self._pool.page_size)
        if not shared:
            return budget
        running = [sequence for sequence in shared if sequence.batch_slot >= 0]
        with prompts.reserved(floor, first.num_computed):
            budget = self._continue_all(running, chosen, budget, prompts, shared)
            return self._admit_waiting(None, chosen, budget, prompts, shared)

    def _continue_all(
        self,
        running: Iterable[Sequence],
        chosen: dict[Sequence, int],
        budget: int,
        prompts: PromptBudget,
        shared: Mapping[Sequence, int] | None = None,
    ) -> int:
        """Continues running sequences that are not chosen yet, each within its share. Returns the remaining budget."""
        for sequence in running:
            if sequence in chosen:
                continue
            most = budget if shared is None else min(budget, shared[sequence])
            try:
                budget -= self._continue(sequence, chosen, most, prompts)
            except Exception as error:
                raise SequenceFailed(sequence) from error
        return budget

    def _admit_waiting(
        self,
        suspect: Sequence | None,
        chosen: dict[Sequence, int],
        budget: int,
        prompts: PromptBudget,
        shared: Mapping[Sequence, int] | None = None,
    ) -> int:
        """Starts and chooses waiting sequences: `suspect` alone, those with a share, or all in order of rank.

        Returns the rest of the budget.
        """
        waiting = [sequence for sequence in self._waiting if suspect in (None, sequence)]
        if shared is not None:
            last = max((sequence.rank for sequence in waiting if sequence in shared), default=None)
            waiting = [] if last is None else [sequence for sequence in waiting if sequence.rank <= last]
        if not waiting or not self._has_place(budget, prompts):
            return budget
        admission = Admission(self._pages, self._running)
        for sequence in waiting:
            if not self._has_place(budget, prompts) or admission.is_closed:
                break
            if sequence.num_in_flight:  # its token arrives with the next step; until then others may not pass it
                break
            most = budget if shared is None else min(budget, shared.get(sequence, 0))
            try:
                sequence.rotate_for(self._rope_length(sequence))
                # A suspect runs alone or not at all.
                if not most or (sequence.is_suspect and sequence is not suspect):
                    admission.leave(sequence)
                    continue
                count = self._admit(sequence, admission, most, prompts)
            except Exception as error:
                raise SequenceFailed(sequence) from error
            if count == 0:
                break
            if count is not None:
                chosen[sequence] = count
                budget -= count
        return budget

    def _has_place(self, budget: int, prompts: PromptBudget) -> bool:
        """Whether the step has room for another sequence, pages aside."""
        return bool(budget and prompts.num_free_rows) and len(self._running) < self._max_num_seqs

    def _continue(self, sequence: Sequence, chosen: dict[Sequence, int], budget: int, prompts: PromptBudget) -> int:
        """Chooses a running sequence if it gets pages. Returns the budget that this takes.

        The result is negative if it preempted sequences that had been chosen.
        """
        count = _chunk(sequence, budget, prompts) if sequence.num_pending > 1 else min(1, budget)
        if sequence.batch_slot < 0 or not count:  # without a batch slot: just preempted
            return 0
        if self._rope_length(sequence) != sequence.rope_length:
            self._preempt(sequence)
            return 0
        returned = 0
        if sequence.pages.num_places * self._pool.page_size < sequence.num_computed + count:
            returned = self._hold_pages(sequence, sequence.num_computed + count, chosen)
            if sequence.batch_slot < 0:
                return -returned
            count = min(count, self._pages.capacity(sequence) - sequence.num_computed)
        chosen[sequence] = count
        return count - returned

    def _draft(self, chosen: dict[Sequence, int], pace: Pace, drafts: Drafts) -> dict[Sequence, tuple[int, ...]]:
        """Returns drafts for chosen sequences, if their newest tokens are all known; pages for them are held on return.

        Nobody is preempted for drafts.
        """
        room = min(self._max_rows, self._max_batch_tokens) - len(chosen)
        if room <= 0 or any(sequence.num_pending > 1 or sequence.num_in_flight for sequence in chosen):
            return {}
        proposed = drafts.propose(chosen, pace, room)
        return {sequence: some for sequence, tokens in proposed.items() if (some := self._verifiable(sequence, tokens))}

    def _verifiable(self, sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the first drafts, as many as get memory and as the sequence's length limit allows."""
        return drafts[: self._pages.hold_for_drafts(sequence, self._num_sampled(sequence, 1 + len(drafts)) - 1)]

    def _num_steps(self, chosen: dict[Sequence, int], max_steps: int) -> int:
        """Returns how many decode steps one dispatch may hold, 1 or `max_steps`; pages for them are held on return."""
        if max_steps == 1 or self._waiting or self._suspects:
            return 1
        for sequence, count in chosen.items():
            if count > 1 or sequence.num_pending > 1 or sequence.is_constrained:
                return 1
        ends = {s: s.num_computed + self._num_sampled(s, max_steps) for s in chosen}
        growing = [sequence for sequence, num_tokens in ends.items() if self._pages.missing(sequence, num_tokens)]
        for sequence in growing:
            self._pages.let_pass(sequence)
        missing = sum((self._pages.missing(sequence, ends[sequence]) for sequence in growing), NOTHING)
        if not missing.fits(self._pages.available):
            return 1
        for sequence in growing:
            self._pages.extend(sequence, ends[sequence])
        return max_steps

    def _num_sampled(self, sequence: Sequence, num_steps: int) -> int:
        """Returns how many tokens a chosen sequence samples in `num_steps`, if it reaches its end in the first."""
        if self._length_rule is not None and self._length_rule.switches and not sequence.rope_length:
            num_steps = min(num_steps, self._length_rule.original + 1 - sequence.num_tokens)
        return min(num_steps, sequence.max_tokens - sequence.num_tokens)

    def _rope_length(self, sequence: Sequence) -> int:
        """Returns the length that a sequence's rotary frequencies depend on from now on."""
        rule = self._length_rule
        return 0 if rule is None else rule.rope_length(sequence.num_prompt, sequence.num_tokens)

    def _hold_pages(self, sequence: Sequence, num_tokens: int, chosen: dict[Sequence, int]) -> int:
        """Gives `sequence` pages for its first `num_tokens` tokens. To do so, it preempts sequences from the back of
        the running ones, and at last `sequence` itself.

        A lone sequence gets what is available: pages that its windows will move past are not free yet.

        Returns how many tokens of budget the preempted sequences gave back.
        """
        self._pages.let_pass(sequence)
        returned = 0
        while not self._pages.missing(sequence, num_tokens).fits(self._pages.available):
            if len(self._running) == 1 and self._pages.reach(sequence) > sequence.num_computed:
                num_tokens = self._pages.reach(sequence)
                break
            victim = self._running[-1]
            self._preempt(victim)
            returned += chosen.pop(victim, 0)
            if victim is sequence:
                return returned
        self._pages.extend(sequence, num_tokens)
        return returned

    def _admit(self, sequence: Sequence, admission: Admission, budget: int, prompts: PromptBudget) -> int | None:
        """Starts a waiting sequence. Returns its tokens in this step, 0 if the budget is short, None if pages are."""
        lookup = admission.find(sequence)
        if lookup is None:
            return None
        if prompts.tokens(len(lookup.prefix[0]) * self._pool.page_size) == 0:
            return 0
        prompts.num_free_rows -= 1
        self._start(sequence, lookup.prefix)
        count = min(_chunk(sequence, budget, prompts), self._pages.reach(sequence) - sequence.num_computed)
        self._pages.extend(sequence, sequence.num_computed + count)
        admission.started(sequence, lookup.num_pages)
        return count

    def _start(self, sequence: Sequence, cached: list[list[int]]) -> None:
        self._waiting.remove(sequence)
        insort(self._running, sequence, key=_rank)
        sequence.batch_slot = self._free_batch_slots.pop()
        sequence.num_starts += 1
        self._pages.start(sequence, cached)
        self.num_queried_tokens += sequence.num_tokens
        self.num_found_tokens += sequence.num_computed
        sequence.num_cached = max(sequence.num_cached, min(sequence.num_computed, sequence.num_prompt))

    def _clear(self, sequence: Sequence) -> None:
        if sequence.is_suspect:
            sequence.is_suspect = False
            self._suspects.discard(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        self.num_preemptions += 1
        self.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._pages.release(sequence)
        self._free_batch_slots.append(sequence.batch_slot)
        sequence.batch_slot = -1


def _chunk(sequence: Sequence, budget: int, prompts: PromptBudget) -> int:
    """Returns how many of a prompt's tokens the step takes; 0 if the budget is spent."""
    context = sequence.num_computed
    limit = prompts.tokens(context, are_scored=sequence.num_unscored > 0)
    count = min(sequence.num_pending, budget if limit is None else min(budget, limit))
    if sequence.num_unscored:  # each of its tokens takes a row; it already has one
        count = min(count, prompts.num_free_rows + 1)
        prompts.num_free_rows -= max(0, count - 1)
    prompts.take(count, context)
    return count


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank
