"""Plans a model for a slice of TPUs: compiles it bucket by bucket, without a TPU and without weights."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, replace
from operator import mul

from penstock.engine.config import EngineConfig
from penstock.engine.deployment.cache_sizes import useful_pages
from penstock.engine.deployment.deployment import usable
from penstock.engine.errors import ConfigError, EngineError
from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.sampling.extended import rows_at_once
from penstock.engine.execution.sampling.sampling import Form
from penstock.engine.models import ModelConfig
from penstock.engine.progress import ReportProgress
from penstock.engine.scheduling.memory.amounts import Amount
from penstock.engine.scheduling.memory.page_needs import PageNeeds
from penstock.tools.plan.device.chips import Chip
from penstock.tools.plan.device.compiling import ALL_OPTIONS, WRITING, Bucket
from penstock.tools.plan.device.hlo import Traffic
from penstock.tools.plan.device.kernel_work import Basis
from penstock.tools.plan.device.roofline import Step, decode_step, prefill_step
from penstock.tools.plan.device.weights import vocab_padding_bytes
from penstock.tools.plan.layout import ModelLayout, lay_out
from penstock.tools.plan.side_by_side import PlanInputs, compiled_by_processes, compiled_in_turn

_LONGEST_STEP_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a model. Numbers are per device unless they say otherwise."""

    topology: str
    tensor: int
    expert: int
    replicas: int  # workers that the slice can hold
    chip: Chip
    attention: str
    model: ModelConfig
    kv_dtype: str  # of the pages
    decode_steps: int  # in one dispatch
    page_size: int
    kind_bytes: tuple[int, ...]  # of a page of each kind
    page_padding: float  # share of the pages that is padding
    needs: PageNeeds  # of a sequence, in pages
    pages: Amount  # of each kind, page 0 included
    most_pages: Amount  # most that all sequences together could fill
    max_model_len: int
    cache_bytes: int
    num_states: int  # state slots, slot 0 included; 0 if no layer keeps states
    slot_bytes: int  # per state slot
    state_interval: int  # pages between states that the prefix cache keeps
    weight_bytes: int
    lane_padding_bytes: int  # on top, for weights whose rows are not whole tiles
    vocab_padding_bytes: int  # part of the weights, where the devices' shares of the vocabulary are not whole tiles
    sampling_bytes: int  # sampling state of all batch slots
    buckets: tuple[Bucket, ...]
    compile_s: float  # until all of them were compiled
    decode: tuple[Step, ...]  # greedy
    decode_filtered: tuple[Step, ...]  # with temperature and all filters
    decode_one_asks: tuple[Step, ...]  # one row also with penalties, biases, masks, drafts and log-probabilities
    decode_all_options: tuple[Step, ...]  # all rows
    prefill: Step

    @property
    def temporary_bytes(self) -> int:
        """Most bytes that any function needs on top of its arguments."""
        return max((bucket.step_bytes for bucket in self.buckets), default=0)

    @property
    def state_bytes(self) -> int:
        return self.num_states * self.slot_bytes

    @property
    def code_bytes(self) -> int:
        return sum(bucket.code_bytes for bucket in self.buckets)

    @property
    def used_bytes(self) -> int:
        kept = self.weight_bytes + self.lane_padding_bytes + self.cache_bytes + self.state_bytes + self.sampling_bytes
        return kept + self.temporary_bytes + self.code_bytes

    @property
    def spare_bytes(self) -> int:
        return self.chip.hbm_bytes - self.used_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of every kind together."""
        return sum(self.kind_bytes)

    @property
    def counts_others(self) -> bool:
        """Whether bytes, cycles and links are counted in other programs than run."""
        return not all(bucket.is_as_run for bucket in self.buckets)

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*self.decode, *self.decode_filtered, *self.decode_one_asks, *self.decode_all_options, self.prefill)

    @property
    def kernels(self) -> dict[str, list[str]]:
        """The names of the steps' kernels by what their times are from: the weakest basis that one of a name has."""
        bases: dict[str, set[Basis]] = {}
        for kernel in (kernel for step in self.steps for kernel in step.kernels):
            bases.setdefault(kernel.name, set()).add(kernel.basis)
        weakest = {name: Basis.weakest(found) for name, found in bases.items()}
        return {
            basis.value: names for basis in Basis if (names := sorted(n for n, of in weakest.items() if of is basis))
        }

    @property
    def hidden_links(self) -> dict[str, float | None]:
        """The share of each program's link time that other work hides; None: none of its collectives has a start and
        an end that anything could run between.
        """
        return {
            f"{bucket.kind} of {bucket.size}": bucket.links.hidden_share if bucket.links.num_pairs else None
            for bucket in self.buckets
            if bucket.links is not None and bucket.links.seconds
        }

    @property
    def page_padding_bytes(self) -> int:
        return round(self.page_padding * self.cache_bytes)

    @property
    def num_pages(self) -> int:
        """Number of pages of all kinds together, each with a page 0."""
        return self.pages.total

    @property
    def max_pages(self) -> int:
        """Most pages that all sequences together could fill, of all kinds."""
        return self.most_pages.total

    @property
    def spare_pages(self) -> int:
        """Additional pages that `num_pages` could ask for and sequences could use, if there is only one kind."""
        if len(self.kind_bytes) > 1:
            return 0
        return max(0, min(self.spare_bytes // self.page_bytes, self.max_pages - self.num_pages))

    @property
    def usable_pages(self) -> Amount:
        return Amount(tuple(count - 1 for count in self.pages.counts))

    @property
    def num_tokens(self) -> int:
        """Tokens that the pages of one replica hold together while no window has moved past any.

        Kinds of pages that windows bound need not hold as many.
        """
        return self.needs.spans(self.usable_pages) * self.page_size

    def sequence_bytes(self, num_tokens: int) -> int:
        """Returns the page bytes of a decoding sequence of `num_tokens`, without pages that windows have moved past."""
        return sum(map(mul, self.needs.held(num_tokens, 1).counts, self.kind_bytes))

    def num_sequences(self, num_tokens: int) -> int:
        """Returns the number of sequences of that length whose pages fit at once."""
        return self.needs.sequences(self.usable_pages, num_tokens)

    @property
    def cache_is_aliased(self) -> bool:
        """Whether every step aliases the cache and none copies it."""
        steps = [bucket for bucket in self.buckets if bucket.kind in WRITING]
        kept = self.cache_bytes + self.state_bytes
        return all(b.aliased_bytes >= kept and b.traffic.cache_copies == 0 for b in steps)


def plan(
    model: ModelConfig,
    topology: str,
    config: EngineConfig,
    *,
    context: int = 1024,
    only: frozenset[int] | None = None,
    processes: int = 1,
    progress: ReportProgress | None = None,
) -> Plan:
    """Compiles every bucket of `config` for `topology`, and estimates what a step costs.

    `context` is the length of the sequences in the estimates. `only` restricts the compiled sizes, of tokens and of
    rows; estimates that need others are then missing. With several `processes`, functions compile in parallel; each
    is a new process and imports the caller's main module.

    Raises:
        ConfigError: libtpu is missing, the topology is unknown, the model cannot be split over `tensor_parallel`
            devices of one host, no sequence is as long as `context`, or it does not fit; the message says by how much.
        EngineError: one of the processes was killed, or crashed; or a step would take more than a minute, which is an
            error in the compiler's figures.
    """
    layout = lay_out(model, topology, config)
    if context >= layout.geometry.max_model_len:
        raise ConfigError(
            f"context {context} leaves no room for another token: the longest sequence here has "
            f"{layout.geometry.max_model_len} tokens"
        )
    start = time.perf_counter()
    kinds = _kinds(layout.geometry, layout.compiler.decode_steps, only)
    if min(processes, len(kinds)) > 1:
        buckets = compiled_by_processes(PlanInputs(model, topology, config), kinds, processes, progress)
    else:
        buckets = compiled_in_turn(layout.compiler, kinds, progress)
    made = _made_of(layout, topology, buckets, time.perf_counter() - start, context)
    _check_fit(made)
    _check_times(made)
    return made


def _made_of(layout: ModelLayout, topology: str, buckets: tuple[Bucket, ...], compile_s: float, context: int) -> Plan:
    """Makes the plan from the layout and the compiled functions."""
    deployment, compiler, config = layout.deployment, layout.compiler, layout.deployment.config
    estimates = _Estimates(layout, buckets)
    return Plan(
        topology=topology,
        tensor=config.tensor_parallel,
        expert=config.expert_parallel,
        replicas=layout.num_devices // config.num_devices,
        chip=layout.chip,
        attention=deployment.attention.name,
        model=deployment.model,
        kv_dtype=deployment.kv_dtype,
        decode_steps=compiler.decode_steps,
        page_size=layout.spec.page_size,
        kind_bytes=deployment.kind_bytes,
        page_padding=deployment.page_padding,
        needs=deployment.needs,
        pages=Amount(layout.spec.counts),
        most_pages=useful_pages(replace(deployment, max_model_len=layout.geometry.max_model_len)),
        max_model_len=layout.geometry.max_model_len,
        cache_bytes=compiler.cache_bytes,
        num_states=layout.spec.num_states,
        slot_bytes=deployment.state_bytes,
        state_interval=deployment.state_interval,
        weight_bytes=layout.weight_bytes,
        lane_padding_bytes=layout.lane_padding_bytes,
        vocab_padding_bytes=vocab_padding_bytes(deployment.model, deployment.placement),
        sampling_bytes=deployment.sampling_bytes,
        buckets=buckets,
        compile_s=compile_s,
        decode=estimates.decode(context),
        decode_filtered=estimates.decode(context, filtered=True),
        decode_one_asks=estimates.decode(context, filtered=True, asking=_Asking.ONE),
        decode_all_options=estimates.decode(context, filtered=True, asking=_Asking.ALL),
        prefill=estimates.prefill(),
    )


def _check_times(made: Plan) -> None:
    """Refuses a plan whose estimates cannot be: no step of a model that fits a device takes that long."""
    for step in made.steps:
        if step.seconds > _LONGEST_STEP_S:
            raise EngineError(
                f"a step of {step.num_tokens} tokens would take {step.seconds:.0f} s, which is an error of the plan: "
                f"{step.time}"
            )


def _check_fit(made: Plan) -> None:
    if made.spare_bytes >= 0:
        return
    pages = made.num_pages + made.spare_bytes // made.page_bytes
    hint = f"num_pages {pages}, or " if pages > made.needs.num_groups else ""
    if len(made.kind_bytes) > 1:
        num_bytes = made.cache_bytes + made.state_bytes + made.spare_bytes
        hint = f"kv_cache_bytes {num_bytes}, or " if num_bytes > 0 else ""
    dearest = max(made.buckets, key=lambda bucket: bucket.step_bytes, default=None)
    step = "" if dearest is None else f"the {dearest.kind} of {dearest.size} {dearest.step_bytes}, "
    raise ConfigError(
        f"a {made.chip.name} device has {made.chip.hbm_bytes} bytes, and {made.used_bytes} would be used: weights "
        f"{made.weight_bytes}, {made.num_pages} pages {made.cache_bytes}, states {made.state_bytes}, sampling state "
        f"{made.sampling_bytes}, {step}programs {made.code_bytes}; set {hint}a lower max_num_seqs"
    )


def _kinds(geometry: Geometry, decode_steps: int, only: frozenset[int] | None) -> list[tuple[str, int]]:
    """Returns the functions that a worker compiles when it starts."""
    sizes = [
        ("backbone", geometry.token_buckets),
        ("head", geometry.row_buckets),
        (ALL_OPTIONS, geometry.extended_row_buckets),
        ("loop", geometry.row_buckets if decode_steps > 1 else ()),
    ]
    return [(kind, size) for kind, buckets in sizes for size in buckets if only is None or size in only]


class _Asking(enum.Enum):
    """Rows of a step that ask for all sampling options."""

    NONE = 0
    ONE = 1
    ALL = 2


class _Estimates:
    """Estimates of steps whose pages fit at once."""

    def __init__(self, layout: ModelLayout, buckets: tuple[Bucket, ...]) -> None:
        self._layout = layout
        self._found = {(bucket.kind, bucket.size): bucket for bucket in buckets}

    def decode(self, context: int, *, filtered: bool = False, asking: _Asking = _Asking.NONE) -> tuple[Step, ...]:
        """Estimates decode steps in which rows have filters or not, and some of them every option."""
        fitting = self._layout.deployment.needs.sequences(usable(self._layout.spec), context + 1)
        most = min(self._layout.deployment.config.max_num_seqs, fitting)
        steps = []
        for batch in sorted({size for size in (1, 32, 64, 128) if size <= most} | ({most} if most else set())):
            backbone = self._found.get(("backbone", self._layout.geometry.token_bucket(batch)))
            head = self._least("head" if asking is _Asking.NONE else ALL_OPTIONS, batch)
            if backbone is None or head is None:
                continue
            traffic = head.full_traffic if filtered else head.traffic
            if asking is not _Asking.NONE:
                traffic = self._asking_traffic(head, 1 if asking is _Asking.ONE else batch)
            if backbone.traffic.hbm_bytes and traffic.hbm_bytes:
                parts = self._layout.deployment, self._layout.chip, batch, context, backbone.traffic, traffic
                steps.append(decode_step(*parts, is_drawn=filtered, waited_s=_waited_s(backbone)))
        return tuple(steps)

    def _asking_traffic(self, head: Bucket, num_asking: int) -> Traffic:
        """Returns the traffic of a head with all options in which so many rows ask for them: some at once."""
        at_once = rows_at_once(head.size, self._layout.deployment.placement, Form.TPU)
        most, times = head.size // at_once, -(-num_asking // at_once)
        return head.traffic.towards(head.full_traffic, (times - 1) / (most - 1)) if most > 1 else head.full_traffic

    def prefill(self) -> Step:
        """Estimates the step of a prompt that fills the largest bucket."""
        num_tokens = max(self._layout.geometry.token_buckets)
        backbone, head = self._found.get(("backbone", num_tokens)), self._least("head", 1)
        programs = () if backbone is None or head is None else (backbone.traffic, head.traffic)
        return prefill_step(self._layout.deployment, self._layout.chip, num_tokens, programs, _waited_s(backbone))

    def _least(self, kind: str, rows: int) -> Bucket | None:
        """Returns the smallest bucket with at least `rows` rows, or None."""
        sizes = [size for of, size in self._found if of == kind and size >= rows]
        return self._found[kind, min(sizes)] if sizes else None


def _waited_s(backbone: Bucket | None) -> float | None:
    return None if backbone is None or backbone.links is None else backbone.links.waited_s
