"""The engine: requests in, tokens and text out, one step at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import jax

from penstock.engine.attention import KVCacheSpec
from penstock.engine.config import EngineConfig
from penstock.engine.deployment import Deployment, deploy, with_pages
from penstock.engine.errors import ConfigError, InvalidRequest, PromptTooLong, failure_message
from penstock.engine.execution.batch import BatchBuilder, stop_ids
from penstock.engine.execution.compilation import keep_compilations
from penstock.engine.execution.runner import InFlight, Progress, Runner
from penstock.engine.execution.sampling import NOT_A_TOKEN, NOTHING_LEFT, Logprobs
from penstock.engine.execution.warm_up import warm_up
from penstock.engine.generation_defaults import GenerationDefaults, read_generation_defaults
from penstock.engine.loading.checkpoint import load_model, read_model_config, resolve
from penstock.engine.models import Decoder, num_parameters
from penstock.engine.models.packed import pack_weights
from penstock.engine.request import MAX_STOP_TOKENS, FinishReason, Output, Request, SamplingParams, TokenLogprob
from penstock.engine.scheduling.pace import Pace
from penstock.engine.scheduling.page_pool import PagePool
from penstock.engine.scheduling.scheduler import Plan, Row, Scheduler, SequenceFailed
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.stats import EngineInfo, EngineStats
from penstock.engine.text.stream import TextStream
from penstock.engine.text.tokenizer import Tokenizer

_DEFAULT_KV_CACHE_BYTES = 2**30
_SHARE_OF_FREE_MEMORY = 0.9

_NO_TOKEN = {
    NOT_A_TOKEN: "the model's logits are not finite",
    NOTHING_LEFT: "no token is left to sample: the request forbids each one that the model gives a chance",
}


@dataclass(frozen=True, slots=True)
class _Choice:
    """What an unfinished sequence has beside its tokens."""

    stream: TextStream
    stop_ids: frozenset[int]


class Engine:
    """Continuous batching over one model. One thread at a time uses it, except for `check`, which any may call.

    A step dispatches the next plan before it reads what the last one sampled, so that the device never waits for the
    host; a sequence that turns out to have finished costs one discarded row.

    What raises while a request is added, or while one of its sequences is planned, committed or turned into text, ends
    that request or sequence alone. A dispatch that raises, packing included, makes all of its sequences suspects, until
    each has run alone (`_recover`). Beyond this border no request is to blame: the counts of pages and lanes, the pace,
    a device that does not even take a new cache. What raises there comes out of `step`, and ends the engine.
    """

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer, defaults: GenerationDefaults, deployment: Deployment
    ) -> None:
        """`model` is laid out, and its weights packed, as `deployment` says.

        Raises:
            ConfigError: its blocks are not those that the attention implementation needs, or no pages fit.
        """
        self._config = config = deployment.config
        self.tokenizer = tokenizer
        self.defaults = defaults
        if model.is_stacked != deployment.attention.is_stacked:
            needed = "one block per run of layers" if deployment.attention.is_stacked else "one block per layer"
            raise ConfigError(f"attention {config.attention!r} on this platform needs a model with {needed}")
        spec = with_pages(deployment, _free_memory_bytes())
        self.max_model_len = min(deployment.max_model_len, (spec.num_pages - 1) * spec.page_size)
        geometry = deployment.geometry(self.max_model_len)
        self._vocab_size = model.config.vocab_size
        self._pool = PagePool(spec.num_pages, spec.page_size, prefix_caching=config.prefix_caching)
        self._scheduler = Scheduler(
            self._pool,
            max_num_seqs=config.max_num_seqs,
            max_batch_tokens=config.max_batch_tokens,
            max_model_len=self.max_model_len,
        )
        self._builder = BatchBuilder(geometry, defaults.eos_token_ids)
        self._runner = Runner(model, deployment.attention, spec, geometry, deployment.placement)
        self._decode_steps = deployment.decode_steps  # None: to be measured
        self._pace = Pace(decode_steps=dict.fromkeys(geometry.row_buckets, self._decode_steps or 1))
        self._choices: dict[Sequence, _Choice] = {}  # unfinished
        self._sequences: dict[str, list[Sequence]] = {}  # unfinished, by request
        self._arrivals = itertools.count()
        self._early_outputs: list[Output] = []  # ends that no step produced
        self._in_flight: tuple[Plan, InFlight] | None = None
        self._info = _info(deployment, spec, self.max_model_len)
        self._totals = dict.fromkeys(("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "faults"), 0)

    @classmethod
    def from_checkpoint(
        cls, model: str | Path, config: EngineConfig | None = None, progress: Progress | None = None
    ) -> Engine:
        """Loads a local directory, or a hub id, in Hugging Face format. Nothing is compiled yet.

        Raises:
            CheckpointError: files are missing or do not hold what they should.
            ConfigError: the model or a setting is not supported.
        """
        config = config or EngineConfig()
        if config.compile_cache_dir is not None:
            keep_compilations(config.compile_cache_dir)
        directory = resolve(model)
        deployment = deploy(config, read_model_config(directory, config.dtype))
        tokenizer = Tokenizer.from_dir(directory)
        defaults = read_generation_defaults(directory)
        report = None if progress is None else lambda done, total: progress(done, total, "weights")
        loaded = load_model(
            directory,
            deployment.model,
            report,
            placement=deployment.placement,
            stacked=deployment.attention.is_stacked,
        )
        if deployment.matmul_library is not None:
            pack_weights(loaded, deployment.matmul_library)
        return cls(loaded, tokenizer, defaults, deployment)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compiles all shapes and measures them. Without it, each compiles when it is first met."""
        self._pace = warm_up(
            self._runner, progress, decode_steps=self._decode_steps, max_slowdown=self._config.max_prefill_slowdown
        )

    @property
    def max_num_seqs(self) -> int:
        return self._config.max_num_seqs

    def check(self, request: Request) -> None:
        """Raises RequestError if `request` can never be served. Any thread may call this."""
        prompt, params = request.prompt_token_ids, request.sampling
        if not prompt:
            raise InvalidRequest("the prompt has no tokens")
        if len(prompt) >= self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens; with max_model_len {self.max_model_len} "
                f"at most {self.max_model_len - 1} leave room for an answer"
            )
        for name, ids in (
            ("prompt_token_ids", prompt),
            ("generated", itertools.chain(*request.generated)),
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids),
            ("bad_token_ids", params.bad_token_ids),
            ("stop_token_ids", params.stop_token_ids),
        ):
            self._check_ids(name, ids)
        if not 1 <= request.n <= self.max_num_seqs:
            raise InvalidRequest(f"n must be 1 to {self.max_num_seqs}, not {request.n}")
        if request.generated and len(request.generated) != request.n:
            raise InvalidRequest(f"generated has {len(request.generated)} entries for {request.n} choices")
        for generated in request.generated:
            if len(prompt) + len(generated) > self.max_model_len:
                raise PromptTooLong(
                    f"prompt and generated tokens are {len(prompt) + len(generated)}, "
                    f"max_model_len is {self.max_model_len}"
                )
        num_stops = len(stop_ids(params, self.defaults.eos_token_ids))
        if num_stops > MAX_STOP_TOKENS:
            raise InvalidRequest(f"{num_stops} stop tokens, the model's own included; at most {MAX_STOP_TOKENS} can be")
        self._check_choice(params)

    def add(self, request: Request) -> None:
        """Queues `request`. Where this raises, nothing of it is left here.

        Raises:
            RequestError: as `check`, or its id is in use.
        """
        self.check(request)
        if request.id in self._sequences:
            raise InvalidRequest(f"a request with id {request.id!r} is running already")
        stops = frozenset(stop_ids(request.sampling, self.defaults.eos_token_ids))
        choices: dict[Sequence, _Choice] = {}
        ended: list[tuple[Sequence, FinishReason]] = []  # by tokens of an earlier run
        for index in range(request.n):
            sequence = Sequence(request, index, next(self._arrivals))
            choices[sequence] = _Choice(TextStream(self.tokenizer, request.sampling.stop), stops)
            reason = self._replay(sequence, choices[sequence])
            if reason is not None:
                ended.append((sequence, reason))
        # Nothing below raises: a request is here with all its choices or, where the above raised, not at all.
        self._choices |= choices
        self._sequences[request.id] = list(choices)
        self._totals["prompt_tokens"] += len(request.prompt_token_ids)
        for sequence in choices:
            self._scheduler.add(sequence)
        for sequence, reason in ended:  # its text went out with its last token
            self._early_outputs.append(self._end(sequence, reason, ""))

    def abort(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        """Ends what is left of a request; the next step reports it. An unknown id is ignored."""
        for sequence in list(self._sequences.get(request_id, ())):
            self._early_outputs.append(self._cut_short(sequence, reason))

    def has_work(self) -> bool:
        return bool(self._choices or self._early_outputs or self._in_flight)

    def step(self) -> list[Output]:
        """Plans and dispatches the next step, then commits the one before it."""
        plan = self._plan()
        outputs, self._early_outputs = self._early_outputs, []
        last, self._in_flight = self._in_flight, None
        failed: tuple[Plan, Exception] | None = None
        if plan is not None:
            try:
                self._in_flight = (plan, self._dispatch(plan))
            except Exception as error:
                failed = (plan, error)
        if last is not None:
            try:
                results = last[1].token_ids(), last[1].logprobs()
            except Exception as error:  # then the step behind it, fed by it, is lost too, and not to blame
                failed = (last[0], error)
            else:
                outputs += self._commit(last[0], *results)
        if failed is not None:
            outputs += self._recover(*failed, lost=plan)
        return outputs

    def describe(self) -> EngineInfo:
        return self._info

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_pages=self._pool.num_pages - 1,
            num_free_pages=self._pool.num_free,
            num_cached_pages=self._pool.num_cached,
            preemptions_total=self._scheduler.num_preemptions,
            compiles_after_warmup_total=self._runner.compiles_after_warmup,
            **{f"{name}_total": total for name, total in self._totals.items()},
        )

    def _plan(self) -> Plan | None:
        while True:
            try:
                return self._scheduler.plan(self._pace)
            except SequenceFailed as failure:
                error = failure.__cause__ if isinstance(failure.__cause__, Exception) else failure
                self._early_outputs.append(self._fail(failure.sequence, error))

    def _dispatch(self, plan: Plan) -> InFlight:
        self._totals["steps"] += 1
        return self._runner.dispatch(self._builder.build(plan), len(plan.sampled))

    def _commit(self, plan: Plan, token_ids: list[list[int]], logprobs: Logprobs | None) -> list[Output]:
        outputs: list[Output] = []
        for sampled in token_ids:
            place = 0
            for row in plan.rows:
                token_id = sampled[place] if row.num_sampled else None
                if not row.sequence.is_finished:
                    self._commit_row(row, token_id, logprobs, place, outputs)
                place += token_id is not None
        return outputs

    def _commit_row(
        self, row: Row, token_id: int | None, logprobs: Logprobs | None, place: int, outputs: list[Output]
    ) -> None:
        sequence = row.sequence
        num_known = len(sequence.token_ids)
        try:
            if token_id is not None and token_id < 0:
                outputs.append(self._cut_short(sequence, "error", _NO_TOKEN[token_id]))
                return
            self._scheduler.commit(row, token_id)
            if token_id is not None:
                logprob = None if logprobs is None else _logprob(sequence, logprobs, place)
                outputs.append(self._advance(sequence, token_id, logprob))
                self._totals["generated_tokens"] += 1
        except Exception as error:
            del sequence.token_ids[num_known:]  # that token is never seen
            outputs.append(self._fail(sequence, error))

    def _advance(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> Output:
        """What a sequence's newest token means: its text, and perhaps its end."""
        choice = self._choices[sequence]
        stream = choice.stream
        if token_id in choice.stop_ids:
            return self._end(sequence, "stop", stream.finish(), (token_id,), logprob)
        text, is_stopped = stream.push(token_id)
        if is_stopped:
            return self._end(sequence, "stop", text, (token_id,), logprob)
        if self._is_full(sequence):
            return self._end(sequence, "length", text + stream.finish(), (token_id,), logprob)
        return _output(sequence, text, (token_id,), logprob)

    def _replay(self, sequence: Sequence, choice: _Choice) -> FinishReason | None:
        """Brings the text of a sequence with tokens of an earlier run to where that run was; says why, if it ended."""
        generated = sequence.token_ids[sequence.num_prompt :]
        if not generated:
            return None
        if choice.stream.replay(generated) or generated[-1] in choice.stop_ids:
            return "stop"
        return "length" if self._is_full(sequence) else None

    def _is_full(self, sequence: Sequence) -> bool:
        num_generated = len(sequence.token_ids) - sequence.num_prompt
        return num_generated >= sequence.request.sampling.max_tokens or len(sequence.token_ids) >= self.max_model_len

    def _cut_short(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None, cause: Exception | None = None
    ) -> Output:
        """Ends a sequence for a reason that is not in its tokens, with the text that was held back."""
        try:
            text = self._choices[sequence].stream.finish()
        except Exception as failure:
            return self._fail(sequence, failure)
        return self._end(sequence, reason, text, error=error, cause=cause)

    def _fail(self, sequence: Sequence, cause: Exception) -> Output:
        """Ends a sequence over which the host stumbled. Its text may be half-way through a token and is left alone."""
        return self._end(sequence, "error", "", error=failure_message(cause), cause=cause)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        text: str,
        token_ids: tuple[int, ...] = (),
        logprob: TokenLogprob | None = None,
        error: str | None = None,
        cause: Exception | None = None,
    ) -> Output:
        self._scheduler.finish(sequence)
        del self._choices[sequence]
        siblings = self._sequences[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self._sequences[sequence.request.id]
        self._totals["cached_tokens"] += sequence.num_cached
        return _output(sequence, text, token_ids, logprob, reason, error, cause)

    def _recover(self, blamed: Plan, error: Exception, lost: Plan | None) -> list[Output]:
        """After a step that failed: all sequences are computed anew; one that failed all by itself is given up.

        `lost` is the step dispatched last, whose results will not come.
        """
        self._totals["faults"] += 1
        self._in_flight = None
        self._scheduler.roll_back(blamed, lost)
        self._runner.reset_cache()
        if len(blamed.rows) > 1 or blamed.rows[0].sequence.is_finished:
            return []
        text = f"the step failed: {type(error).__name__}: {error}"
        return [self._cut_short(blamed.rows[0].sequence, "error", text, error)]

    def _check_choice(self, params: SamplingParams) -> None:
        """Some token must be left to sample, also while `min_tokens` suppresses those that stop."""
        candidates = params.allowed_token_ids or range(self._vocab_size)
        of = "allowed_token_ids" if params.allowed_token_ids else f"the {self._vocab_size} tokens there are"
        forbidden = set(params.bad_token_ids)
        if all(token_id in forbidden for token_id in candidates):
            raise InvalidRequest(f"bad_token_ids leaves none of {of}")
        forbidden.update(stop_ids(params, self.defaults.eos_token_ids))
        if params.min_tokens and all(token_id in forbidden for token_id in candidates):
            raise InvalidRequest(
                f"min_tokens is {params.min_tokens}, and bad_token_ids leaves none of {of} but those that stop"
            )

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        for token_id in ids:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequest(f"{name} holds {token_id}, the vocabulary ends at {self._vocab_size - 1}")


def _info(deployment: Deployment, spec: KVCacheSpec, max_model_len: int) -> EngineInfo:
    model, placement = deployment.model, deployment.placement
    return EngineInfo(
        num_parameters=num_parameters(model),
        dtype=model.dtype,
        kv_dtype=deployment.kv_dtype,
        kv_cache_tokens=(spec.num_pages - 1) * spec.page_size,
        kv_cache_bytes=spec.num_pages * deployment.page_bytes * (1 if placement is None else placement.tensor),
        max_model_len=max_model_len,
        platform=deployment.platform,
        device_kind=deployment.devices[0].device_kind,
        num_devices=len(deployment.devices),
        attention=deployment.attention.name,
        matmul=deployment.matmul,
        fallback=deployment.fallback,
    )


def _output(
    sequence: Sequence,
    text: str,
    token_ids: tuple[int, ...],
    logprob: TokenLogprob | None,
    finish_reason: FinishReason | None = None,
    error: str | None = None,
    cause: Exception | None = None,
) -> Output:
    return Output(
        request_id=sequence.request.id,
        index=sequence.index,
        offset=len(sequence.token_ids) - sequence.num_prompt - len(token_ids),
        token_ids=token_ids,
        text=text,
        logprobs=None if logprob is None else (logprob,),
        finish_reason=finish_reason,
        error=error,
        cause=cause,
        num_prompt_tokens=sequence.num_prompt,
        num_cached_tokens=sequence.num_cached,
    )


def _logprob(sequence: Sequence, logprobs: Logprobs, place: int) -> TokenLogprob | None:
    count = sequence.request.sampling.logprobs
    if count is None:
        return None
    top = zip(logprobs.top_ids[place, :count].tolist(), logprobs.top[place, :count].tolist(), strict=True)
    return TokenLogprob(float(logprobs.sampled[place]), tuple(top))


def _free_memory_bytes() -> int:
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return _DEFAULT_KV_CACHE_BYTES
    return int((stats["bytes_limit"] - stats["bytes_in_use"]) * _SHARE_OF_FREE_MEMORY)
