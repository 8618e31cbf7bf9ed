"""Drives a scheduler without a device: a token is any number, a step is plan and commit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, takewhile

from penstock.engine.execution.geometry import Geometry
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling.memory.page_pool import PagePool
from penstock.engine.scheduling.pace import Pace
from penstock.engine.scheduling.scheduler import Drafts, Scheduler
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.step_plan import Row, StepPlan

PAGE = 4
TOKEN = 7
"""Token that every sequence samples."""


class Harness:
    """Plays the engine's part: one step in flight, tokens by a rule, ends at max_tokens.

    It plays the device's part too: each plan writes into pages and states, and its tokens must find their own
    sequence's there.
    """

    def __init__(
        self,
        *,
        num_pages: int | tuple[int, ...] = 64,  # by kind
        max_num_seqs: int = 4,
        max_batch_tokens: int = 16,
        max_model_len: int = 48,
        max_rows: int | None = None,
        windows: tuple[int | None, ...] = (None,),
        kinds: tuple[int, ...] | None = None,
        decode_steps: int = 1,
        drafts: Drafts | None = None,
        num_states: int = 0,
        state_interval: int = 1,
        prefix_caching: bool = True,
    ) -> None:
        self.pool = PagePool(
            num_pages,
            PAGE,
            windows=windows,
            kinds=kinds,
            prefix_caching=prefix_caching,
            num_states=num_states,
            state_interval=state_interval,
        )
        self.states: dict[int, int] = {}  # slot -> hash of the tokens behind which its state is
        # kind, page and place -> group, hash of the tokens so far
        self.memory: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.max_model_len = self.pool.needs.longest(self.pool.available, max_model_len)
        self.pace = Pace(decode_steps={max_num_seqs: decode_steps})
        self.max_batch_tokens = max_batch_tokens
        self.geometry = Geometry(max_num_seqs, max_batch_tokens, self.max_model_len, PAGE, 100, has_states=True)
        self.max_rows = max_rows or max_num_seqs
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            max_model_len=self.max_model_len,
            max_rows=max_rows,
        )
        self.drafts = drafts
        self.sequences: list[Sequence] = []
        self.in_flight: StepPlan | None = None
        self.finished: list[Sequence] = []
        self.num_generated = 0
        self.fails: Callable[[StepPlan], bool] = lambda plan: False

    def add(
        self,
        num_prompt: int,
        max_tokens: int = 4,
        *,
        priority: int = 0,
        first_token: int = 0,
        prompt_logprobs: int | None = None,
    ) -> Sequence:
        arrival = len(self.sequences)
        prompt = tuple(range(first_token, first_token + num_prompt))
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        request = Request(f"r{arrival}", prompt, params, priority=priority)
        self.sequences.append(Sequence(request, 0, arrival))
        self.scheduler.add(self.sequences[-1])
        return self.sequences[-1]

    def step(self) -> StepPlan | None:
        if self.drafts is not None and self.in_flight is not None:  # their tokens have to be known
            last, self.in_flight = self.in_flight, None
            self.settle(last, None)
        plan = self.scheduler.plan(self.pace, self.drafts)
        if plan is not None:
            self.check_plan(plan)
            self.compute(plan)
        before, self.in_flight = self.in_flight, plan
        if before is not None:
            self.settle(before, plan)
        self.scheduler.check()
        return plan

    def settle(self, last: StepPlan, following: StepPlan | None) -> None:
        if self.fails(last):
            self.recover(last, following)
            return
        for _ in range(last.num_steps):
            for row in last.rows:
                if not row.sequence.is_finished:
                    self.commit(row)

    def compute(self, plan: StepPlan) -> None:
        """Has all rows write before one reads, as on the device."""
        for row in plan.rows:
            beginnings = self.beginnings(row)
            for position in self.positions(row):
                for group, pages in enumerate(row.sequence.pages.groups):
                    kind, page = self.pool.needs.kinds[group], pages[position // PAGE]
                    assert self.pool.stores[kind].references[page] == 1, "others read it"
                    self.memory[kind, page, position % PAGE] = group, beginnings[position]
        for row in plan.rows:
            self.read(row, self.beginnings(row))
        if self.pool.states.num_slots:
            self.compute_states(plan)

    def compute_states(self, plan: StepPlan) -> None:
        writes = [slot for row in plan.rows for _, slot in row.states.writes]
        assert len(set(writes)) == len(writes), "a slot is written twice"
        if plan.num_steps == 1:
            assert len(writes) <= self.geometry.state_writes(plan.num_tokens)
        assert 0 not in writes
        for row in plan.rows:
            if row.start:
                assert self.states[row.states.read] == self.beginnings(row)[row.start - 1], "another state"
            others = {slot for row_ in plan.rows if row_ is not row for _, slot in row_.states.writes}
            assert row.states.read not in others, "written by another row of the step"
        for row in plan.rows:
            beginnings, last = self.beginnings(row), 0
            assert row.states.writes[-1][0] == len(self.positions(row))
            for num_tokens, slot in row.states.writes:
                assert num_tokens > last
                last = num_tokens
                self.states[slot] = beginnings[row.start + num_tokens - 1]

    def read(self, row: Row, beginnings: list[int]) -> None:
        for position in self.positions(row):
            for group, (pages, window) in enumerate(
                zip(row.sequence.pages.groups, self.pool.needs.windows, strict=True)
            ):
                kind = self.pool.needs.kinds[group]
                for key in range(0 if window is None else max(0, position - window + 1), position + 1):
                    assert self.memory[kind, pages[key // PAGE], key % PAGE] == (group, beginnings[key])

    def positions(self, row: Row) -> range:
        return range(row.start, row.start + row.num_tokens + max(0, row.num_sampled - 1))

    def beginnings(self, row: Row) -> list[int]:
        """Returns for each token a hash of the tokens up to it, tokens that the running plan samples included."""
        end = self.positions(row).stop
        tokens = [*row.sequence.token_ids, *row.drafts]
        tokens += [TOKEN] * (end - len(tokens))
        return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=0))[1:]

    def commit(self, row: Row) -> None:
        if row.num_scored:  # nothing is left out
            assert row.start <= row.sequence.num_scored
        self.scheduler.commit(row, TOKEN if row.num_sampled else None)
        assert not (row.num_sampled and row.sequence.num_unscored)
        self.num_generated += bool(row.num_sampled)
        for _ in takewhile(lambda draft: draft == TOKEN, row.drafts):
            assert not self.is_full(row.sequence), "a draft behind the last token"
            self.scheduler.commit(row, TOKEN, is_behind_draft=True)
            self.num_generated += 1
        if row.num_sampled and self.is_full(row.sequence):
            self.finish(row.sequence)

    def recover(self, blamed: StepPlan, lost: StepPlan | None) -> None:
        self.in_flight = None
        self.memory.clear()
        self.states.clear()
        self.scheduler.roll_back(blamed, lost)
        if len(blamed.rows) == 1 and not blamed.rows[0].sequence.is_finished:
            self.finish(blamed.rows[0].sequence)

    def finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.finished.append(sequence)

    def is_full(self, sequence: Sequence) -> bool:
        generated = len(sequence.token_ids) - sequence.num_prompt
        return generated >= sequence.request.sampling.max_tokens or len(sequence.token_ids) >= self.max_model_len

    def check_plan(self, plan: StepPlan) -> None:
        assert 0 < plan.num_tokens <= self.max_batch_tokens
        assert plan.num_tokens == sum(row.num_tokens for row in plan.rows)
        assert len({row.sequence for row in plan.rows}) == len(plan.rows)
        assert len({row.sequence.batch_slot for row in plan.rows}) == len(plan.rows)
        assert sum(row.num_scored + row.num_drawn for row in plan.rows) <= self.max_rows
        for row in plan.rows:
            assert 0 <= row.num_scored <= row.num_tokens - bool(row.num_sampled)
            assert row.num_tokens - row.num_known - len(row.drafts) in (0, 1)
            assert not row.drafts or row.num_known == 1
            assert row.sequence.pages
            assert not row.sequence.is_finished

    def run_for(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def run(self, limit: int = 2000) -> int:
        """Runs steps until all is done; returns their number."""
        for count in range(limit):
            if self.step() is None and self.in_flight is None and not self.scheduler.waiting:
                return count
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.running} {self.scheduler.waiting}")
