"""Measures what speculation does to the rate of a few streams, with a drafter that knows the true continuation, and
with prompt lookup on random text, where there is nothing to look up.

    python -m benchmarks.speculation --model qwen06 --dtype bfloat16

Each round runs without speculation and with each drafter in turn; ratios are medians over rounds. Prints a table and
appends one JSON line to `benchmarks/results/speculation.jsonl`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.engine import engine_arguments, loaded_engine
from benchmarks.parts.tables import RESULTS
from penstock.engine import Engine, Request, SamplingParams
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.speculation.drafter import Draft, Drafter
from penstock.engine.speculation.ngrams import NgramDrafter
from penstock.tools.bench.report import append_result

ACCEPTANCES = (0.0, 0.5, 0.8, 1.0)


@dataclass
class TrueContinuation:
    """A drafter that knows the continuation of each choice, and gets each token right with this probability."""

    replies: dict[tuple[str, int], list[int]]  # by id and index, starting with the first generated token
    acceptance: float = 1.0

    def draft(self, sequence: Sequence, limit: int) -> Draft:
        start = len(sequence.token_ids) - sequence.num_prompt
        reply = self.replies.get((sequence.request.id, sequence.index), [])
        tokens = enumerate(reply[start : start + limit], start)
        return Draft(tuple(self._drafted(token, position) for position, token in tokens))

    def _drafted(self, token: int, position: int) -> int:
        return token if Random(position).random() < self.acceptance else token ^ 1

    def forget(self, sequence: Sequence) -> None:
        """Nothing to forget."""


@dataclass
class Run:
    replies: dict[tuple[str, int], list[int]]
    tokens_per_s: float
    steps: int
    drafted: int
    accepted: int


def run(engine: Engine, drafter: Drafter | None, requests: list[Request]) -> Run:
    """Runs the requests. The rate is that of decoding: from when all streams have a token to the first stream's end."""
    engine.speculate(drafter)
    for request in requests:
        engine.add(request)
    replies: dict[tuple[str, int], list[int]] = {(request.id, 0): [] for request in requests}
    while not all(replies.values()):
        take(engine, replies)
    before, start_s, had = engine.stats(), time.perf_counter(), sum(map(len, replies.values()))
    while engine.has_work():
        take(engine, replies)
    seconds, after = time.perf_counter() - start_s, engine.stats()
    return Run(
        replies,
        (sum(map(len, replies.values())) - had) / seconds,
        after.steps_total - before.steps_total,
        after.drafted_tokens_total - before.drafted_tokens_total,
        after.accepted_tokens_total - before.accepted_tokens_total,
    )


def take(engine: Engine, replies: dict[tuple[str, int], list[int]]) -> None:
    for output in engine.step():
        replies[output.request_id, output.index] += output.token_ids


def random_requests(vocab_size: int, streams: int, prompt: int, tokens: int) -> list[Request]:
    numbers = Random(1)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True)
    prompts = [tuple(numbers.randrange(1, min(vocab_size, 2**15)) for _ in range(prompt)) for _ in range(streams)]
    return [Request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]


def main() -> None:
    parser = engine_arguments(__doc__)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    engine, _ = loaded_engine(arguments)
    requests = random_requests(engine.describe().vocab_size, arguments.streams, arguments.prompt, arguments.tokens)
    truth = run(engine, None, requests).replies
    drafters: dict[str, Drafter | None] = {"off": None, "prompt lookup": NgramDrafter()}
    drafters |= {f"acceptance {acceptance}": TrueContinuation(truth, acceptance) for acceptance in ACCEPTANCES}
    runs: dict[str, list[Run]] = {name: [] for name in drafters}
    for _ in range(arguments.rounds):
        for name, drafter in drafters.items():
            runs[name].append(run(engine, drafter, requests))
            if runs[name][-1].replies != truth:
                raise AssertionError(f"{name}: other tokens than without speculation")
    ratios = {
        name: median(one.tokens_per_s / off.tokens_per_s for one, off in zip(found, runs["off"], strict=True))
        for name, found in runs.items()
    }
    table = Table("drafter", "ratio", "tokens/s", "steps", "drafted", "accepted")
    for name, found in runs.items():
        last = found[-1]
        rate = median(one.tokens_per_s for one in found)
        table.add_row(name, f"{ratios[name]:.2f}", f"{rate:.1f}", *map(str, (last.steps, last.drafted, last.accepted)))
    Console().print(table)
    append_result(
        RESULTS / "speculation.jsonl",
        {"arguments": vars(arguments), "ratios": ratios, "compiles": engine.stats().compiles_after_warmup_total},
    )


if __name__ == "__main__":
    main()
