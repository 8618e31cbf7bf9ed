"""What sampling options cost: the same batch with and without them, in turn, in one run.

    python -m benchmarks.sampling --model tiny --dtype bfloat16 --decode-steps 1

All sequences decode, one token each per step. Each round times every variant, each time in another order; a ratio is
that of a round's rates, and the median of the rounds counts. The device's idle time is what lies between the end of a
step's work and the dispatch of the next one.
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from benchmarks.engine import engine_arguments, loaded_engine
from benchmarks.tables import table_of
from penstock.engine import Engine, Request, SamplingParams
from penstock.engine.execution.packing import Batch
from penstock.engine.execution.runner import InFlight
from penstock.engine.request import ResponseSpec, Tool
from penstock.worker.bench.machine import describe_machine
from penstock.worker.bench.report import append_result

RESULTS = Path(__file__).parent / "results"
PLAIN = "plain"
NUM_PROMPT = 16

MakeRequest = Callable[[Request, int], Request]
"""From the plain request of a place in the batch."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A batch that differs from the plain one."""

    make: MakeRequest
    bar: float | None = None  # of the plain batch's rate, what it has to reach


def _with(rows: range | None = None, **params: Any) -> MakeRequest:
    def make(request: Request, place: int) -> Request:
        if rows is not None and place not in rows:
            return request
        return replace(request, sampling=replace(request.sampling, **params))

    return make


def _of_chat(request: Request, _: int) -> Request:
    """Reasoning and tool calls are looked for."""
    return replace(request, response=ResponseSpec("hermes", tools=(Tool("search"),)))


VARIANTS: dict[str, Variant] = {
    PLAIN: Variant(lambda request, _: request),
    "repetition penalty 1.05, all rows": Variant(_with(repetition_penalty=1.05), 0.95),
    "logprobs 5, one row": Variant(_with(range(1), logprobs=5), 0.97),
    "a chat's reply, all rows": Variant(_of_chat, 0.95),
    "repetition penalty 1.05, one row": Variant(_with(range(1), repetition_penalty=1.05)),
    "logprobs 5, all rows": Variant(_with(logprobs=5)),
    "logit_bias and 4,000 allowed tokens, all rows": Variant(
        _with(logit_bias={5: 1.0, 6: -1.0}, allowed_token_ids=tuple(range(1, 8001, 2)))
    ),
}


@dataclass
class IdleWatch:
    """Stands before a runner's dispatch, and notes how long the device had nothing to do before each."""

    dispatch: Callable[[Batch], InFlight]
    idle_s: list[float] = field(default_factory=list)
    _ready_s: queue.SimpleQueue[float] = field(default_factory=queue.SimpleQueue)
    _pending: queue.SimpleQueue[jax.Array | None] = field(default_factory=queue.SimpleQueue)
    _num_pending: int = 0

    def __post_init__(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()

    def __call__(self, batch: Batch) -> InFlight:
        in_flight = self.dispatch(batch)
        now_s = time.perf_counter()
        ready_s = self._latest_ready()
        self.idle_s.append(0.0 if ready_s is None else now_s - ready_s)
        self._num_pending += 1
        self._pending.put(in_flight._tokens)  # noqa: SLF001
        return in_flight

    def _latest_ready(self) -> float | None:
        """When the device finished the last step it was given; None if it still works on it."""
        ready_s = None
        while self._num_pending:
            try:
                ready_s = self._ready_s.get_nowait()
            except queue.Empty:
                return None
            self._num_pending -= 1
        return ready_s

    def _watch(self) -> None:
        while (tokens := self._pending.get()) is not None:
            tokens.block_until_ready()
            self._ready_s.put(time.perf_counter())

    def stop(self) -> None:
        self._pending.put(None)


@dataclass(frozen=True, slots=True)
class Timing:
    tokens_per_s: float
    cpu_ms: float  # of all threads, per token: what hardly moves when others use the machine
    idle_ms: float  # per dispatch


def decode(engine: Engine, make: MakeRequest, num_seqs: int, num_tokens: int) -> Timing:
    """Of a batch that is past its prompts, until the first sequence has `num_tokens`."""
    for place in range(num_seqs):
        prompt = tuple(range(100 + place, 100 + place + NUM_PROMPT))
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens + 40, ignore_eos=True)
        engine.add(make(Request(f"r{place}", prompt, params), place))
    while len({output.request_id for output in engine.step()}) < num_seqs:
        pass
    watch = IdleWatch(engine._runner.dispatch)  # noqa: SLF001
    engine._runner.dispatch = watch  # type: ignore[method-assign,assignment]  # noqa: SLF001
    before, start, cpu_start = engine.stats().generated_tokens_total, time.perf_counter(), time.process_time()
    while (generated := engine.stats().generated_tokens_total - before) < num_seqs * num_tokens:
        engine.step()
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    engine._runner.dispatch = watch.dispatch  # type: ignore[method-assign,assignment]  # noqa: SLF001
    watch.stop()
    for place in range(num_seqs):
        engine.abort(f"r{place}")
    while engine.has_work():
        engine.step()
    return Timing(generated / seconds, 1e3 * cpu_s / generated, 1e3 * statistics.fmean(watch.idle_s))


def measure(
    engine: Engine, variants: Mapping[str, Variant], num_seqs: int, num_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """A row per variant, with its rate over that of the plain batch."""
    found: dict[str, list[Timing]] = {name: [] for name in variants}
    names = list(variants)
    for round_ in range(rounds + 1):
        turned = names[round_ % len(names) :] + names[: round_ % len(names)]
        for name in turned:
            timing = decode(engine, variants[name].make, num_seqs, num_tokens)
            if round_:  # the first round sets things up
                found[name].append(timing)
    rows = []
    for name, timings in found.items():
        pairs = list(zip(timings, found[PLAIN], strict=True))
        ratios = [one.tokens_per_s / plain.tokens_per_s for one, plain in pairs]
        rows.append(
            {
                "batch": name,
                "tokens/s": round(statistics.median(one.tokens_per_s for one in timings), 1),
                "of plain": round(statistics.median(ratios), 3),
                "lowest": round(min(ratios), 3),
                "highest": round(max(ratios), 3),
                "by CPU time": round(statistics.median(plain.cpu_ms / one.cpu_ms for one, plain in pairs), 3),
                "bar": variants[name].bar or "",
                "idle ms": round(statistics.median(one.idle_ms for one in timings), 3),
            }
        )
    return rows


def main() -> None:
    parser = engine_arguments(__doc__)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode-steps", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="also batches that have no bar")
    arguments = parser.parse_args()
    batches = {name: one for name, one in VARIANTS.items() if arguments.all or one.bar or name == PLAIN}
    machine = describe_machine()
    engine, warm_up_s = loaded_engine(arguments, decode_steps=arguments.decode_steps)
    rows = measure(engine, batches, arguments.sequences, arguments.tokens, arguments.rounds)
    compiles = engine.stats().compiles_after_warmup_total
    title = (
        f"{arguments.model} {arguments.dtype}, {arguments.sequences} sequences, {arguments.decode_steps} step(s) a "
        f"dispatch, {compiles} compilations after warm-up"
    )
    Console().print(table_of(title, rows, digits=3))
    report = {"title": title, "settings": vars(arguments), "warm_up_s": warm_up_s, "machine": machine, "rows": rows}
    append_result(RESULTS / "sampling.jsonl", report)


if __name__ == "__main__":
    main()
