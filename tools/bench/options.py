"""Options of a load, as on a command line, and which of them contradict each other."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from penstock.tools.bench.errors import ImpossibleLoad
from penstock.tools.bench.summary import Target
from penstock.tools.bench.traffic.arrivals import ArrivalKind, Arrivals
from penstock.tools.bench.traffic.datasets import (
    SHARED_OUTPUTS,
    SHARED_PROMPTS,
    BenchRequest,
    file_requests,
    random_requests,
    shared_prefix_requests,
    with_other_ids,
)
from penstock.tools.bench.traffic.lengths import Lengths
from penstock.tools.bench.traffic.load import Load
from penstock.tools.bench.traffic.traces import read_trace

DEFAULT_REQUESTS = 64
_POSITIVE = ("requests", "prefix_length", "prefix_count", "vocab_size", "trace_block")
_OF_TRACES = ("trace_speed", "trace_block")
_SAID_BY_TRACES = ("prompt_length", "output_length", "prefix_length", "prefix_count", "rate", "concurrency")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of a load, validated; None is "not given".

    Raises:
        ImpossibleLoad: an option contradicts another or is out of range.
    """

    dataset: str = "random"
    requests: int | None = None
    prompt_length: str | None = None
    output_length: str | None = None
    prefix_length: int | None = None
    prefix_count: int | None = None
    vocab_size: int | None = None
    trace: str | None = None
    trace_speed: float | None = None
    trace_block: int | None = None
    seed: int = 0
    arrivals: ArrivalKind = "burst"
    rate: float | None = None
    concurrency: int | None = None
    temperature: float = 0.0
    slo_ttft_ms: float | None = None
    slo_itl_ms: float | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ImpossibleLoad(f"{_flag(name)} must be 1 or more, not {value}")
        if self.seed < 0:
            raise ImpossibleLoad(f"--seed must be 0 or more, not {self.seed}")
        if not 0.0 <= self.temperature <= 100.0:
            raise ImpossibleLoad(f"--temperature must be 0 to 100, not {self.temperature:g}")
        if self.trace_speed is not None and not 0 < self.trace_speed < float("inf"):
            raise ImpossibleLoad(f"--trace-speed must be above 0, not {self.trace_speed:g}")
        self._refuse_strangers()
        self._lengths()
        self._process()
        self._target()

    @property
    def is_file(self) -> bool:
        return self.dataset not in ("random", "shared-prefix")

    def load(self, vocab_size: int, turn: int = 0) -> Load:
        """Draws the requests.

        Each `turn` draws other token ids, except from a file: a repetition must not find its prompts in the prefix
        cache.

        Raises:
            ImpossibleLoad: the file with the requests can't be used, or `vocab_size` is too small to draw from.
        """
        if vocab_size < 16:
            raise ImpossibleLoad(f"--vocab-size {vocab_size} is too small for random prompts, 16 is the least")
        if self.trace is not None:
            trace = read_trace(Path(self.trace), self.requests, self.trace_block)
            traced = tuple(trace.requests(vocab_size, self.seed, turn))
            return Load(traced, trace.arrivals(self.trace_speed or 1.0), self.temperature, target=self._target())
        requests = self._draw(vocab_size)
        if not self.is_file:
            requests = with_other_ids(requests, vocab_size, turn)
        return Load(tuple(requests), self._process(), self.temperature, self.seed + 1, self._target())

    def given(self) -> dict[str, Any]:
        """Returns the options that were given, for a report."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.trace is not None:  # the trace says where requests come from, and when
            values |= {"dataset": None, "arrivals": None}
        return {name: value for name, value in values.items() if value is not None}

    def _draw(self, vocab_size: int) -> list[BenchRequest]:
        prompt_length, output_length = self._lengths()
        if self.is_file:
            return file_requests(Path(self.dataset), self.requests, output_length, self.seed)
        count = self.requests or DEFAULT_REQUESTS
        if self.dataset == "random":
            return random_requests(
                count, vocab_size, prompt_length=prompt_length, output_length=output_length, seed=self.seed
            )
        return shared_prefix_requests(
            count,
            vocab_size,
            prefix_length=self.prefix_length or 256,
            num_prefixes=self.prefix_count or 4,
            prompt_length=prompt_length,
            output_length=output_length,
            seed=self.seed,
        )

    def _refuse_strangers(self) -> None:
        """Refuses options that the trace, or the dataset, has no use for."""
        if self.trace is not None:
            self._refuse_beside_a_trace(self.trace)
            return
        for name in _OF_TRACES:
            if getattr(self, name) is not None:
                raise ImpossibleLoad(f"{_flag(name)} {getattr(self, name):g} has no effect without --trace")
        unused = {"random": ("prefix_length", "prefix_count"), "shared-prefix": ()}.get(
            self.dataset, ("prefix_length", "prefix_count", "prompt_length", "vocab_size")
        )
        for name in unused:
            if getattr(self, name) is not None:
                raise ImpossibleLoad(f"{_flag(name)} {getattr(self, name)} has no effect with --dataset {self.dataset}")
        if self.is_file and not Path(self.dataset).is_file():
            raise ImpossibleLoad(f"--dataset must be random, shared-prefix or a JSONL file, not {self.dataset!r}")

    def _refuse_beside_a_trace(self, trace: str) -> None:
        others = {name: getattr(self, name) for name in _SAID_BY_TRACES}
        others["dataset"] = None if self.dataset == "random" else self.dataset
        others["arrivals"] = None if self.arrivals == "burst" else self.arrivals
        for name, value in others.items():
            if value is not None:
                raise ImpossibleLoad(f"{_flag(name)} {value} has no effect with --trace {trace}, which gives it itself")
        if not Path(trace).is_file():
            raise ImpossibleLoad(f"--trace {trace} is not a file")

    def _lengths(self) -> tuple[Lengths, Lengths]:
        prompts, outputs = self.prompt_length, self.output_length
        return (
            SHARED_PROMPTS if prompts is None else Lengths.parse(prompts, "--prompt-length"),
            SHARED_OUTPUTS if outputs is None else Lengths.parse(outputs, "--output-length"),
        )

    def _process(self) -> Arrivals:
        return Arrivals(self.arrivals, self.rate, self.concurrency)

    def _target(self) -> Target:
        return Target(self.slo_ttft_ms, self.slo_itl_ms)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
