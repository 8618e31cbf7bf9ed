"""The engine: requests in, tokens and text out, one step at a time."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock.engine.arithmetic import arithmetic_of
from penstock.engine.choice import ChoiceState, Ending, NewChoices, output_of, prefill_output_of
from penstock.engine.config import EngineConfig
from penstock.engine.deployment.cache_sizes import sized
from penstock.engine.deployment.deployment import Deployment
from penstock.engine.deployment.opening import open_model
from penstock.engine.deployment.quickest import with_loops
from penstock.engine.errors import ConfigError, InvalidRequest, failure_message
from penstock.engine.execution.dispatched import Dispatched, DrawnTokens, StepFailed
from penstock.engine.execution.grammar_drafts import GrammarDrafts
from penstock.engine.execution.kept_steps import KeptSteps
from penstock.engine.execution.packing import BatchBuilder
from penstock.engine.execution.runner import Runner
from penstock.engine.execution.sampling.masks import MaskBuilder
from penstock.engine.execution.sampling_rows import NOT_A_TOKEN, NOTHING_LEFT
from penstock.engine.execution.step_memory import StepMemory
from penstock.engine.execution.warm_up import warm_up
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.limits import EngineLimits
from penstock.engine.models import Decoder
from penstock.engine.progress import ReportProgress
from penstock.engine.request import FinishReason, Output, Request, TokenLogprob
from penstock.engine.scheduling.pace import Pace
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.sequence import Sequence, SequenceFailed
from penstock.engine.scheduling.slack import StepClock, foretold_s
from penstock.engine.scheduling.step_plan import Row, StepPlan
from penstock.engine.speculation.drafter import Drafter
from penstock.engine.speculation.ngrams import NgramDrafter
from penstock.engine.speculation.speculation import Speculation
from penstock.engine.stats import DeviceMemory, EngineInfo, EngineStats, KindStats
from penstock.engine.structured import GrammarCompiler, GrammarFailed
from penstock.engine.text.response.reading.delta import NOTHING, Delta
from penstock.engine.text.tokenizer import Tokenizer
from penstock.engine.text.vocabulary import vocabulary_of

_NO_TOKEN = {
    NOT_A_TOKEN: "the model's logits are not finite",
    NOTHING_LEFT: "no token is left to sample: the request forbids each one that the model gives a chance",
}


class Engine:
    """Continuous batching over one model. One thread at a time may use it; any thread may call `check`.

    A step dispatches the next plan before it reads what the last one sampled, so that the device never waits for the
    host. A sequence that turns out to have finished costs one discarded row.

    An exception while a request is added, or while one of its sequences is planned, committed or detokenized, ends that
    request or sequence alone. An exception in a dispatch, packing included, makes all of its sequences suspects until
    each has run alone (`_recover`). Elsewhere no request is to blame: page and batch slot accounting, the pace, or a
    device that cannot allocate a new cache. Such an exception propagates out of `step` and ends the engine.
    """

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer, defaults: GenerationDefaults, deployment: Deployment
    ) -> None:
        """Builds an engine around `model`, laid out and with its weights packed as `deployment` says.

        Raises:
            ConfigError: the model's blocks do not fit the attention implementation, or no pages fit.
        """
        self._deployment = deployment
        config = deployment.config
        _check_layout(model, deployment)
        self.tokenizer = tokenizer
        self.defaults = defaults = defaults.within(model.config.vocab_size)
        self.grammars = GrammarCompiler(
            partial(vocabulary_of, tokenizer, model.config.vocab_size, defaults.eos_token_ids)
        )
        spec = sized(deployment)
        is_invariant = deployment.attention.name == "native" and model.is_native
        info = replace(deployment.describe(spec), batch_invariant=is_invariant)
        self._info = replace(info, arithmetic=arithmetic_of(info, config))
        self._limits = EngineLimits(
            model.config.vocab_size, self._info.max_model_len, config.max_num_seqs, defaults.eos_token_ids
        )
        geometry = deployment.geometry(self.max_model_len)
        self._pool = deployment.page_pool(spec)
        self._scheduler = Scheduler(
            self._pool,
            max_num_seqs=config.max_num_seqs,
            max_batch_tokens=config.max_batch_tokens,
            max_model_len=self.max_model_len,
            max_rows=geometry.max_rows,
            length_rule=deployment.length_rule,
        )
        self._builder = BatchBuilder(geometry, defaults.eos_token_ids)
        self._masks = MaskBuilder(model.config.vocab_size, defaults.eos_token_ids)
        kept_facts = (deployment.model, self._info, geometry, replace(config, compile_cache_dir=None))
        kept = KeptSteps(config.compile_cache_dir, *kept_facts)
        self._runner = Runner(model, deployment.attention, spec, geometry, deployment.placement, kept)
        self._decode_steps = deployment.decode_steps(is_invariant=is_invariant)  # None: to be measured
        self._prefill_share = config.prefill_share
        self._step_memory = StepMemory(config.compile_cache_dir, *kept_facts)
        self._pace = Pace(decode_steps=dict.fromkeys(geometry.row_buckets, self._decode_steps or 1))
        self._clock = StepClock()
        self._max_draft_tokens = config.max_draft_tokens
        self.speculate(NgramDrafter() if config.speculation == "ngram" else None)
        self._new_choices = NewChoices(tokenizer, defaults.eos_token_ids, self.max_model_len)
        self._choices: dict[Sequence, ChoiceState] = {}  # unfinished
        self._sequences: dict[str, list[Sequence]] = {}  # unfinished, by request
        self._arrivals = itertools.count()
        self._early_outputs: list[Output] = []  # endings that no step produced
        self._in_flight: Dispatched | None = None
        self._totals: Counter[str] = Counter()

    @classmethod
    def from_checkpoint(
        cls, model: str | Path, config: EngineConfig | None = None, progress: ReportProgress | None = None
    ) -> Engine:
        """Loads a local directory or hub id in Hugging Face format, or a GGUF file. Nothing is compiled yet.

        Raises:
            CheckpointError: files are missing or do not hold what they should.
            ConfigError: the model or a setting is not supported.
        """
        return cls(*open_model(model, config or EngineConfig(), progress))

    def warm_up(self, progress: ReportProgress | None = None) -> None:
        """Compiles all shapes and measures them. Without it, each shape compiles on first use."""
        with contextlib.suppress(Exception):  # the first grammar raises it again; other requests don't need it
            self.grammars.prepare()
        self._pace = warm_up(
            self._runner,
            progress,
            decode_steps=self._decode_steps,
            prefill_share=self._prefill_share,
            memory=self._step_memory,
        )
        if self._decode_steps is None:
            self._info = with_loops(self._info, self._pace.decode_steps, self._deployment.config)

    def settle(self) -> None:
        """Waits until weights and KV cache have been moved to huge pages. Benchmarks need this; requests do not."""
        self._runner.move_to_huge_pages(wait=True)

    def speculate(self, drafter: Drafter | None) -> None:
        """Sets the drafter; None turns speculation off. It changes how soon tokens come, not which ones."""
        if drafter is None:
            self._speculation: Speculation | None = None
            return
        self._speculation = Speculation(
            drafter,
            GrammarDrafts(self._masks).within,
            max_tokens=self._max_draft_tokens,
            max_rows=self._runner.geometry.max_rows,
            vocab_size=self._info.vocab_size,
            eos_token_ids=self.defaults.eos_token_ids,
            clock=self._clock,
        )

    @property
    def max_num_seqs(self) -> int:
        return self._limits.max_num_seqs

    @property
    def max_model_len(self) -> int:
        """Most prompt and generated tokens of one sequence."""
        return self._limits.max_model_len

    def describe(self) -> EngineInfo:
        return self._info

    def device_memory(self) -> tuple[DeviceMemory, ...]:
        """Returns the memory of each device whose runtime counts it; none on CPU. Any thread may call this."""
        return self._deployment.device_memory()

    def check(self, request: Request) -> None:
        """Raises RequestError if `request` can never be served. Any thread may call this."""
        self._limits.check(request)

    def add(self, request: Request) -> None:
        """Queues `request`. If this raises, the engine keeps nothing of it.

        Raises:
            RequestError: `check` raises it, or the id is in use.
        """
        self.check(request)
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """Queues a request that passed `check`.

        Raises:
            InvalidRequest: its id is in use.
        """
        if request.id in self._sequences:
            raise InvalidRequest(f"a request with id {request.id!r} is running already")
        choices: dict[Sequence, ChoiceState] = {}
        ended: list[tuple[Sequence, Ending]] = []  # ended by tokens of an earlier run
        for index in range(request.n):
            sequence = Sequence(request, index, next(self._arrivals))
            choices[sequence] = self._new_choices.of(sequence)
            ending = choices[sequence].replay()
            if ending is not None:
                ended.append((sequence, ending))
        # Nothing below raises: a request is queued with all its choices or, if the code above raised, not at all.
        self._choices |= choices
        self._sequences[request.id] = list(choices)
        self._totals["prompt_tokens"] += len(request.prompt_token_ids)
        for sequence in choices:
            self._scheduler.add(sequence)
        for sequence, ending in ended:  # its text went out with its last token
            self._early_outputs.append(self._end(sequence, ending, NOTHING))

    def abort(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        """Ends the unfinished choices of a request; the next step reports them. Ignores an unknown id."""
        for sequence in list(self._sequences.get(request_id, ())):
            self._early_outputs.append(self._cut_short(sequence, Ending(reason)))

    def has_work(self) -> bool:
        return bool(self._choices or self._early_outputs or self._in_flight)

    def slack_s(self) -> float:
        """Returns the seconds that `step` may wait for more requests while the device is busy, delaying none."""
        return self._clock.slack_s()

    def step(self) -> list[Output]:
        """Plans and dispatches the next step, then commits the one before, or first if drafts depend on it.

        If a grammar constrains a row of the next step, its tokens depend on those of the step before. These are read
        while the device computes up to the head, which then gets its masks. Text and outputs come after that.
        """
        outputs: list[Output] = []
        plan = None
        try:
            if self._has_to_know():
                outputs += self._commit(self._take_in_flight())
            self._clock.begin(is_idle=self._in_flight is None)
            plan = self._plan()
            outputs += self._take_early_outputs()
            self._dispatch_and_commit_last(plan, outputs)
        except StepFailed as failure:
            outputs += self._recover(failure, lost=plan)
        return outputs + self._end_by_grammar()

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_pages=self._pool.num_pages - len(self._pool.stores),
            num_free_pages=self._pool.num_free,
            num_cached_pages=self._pool.num_cached,
            kinds=tuple(
                KindStats(store.num_pages - 1, len(store.free), len(store.cached)) for store in self._pool.stores
            ),
            num_state_slots=max(0, self._pool.states.num_slots - 1),
            num_free_state_slots=self._pool.states.num_free,
            num_cached_state_slots=self._pool.states.num_cached,
            prefix_queries_total=self._scheduler.num_queried_tokens,
            prefix_hits_total=self._scheduler.num_found_tokens,
            preemptions_total=self._scheduler.num_preemptions,
            compiles_after_warmup_total=self._runner.compiles_after_warmup,
            **{f"{name}_total": total for name, total in self._totals.items()},
        )

    def _plan(self) -> StepPlan | None:
        while True:
            try:
                return self._scheduler.plan(self._pace, self._speculation)
            except SequenceFailed as failure:
                self._give_up(failure)

    def _has_to_know(self) -> bool:
        """Whether the next step must, or should, wait for the tokens in flight before it is planned."""
        if self._speculation is None or self._in_flight is None:
            return False
        try:
            return self._speculation.has_to_know(self._in_flight.plan, self._pace)
        except SequenceFailed as failure:
            self._give_up(failure)
            return True

    def _give_up(self, failure: SequenceFailed) -> None:
        error = failure.__cause__ if isinstance(failure.__cause__, Exception) else failure
        self._early_outputs.append(self._fail(failure.sequence, error))

    def _take_early_outputs(self) -> list[Output]:
        outputs, self._early_outputs = self._early_outputs, []
        return outputs

    def _take_in_flight(self) -> Dispatched | None:
        last, self._in_flight = self._in_flight, None
        return last

    def _dispatch_and_commit_last(self, plan: StepPlan | None, outputs: list[Output]) -> None:
        """Appends the outputs of the step before, even if the next one cannot be dispatched."""
        last = self._take_in_flight()
        try:
            self._in_flight = self._dispatch(plan, last)
        finally:
            outputs += self._commit(last)

    def _dispatch(self, plan: StepPlan | None, last: Dispatched | None) -> Dispatched | None:
        if plan is None:
            return None
        self._totals["steps"] += 1
        try:
            batch = self._builder.build(plan)
            if not plan.is_constrained:
                in_flight = self._runner.dispatch(batch)
                self._clock.dispatched(foretold_s(plan, self._pace))
                return Dispatched(plan, in_flight)
            self._clock.dispatched(None)
            started = self._runner.start(batch)
            newest = {} if last is None else last.newest()
            return Dispatched(plan, self._runner.finish(started, self._masks.build(plan, newest)))
        except StepFailed:  # the last step failed: the head of this one never runs
            raise
        except Exception as error:
            raise StepFailed(plan) from error

    def _commit(self, last: Dispatched | None) -> list[Output]:
        """Waits for a step and commits it. If it failed, the next step, which it feeds, is lost but not to blame."""
        if last is None:
            return []
        try:
            last.results()
        finally:
            self._clock.ended()
        outputs: list[Output] = []
        for drawn in last.drawn():
            if not drawn.row.sequence.is_finished:
                self._commit_row(drawn, outputs)
        self._clock.committed()
        return outputs

    def _end_by_grammar(self) -> list[Output]:
        """Ends the sequences whose grammars allow nothing more, after their tokens are committed."""
        ended = self._masks.take_ended()
        return [self._end_one_by_grammar(sequence, why) for sequence, why in ended if not sequence.is_finished]

    def _end_one_by_grammar(self, sequence: Sequence, failure: GrammarFailed | None) -> Output:
        if failure is not None:
            return self._cut_short(sequence, Ending("error", error=str(failure), cause=failure))
        try:
            delta, ending = self._choices[sequence].complete()
        except Exception as error:
            return self._fail(sequence, error)
        return self._end(sequence, ending, delta)

    def _commit_row(self, drawn: DrawnTokens, outputs: list[Output]) -> None:
        row, token_ids, place, logprobs = drawn
        sequence = row.sequence
        num_known = len(sequence.token_ids)
        try:
            if token_ids and token_ids[0] < 0:
                outputs.append(self._cut_short(sequence, Ending("error", error=_NO_TOKEN[token_ids[0]])))
                return
            if row.num_scored:
                self._choices[sequence].score(row, logprobs, place - row.num_scored)
            if not token_ids:
                self._scheduler.commit(row, None)
                outputs.append(prefill_output_of(row))
            self._count_drafts(row, len(token_ids))
            for behind, token_id in enumerate(token_ids):
                num_known = len(sequence.token_ids)
                self._scheduler.commit(row, token_id, is_behind_draft=behind > 0)
                logprob = self._choices[sequence].logprob(logprobs, place + behind)
                outputs.append(self._advance(sequence, token_id, logprob))
                self._totals["generated_tokens"] += 1
                if sequence.is_finished:
                    return
        except Exception as error:
            del sequence.token_ids[num_known:]  # drops the token that failed
            outputs.append(self._fail(sequence, error))

    def _count_drafts(self, row: Row, num_drawn: int) -> None:
        if row.drafts:
            row.sequence.num_drafted += len(row.drafts)
            row.sequence.num_accepted += num_drawn - 1
            self._totals["drafted_tokens"] += len(row.drafts)
            self._totals["accepted_tokens"] += num_drawn - 1

    def _advance(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> Output:
        """Reads a sequence's newest token; returns its output, which has the ending if it ends the sequence."""
        choice = self._choices[sequence]
        delta, ending = choice.push(token_id)
        if ending is None:
            output = output_of(sequence, delta, (token_id,), logprob)
        else:
            output = self._end(sequence, ending, delta, (token_id,), logprob)
        return choice.with_prompt_logprobs(output)

    def _cut_short(self, sequence: Sequence, ending: Ending) -> Output:
        """Ends a sequence for a reason that is not in its tokens, with the text that was held back."""
        try:
            delta = self._choices[sequence].finish()
        except Exception as failure:
            return self._fail(sequence, failure)
        return self._end(sequence, ending, delta)

    def _fail(self, sequence: Sequence, cause: Exception) -> Output:
        """Ends a sequence after an error on the host. Its text may stop half-way through a token and is not flushed."""
        return self._end(sequence, Ending("error", error=failure_message(cause), cause=cause), NOTHING)

    def _end(
        self,
        sequence: Sequence,
        ending: Ending,
        delta: Delta,
        token_ids: tuple[int, ...] = (),
        logprob: TokenLogprob | None = None,
    ) -> Output:
        self._scheduler.finish(sequence)
        self._masks.forget(sequence)
        if self._speculation is not None:
            self._speculation.forget(sequence)
        choice = self._choices.pop(sequence)
        siblings = self._sequences[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self._sequences[sequence.request.id]
        if sequence.index == 0:  # a prompt counts once, whatever the number of choices
            self._totals["cached_tokens"] += sequence.num_cached
        self._totals["tool_calls_mended"] += choice.num_mended
        return output_of(sequence, delta, token_ids, logprob, ending, choice.num_reasoning)

    def _recover(self, failure: StepFailed, lost: StepPlan | None) -> list[Output]:
        """Recovers from a failed step: all sequences are recomputed; a sequence that failed alone is given up.

        `lost` is the step dispatched last, whose results will not come.
        """
        self._totals["faults"] += 1
        self._in_flight = None
        self._scheduler.roll_back(failure.plan, lost)
        self._runner.reset_cache()
        blamed = failure.plan.rows
        if len(blamed) > 1 or blamed[0].sequence.is_finished:
            return []
        error = failure.__cause__ if isinstance(failure.__cause__, Exception) else failure
        text = f"the step failed: {type(error).__name__}: {error}"
        return [self._cut_short(blamed[0].sequence, Ending("error", error=text, cause=error))]


def _check_layout(model: Decoder, deployment: Deployment) -> None:
    """Checks that the model's blocks are laid out as the attention implementation takes them."""
    if model.is_stacked != deployment.attention.is_stacked:
        needed = "one block per run of layers" if deployment.attention.is_stacked else "one block per layer"
        name = deployment.config.attention
        raise ConfigError(f"attention {name!r} on this platform needs a model with {needed}")
