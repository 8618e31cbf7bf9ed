"""The protocol between the runner and an engine in its own process, perhaps its own virtual environment. Uses the
standard library only.

Each line is a JSON object. The adapter sends its version when it is ready. Then each line that it reads is a load, and
each answer has, for each request, the tokens and when each was ready.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Setup:
    """What an adapter loads, and how."""

    model: str  # a folder in Hugging Face format, or the output of the engine's `Kind.checkpoint`
    dtype: str
    max_model_len: int
    prefix_caching: bool
    is_int8: bool  # int8 weights, and whatever is best with them on this engine
    options: dict[str, str] = field(default_factory=dict)  # of Penstock's engine


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request: greedy, end tokens ignored, exactly `num_tokens` to generate."""

    prompt: list[int]
    num_tokens: int
    time_s: float  # arrival, from the start of the run


@dataclass(slots=True)
class Got:
    """A request's tokens, and when each came, in seconds from the start of the run."""

    tokens: list[int] = field(default_factory=list)
    stamps_s: list[float] = field(default_factory=list)

    def add(self, tokens: Sequence[int], now_s: float) -> None:
        self.tokens += tokens
        self.stamps_s += [now_s] * len(tokens)


KV_CACHE_GIB = 3
"""Budget of each engine for keys and values."""

MAX_NUM_SEQS = 64
MAX_BATCH_TOKENS = 512

Run: TypeAlias = Callable[[list[Wanted]], list[Got]]


class Clock:
    def __init__(self) -> None:
        self._start_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    def sleep_until(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - self.now_s()))


def serve(version: str, load: Callable[[Setup], Run]) -> None:
    """Loads the `Setup` on the command line (JSON), and answers loads until standard input ends."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps library output away from the runner
    run = load(Setup(**json.loads(sys.argv[1])))
    channel.write(json.dumps({"version": version}) + "\n")
    for line in sys.stdin:
        got = run([Wanted(**wanted) for wanted in json.loads(line)])
        channel.write(json.dumps([{"tokens": each.tokens, "stamps_s": each.stamps_s} for each in got]) + "\n")
