"""Measures what sampling options cost: the same batch with and without them, in turn, in one run.

    python -m benchmarks.sampling --model tiny --dtype bfloat16 --decode-steps 1

All sequences decode, one token each per step. Each round times every variant, each time in another order. A ratio
compares rates of one round, and the median over rounds counts. The device is idle between the end of one dispatch and
the next.
"""

from __future__ import annotations

import json
import queue
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from rich.console import Console

from benchmarks.engine import engine_arguments, loaded_engine
from benchmarks.parts.tables import RESULTS, table_of
from penstock.engine import Engine, Request, SamplingParams
from penstock.engine.execution.runner import Runner
from penstock.engine.request import ResponseSpec, Tool
from penstock.engine.structured import Grammar
from penstock.tools.bench.machine import describe_machine
from penstock.tools.bench.report import append_result

PLAIN = "plain"
NUM_PROMPT = 16
RECORDS = {
    "type": "array",
    "minItems": 1000,  # too many to end
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "size": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        },
        "required": ["name", "size", "tags"],
        "additionalProperties": False,
    },
}
"""A usual schema. A grammar that counts is different: each token leads to a new state, so each mask is computed anew,
at ten times the cost.
"""

MakeRequest = Callable[[Request, int], Request]
"""Makes a variant from the plain request at an index."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A batch that differs from the plain one."""

    make: MakeRequest
    bar: float | None = None  # least share of the plain batch's rate


def _sampling(rows: range | None = None, **params: Any) -> MakeRequest:
    def make(request: Request, place: int) -> Request:
        if rows is not None and place not in rows:
            return request
        return replace(request, sampling=replace(request.sampling, **params))

    return make


def _constrained(grammar: Grammar, rows: range | None = None) -> MakeRequest:
    def make(request: Request, place: int) -> Request:
        if rows is not None and place not in rows:
            return request
        return replace(request, grammar=grammar, sampling=replace(request.sampling, ignore_eos=False))

    return make


def _parsed(request: Request, _: int) -> Request:
    return replace(request, response=ResponseSpec("hermes", tools=(Tool("search"),)))


def variants_of(engine: Engine) -> dict[str, Variant]:
    records = engine.grammars.compile(f"start: %json {json.dumps(RECORDS)}")
    counted = engine.grammars.compile("start: /[a-z]{2000,}/")
    lists: dict[str, Any] = {"logit_bias": {5: 1.0, 6: -1.0}, "allowed_token_ids": tuple(range(1, 8001, 2))}
    return {
        PLAIN: Variant(lambda request, _: request),
        "repetition penalty 1.05, all": Variant(_sampling(repetition_penalty=1.05), 0.95),
        "logprobs 5, one row": Variant(_sampling(range(1), logprobs=5), 0.97),
        "constrained, one row": Variant(_constrained(records, range(1)), 0.97),
        "constrained, all": Variant(_constrained(records), 0.9),
        "parsed, all": Variant(_parsed, 0.95),
        "repetition penalty 1.05, one row": Variant(_sampling(range(1), repetition_penalty=1.05)),
        "logprobs 5, all": Variant(_sampling(logprobs=5)),
        "biases, 4,000 allowed tokens, all": Variant(_sampling(**lists)),
        "constrained by counting, all": Variant(_constrained(counted)),
    }


class IdleWatch:
    """Measures how long the device was idle, from the end of one dispatch to the next."""

    def __init__(self, runner: Runner) -> None:
        self.idle_s = 0.0
        self._ready_s: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._pending: queue.SimpleQueue[jax.Array | None] = queue.SimpleQueue()
        self._num_pending = 0
        threading.Thread(target=self._watch, daemon=True).start()
        self._watched = {
            "start": lambda started: started.rows,
            "finish": lambda in_flight: in_flight._tokens,  # noqa: SLF001
            "_run_loop": lambda in_flight: in_flight._tokens,  # noqa: SLF001
        }
        self._runner = runner
        for name, output in self._watched.items():
            setattr(runner, name, self._noting(getattr(runner, name), output))

    def stop(self) -> None:
        for name in self._watched:
            delattr(self._runner, name)  # uncovers the method
        self._pending.put(None)

    def _noting(self, give: Callable[..., Any], output: Callable[[Any], jax.Array]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            given = give(*arguments)
            now_s = time.perf_counter()
            ready_s = self._latest_ready()
            self.idle_s += 0.0 if ready_s is None else now_s - ready_s
            self._num_pending += 1
            self._pending.put(output(given))
            return given

        return noting

    def _latest_ready(self) -> float | None:
        """Returns when the device finished its last dispatch; None if it is still busy."""
        ready_s = None
        while self._num_pending:
            try:
                ready_s = self._ready_s.get_nowait()
            except queue.Empty:
                return None
            self._num_pending -= 1
        return ready_s

    def _watch(self) -> None:
        while (output := self._pending.get()) is not None:
            output.block_until_ready()
            self._ready_s.put(time.perf_counter())


@dataclass(frozen=True, slots=True)
class Timing:
    tokens_per_s: float
    cpu_ms: float  # of all threads, per token: other use of the machine hardly affects it
    idle_ms: float  # per step


def decode(engine: Engine, make: MakeRequest, num_seqs: int, num_tokens: int) -> Timing:
    """Times a batch that is past its prompts, until the first sequence has `num_tokens`."""
    for place in range(num_seqs):
        prompt = tuple(range(100 + place, 100 + place + NUM_PROMPT))
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens + 40, ignore_eos=True)
        engine.add(make(Request(f"r{place}", prompt, params), place))
    while len({output.request_id for output in engine.step()}) < num_seqs:
        pass
    watch, steps = IdleWatch(engine._runner), 0  # noqa: SLF001
    before, start, cpu_start = engine.stats().generated_tokens_total, time.perf_counter(), time.process_time()
    while (generated := engine.stats().generated_tokens_total - before) < num_seqs * num_tokens:
        engine.step()
        steps += 1
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    watch.stop()
    for place in range(num_seqs):
        engine.abort(f"r{place}")
    while engine.has_work():
        engine.step()
    return Timing(generated / seconds, 1e3 * cpu_s / generated, 1e3 * watch.idle_s / steps)


def measure(
    engine: Engine, variants: Mapping[str, Variant], num_seqs: int, num_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Returns a row per variant, with its rate over that of the plain batch."""
    found: dict[str, list[Timing]] = {name: [] for name in variants}
    names = list(variants)
    for round_ in range(rounds + 1):
        turned = names[round_ % len(names) :] + names[: round_ % len(names)]
        for name in turned:
            timing = decode(engine, variants[name].make, num_seqs, num_tokens)
            if round_:  # the first round is a warm-up
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
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--decode-steps", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="also batches that have no bar")
    arguments = parser.parse_args()
    machine = describe_machine()
    engine, warm_up_s = loaded_engine(arguments, decode_steps=arguments.decode_steps)
    batches = {name: one for name, one in variants_of(engine).items() if arguments.all or one.bar or name == PLAIN}
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
