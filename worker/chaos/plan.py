"""What a run consists of: its requests, and the fault that befalls some of them. A function of the options alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

EngineKind = Literal["fake", "model"]
Kind = Literal["kill", "freeze", "restart", "drop", "cut", "delay"]
Stage = Literal["read", "claim", "chunk", "finish", "ack"]
Side = Literal["before", "after"]

KILL_MOMENTS: tuple[tuple[Stage, Side], ...] = (
    ("read", "after"),
    ("claim", "before"),
    ("claim", "after"),
    ("chunk", "before"),
    ("chunk", "after"),
    ("finish", "before"),
    ("finish", "after"),
    ("ack", "before"),
    ("ack", "after"),
)
FREEZE_MOMENTS: tuple[tuple[Stage, Side], ...] = (
    ("claim", "after"),
    ("chunk", "before"),
    ("chunk", "after"),
    ("finish", "before"),
    ("ack", "before"),
)
LOSSES: tuple[tuple[Kind, Stage, Side], ...] = (
    ("drop", "read", "after"),
    ("drop", "claim", "after"),
    ("drop", "chunk", "after"),
    ("drop", "finish", "after"),
    ("drop", "ack", "after"),
    ("cut", "claim", "before"),
    ("cut", "chunk", "before"),
    ("cut", "finish", "before"),
    ("delay", "chunk", "before"),
    ("delay", "finish", "after"),
)

MODEL_TOKENS = 400  # at most, as a model may be small

_WORDS = ("river", "lamp", "seven", "orange", "quiet", "stone", "window", "garden", "paper", "bridge", "winter",
          "apple", "north", "engine", "candle", "letter")  # fmt: skip
_MODEL_PROMPTS = (
    "What is {a} + {b}?",
    "Count from {a} to {b}.",
    "Tell me a short story about a {word}.",
    "How do you spell {word}?",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the worker that has a request, or to its connection, or to the server.

    kill      SIGKILL, and the worker's connections are cut
    freeze    SIGSTOP for `length_s`; before a command: that command reaches the server only after it
    restart   the server is killed and started again
    drop      the answer is lost, and the connection with it
    cut       the command is lost, and the connection with it
    delay     the command or answer takes `length_s`
    """

    kind: Kind
    stage: Stage
    side: Side
    at_chunk: int = 1  # stage `chunk`: which one of those seen since the last time
    times: int = 1  # each time at another worker
    length_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request, and what its client does."""

    id: str
    prompt: str
    max_tokens: int
    n: int = 1
    seed: int | None = None
    temperature: float | None = None
    ignore_eos: bool = False
    cancel_after: int | None = None  # tokens seen
    timeout_s: float | None = None
    sends: int = 1  # how many times it is enqueued, side by side
    loses_enqueue: bool = False  # the answer to its first enqueue is lost
    loses_read: bool = False  # the answer that brings its reader the first entries is lost
    fault: Fault | None = None

    @property
    def may_end_early(self) -> bool:
        return self.cancel_after is not None or self.timeout_s is not None


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """How much of what.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    seed: int
    requests: int = 500
    kills: int = 20
    zombies: int = 10
    restarts: int = 2
    losses: int = 20
    workers: int = 4
    engine: EngineKind = "fake"

    def __post_init__(self) -> None:
        for name in ("kills", "zombies", "restarts", "losses"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if self.workers < 2:
            raise ValueError(f"workers must be 2 or more, as a killed one needs an heir, not {self.workers}")
        faults = self.kills + self.zombies + self.restarts + self.losses
        if self.requests < max(1, faults):
            raise ValueError(f"requests must be at least 1 and the number of faults, {faults}, not {self.requests}")


@dataclass(frozen=True, slots=True)
class Plan:
    """All of a run."""

    options: ChaosOptions
    requests: tuple[RequestPlan, ...]

    @property
    def undisturbed(self) -> Plan:
        """The same requests under other ids, run to their ends: what the model says when nothing happens."""
        calm = (
            replace(
                request,
                id=f"calm-{request.id}",
                cancel_after=None,
                timeout_s=None,
                sends=1,
                loses_enqueue=False,
                loses_read=False,
                fault=None,
            )
            for request in self.requests
        )
        quiet = replace(self.options, kills=0, zombies=0, restarts=0, losses=0)
        return Plan(quiet, tuple(calm))


def make_plan(options: ChaosOptions, *, heartbeat_ttl_s: float) -> Plan:
    """Draws requests and faults. Frozen workers sleep for longer than `heartbeat_ttl_s`."""
    rng = random.Random(options.seed)
    faults = list(_faults(rng, options, heartbeat_ttl_s))
    rng.shuffle(faults)
    places = rng.sample(range(options.requests), len(faults))
    by_place = dict(zip(places, faults, strict=True))
    make = _fake_request if options.engine == "fake" else _model_request
    return Plan(options, tuple(make(rng, place, by_place.get(place)) for place in range(options.requests)))


def _faults(rng: random.Random, options: ChaosOptions, ttl_s: float) -> Iterator[Fault]:
    repeated = options.kills // 3  # all at a few long generations
    while repeated > 1:
        times = min(repeated, 10)
        yield Fault("kill", "chunk", rng.choice(("before", "after")), at_chunk=rng.randint(3, 8), times=times)
        repeated -= times
    for i in range(options.kills - options.kills // 3 + max(0, repeated)):
        stage, side = KILL_MOMENTS[i % len(KILL_MOMENTS)]
        yield Fault("kill", stage, side, at_chunk=rng.randint(1, 6))
    pairs = options.zombies // 4
    for _ in range(pairs):
        yield Fault(
            "freeze", "chunk", "before", at_chunk=rng.randint(2, 5), times=2, length_s=ttl_s * rng.uniform(3, 4)
        )
    for i in range(options.zombies - 2 * pairs):
        stage, side = FREEZE_MOMENTS[i % len(FREEZE_MOMENTS)]
        yield Fault("freeze", stage, side, at_chunk=rng.randint(1, 5), length_s=ttl_s * rng.uniform(1.5, 2.5))
    for _ in range(options.restarts):
        yield Fault("restart", "chunk", rng.choice(("before", "after")), at_chunk=rng.randint(1, 5), length_s=0.2)
    for i in range(options.losses):
        kind, stage, side = LOSSES[i % len(LOSSES)]
        yield Fault(kind, stage, side, at_chunk=rng.randint(1, 5), length_s=rng.uniform(0.05, 0.4))


def _fake_request(rng: random.Random, place: int, fault: Fault | None) -> RequestPlan:
    request = RequestPlan(
        id=f"r{place}",
        prompt=" ".join(rng.choices(_WORDS, k=rng.randint(1, 12))),
        max_tokens=rng.choice((1, 2, rng.randint(5, 60), rng.randint(5, 60), rng.randint(60, 150))),
        n=rng.choice((1, 1, 1, 1, 2, 3)),
        seed=rng.choice((None, rng.randrange(2**31))),
        sends=2 if rng.random() < 0.1 else 1,
        loses_enqueue=rng.random() < 0.05,
        loses_read=rng.random() < 0.05,
    )
    if fault is not None:
        return replace(request, max_tokens=_tokens_for(rng, fault, per_chunk=30), n=rng.choice((1, 1, 2)), fault=fault)
    if (chance := rng.random()) < 0.05:
        return replace(request, max_tokens=rng.randint(100, 400), cancel_after=rng.randint(0, 60))
    if chance < 0.08:
        return replace(request, max_tokens=rng.randint(100, 400), timeout_s=rng.uniform(0.05, 2.0))
    if chance < 0.09:
        return replace(request, max_tokens=rng.randint(800, 2000), n=1)
    return request


def _model_request(rng: random.Random, place: int, fault: Fault | None) -> RequestPlan:
    a, b = rng.randint(1, 400), rng.randint(1, 400)
    prompt = rng.choice(_MODEL_PROMPTS).format(a=min(a, b), b=max(a, b), word=rng.choice(_WORDS))
    is_greedy = rng.random() < 0.5
    return RequestPlan(
        id=f"r{place}",
        prompt=prompt,
        max_tokens=rng.randint(40, 120) if fault is None else min(MODEL_TOKENS, _tokens_for(rng, fault, per_chunk=24)),
        n=1 if is_greedy else rng.choice((1, 2)),
        seed=None if is_greedy else rng.randrange(2**31),
        temperature=0.0 if is_greedy else 0.9,
        ignore_eos=fault is not None,  # or it could be over before the moment comes
        sends=2 if rng.random() < 0.1 else 1,
        loses_enqueue=rng.random() < 0.05,
        loses_read=rng.random() < 0.05,
        fault=fault,
    )


def _tokens_for(rng: random.Random, fault: Fault, *, per_chunk: int) -> int:
    """Enough that the fault finds its moment before the end."""
    needed = fault.at_chunk * fault.times * per_chunk if fault.stage == "chunk" else 20
    return needed + rng.randint(20, 80)
