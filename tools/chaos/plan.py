"""Plans a run: its requests, and the faults that hit some of them. Depends on the options alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from penstock.tools.chaos.fake_words import CALL

EngineKind = Literal["fake", "model"]
FaultKind = Literal["kill", "freeze", "restart", "drop", "cut", "delay"]
Stage = Literal["read", "claim", "chunk", "choice", "finish", "ack"]
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
# Moments with the model, whose choices end at different tokens. `choice` is a chunk that ends one while others go on.
MODEL_KILL_MOMENTS: tuple[tuple[Stage, Side], ...] = (
    ("choice", "after"),
    ("chunk", "after"),
    ("choice", "before"),
    *KILL_MOMENTS,
)
FREEZE_MOMENTS: tuple[tuple[Stage, Side], ...] = (
    ("claim", "after"),
    ("chunk", "before"),
    ("chunk", "after"),
    ("finish", "before"),
    ("ack", "before"),
)
LOSSES: tuple[tuple[FaultKind, Stage, Side], ...] = (
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

MODEL_TOKENS = 400  # an upper bound, as a model may be small

CHOICE_TOKENS = 250  # of the choice that goes on, if a fault waits for the end of the other

_WORDS = ("river", "lamp", "seven", "orange", "quiet", "stone", "window", "garden", "paper", "bridge", "winter",
          "apple", "north", "engine", "candle", "letter")  # fmt: skip
_MODEL_PROMPTS = (
    "What is {a} + {b}?",
    "Count from {a} to {b}.",
    "Tell me a short story about a {word}.",
    "How do you spell {word}?",
)
_STORY = _MODEL_PROMPTS[2]
_OPENING = (" far away",)  # begins some stories: one choice ends at once, another with another beginning goes on
_TEMPERATURES = (0.0, 0.0, 0.7, 0.9, 1.3)
_STOPS: tuple[tuple[str, ...], ...] = ((), (), (".",), (" the", "e a", "\n"), ("1", "zz", "and then"))
_PENALTIES: tuple[Mapping[str, float], ...] = (
    {},
    {},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.6, "frequency_penalty": 0.3},
    {"repetition_penalty": 0.9, "frequency_penalty": -0.2},
)


_TOOL: Mapping[str, Any] = {
    "name": "count",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"of": {"enum": ["apples", "Äpfel", '"quotes"']}, "up_to": {"type": "integer"}},
        "required": ["of", "up_to"],
        "additionalProperties": False,
    },
}
# Forms of the replies, in turn. No grammar ends a reply before a fault finds its moment.
_FORMS: Sequence[Mapping[str, Any]] = (
    {},
    {"regex": "([a-z]+ |[0-9]+, ){400}"},
    {},
    {"tools": [{"type": "function", "function": _TOOL}], "tool_choice": "required"},
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the worker that has a request, of its connection, or of the server.

    kill      SIGKILL, and the worker's connections are cut
    freeze    SIGSTOP for `length_s`, or until another worker has the request, if that is waited for and comes before;
              before a command: that command reaches the server only after it
    restart   the server is killed and started again
    drop      the answer is lost, and the connection with it
    cut       the command is lost, and the connection with it
    delay     the command or answer takes `length_s`
    """

    kind: FaultKind
    stage: Stage
    side: Side
    at_chunk: int = 1  # stage `chunk`: counts the chunks seen since the last time
    times: int = 1  # each time at another worker
    length_s: float = 0.0
    until_taken: bool = False  # of `freeze`: after the last of `times` another worker takes it, and all wake


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request, and what its client does."""

    id: str
    prompt: str
    max_tokens: int
    n: int = 1
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    penalties: Mapping[str, float] = field(default_factory=dict)  # by name, as in GenerateRequest
    form: Mapping[str, Any] = field(default_factory=dict)  # form of the reply, by name as in GenerateRequest
    seed: int | None = None
    temperature: float | None = None
    ignore_eos: bool = False
    cancel_after: int | None = None  # tokens seen
    timeout_s: float | None = None
    tenant: str | None = None
    priority: int = 0
    sends: int = 1  # times that it is enqueued, concurrently
    loses_enqueue: bool = False  # whether the answer to its first enqueue is lost
    loses_read: bool = False  # whether the answer with its first entries is lost
    fault: Fault | None = None

    @property
    def is_chat(self) -> bool:
        return "tools" in self.form

    @property
    def may_end_early(self) -> bool:
        return self.cancel_after is not None or self.timeout_s is not None


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """Numbers of requests, workers and faults.

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
    has_chats: bool = False  # with the model: some requests are chats that call tools

    def __post_init__(self) -> None:
        for name in ("kills", "zombies", "restarts", "losses"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if self.workers < 2:
            raise ValueError(
                f"workers must be 2 or more, so that another can take over from a killed one, not {self.workers}"
            )
        faults = self.kills + self.zombies + self.restarts + self.losses
        if self.requests < max(1, faults):
            raise ValueError(f"requests must be at least 1 and the number of faults, {faults}, not {self.requests}")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    options: ChaosOptions
    requests: tuple[RequestPlan, ...]

    @property
    def undisturbed(self) -> tuple[RequestPlan, ...]:
        """The same requests under other ids, run to their ends: what the model says undisturbed."""
        return tuple(
            replace(
                request,
                id=calm_id(request.id),
                cancel_after=None,
                timeout_s=None,
                sends=1,
                loses_enqueue=False,
                loses_read=False,
                fault=None,
            )
            for request in self.requests
        )


def calm_id(request_id: str) -> str:
    """Returns the id under which a request ran undisturbed; reruns of it, which have a suffix, share that id."""
    return request_id if request_id.startswith("calm-") else f"calm-{request_id.partition('.')[0]}"


def make_plan(options: ChaosOptions, *, heartbeat_ttl_s: float) -> FaultPlan:
    """Draws requests and faults. Frozen workers sleep for longer than `heartbeat_ttl_s`."""
    rng = random.Random(options.seed)
    faults = list(_faults(rng, options, heartbeat_ttl_s))
    rng.shuffle(faults)
    places = rng.sample(range(options.requests), len(faults))
    by_place = dict(zip(places, faults, strict=True))
    make = _fake_request if options.engine == "fake" else _model_request
    requests = [make(rng, place, by_place.get(place)) for place in range(options.requests)]
    if options.engine == "model":
        requests = [_formed(request, place, options) for place, request in enumerate(requests)]
    return FaultPlan(options, tuple(_laned(request, place) for place, request in enumerate(requests)))


def _faults(rng: random.Random, options: ChaosOptions, ttl_s: float) -> Iterator[Fault]:
    repeated = options.kills // 3  # all hit a few long generations
    while repeated > 1:
        times = min(repeated, 10)
        yield Fault("kill", "chunk", rng.choice(("before", "after")), at_chunk=rng.randint(3, 8), times=times)
        repeated -= times
    moments = KILL_MOMENTS if options.engine == "fake" else MODEL_KILL_MOMENTS
    for i in range(options.kills - options.kills // 3 + max(0, repeated)):
        stage, side = moments[i % len(moments)]
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
        prompt=rng.choice(("", "", CALL)) + " ".join(rng.choices(_WORDS, k=rng.randint(1, 12))),
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
    """Makes a request that is greedy or has a seed. Without one, the undisturbed run would draw other tokens, as its id
    differs.
    """
    a, b = rng.randint(1, 400), rng.randint(1, 400)
    request = RequestPlan(
        id=f"r{place}",
        prompt=rng.choice(_MODEL_PROMPTS).format(a=min(a, b), b=max(a, b), word=rng.choice(_WORDS)),
        max_tokens=rng.randint(40, 120),
        n=rng.choice((1, 2)),
        min_tokens=rng.choice((0, 0, 5)),
        stop=rng.choice(_STOPS),
        penalties=rng.choice(_PENALTIES),
        seed=rng.randrange(2**31),
        temperature=rng.choice(_TEMPERATURES),
        sends=2 if rng.random() < 0.1 else 1,
        loses_enqueue=rng.random() < 0.05,
        loses_read=rng.random() < 0.05,
        fault=fault,
    )
    if fault is None:
        return request
    if fault.stage == "choice":
        story = _STORY.format(word=rng.choice(_WORDS))
        return replace(
            request, prompt=story, max_tokens=CHOICE_TOKENS, n=2, temperature=1.3, stop=_OPENING, ignore_eos=True
        )
    max_tokens = min(MODEL_TOKENS, _tokens_for(rng, fault, per_chunk=24))
    return replace(request, max_tokens=max_tokens, stop=(), ignore_eos=True)  # or it could end before the fault


def _formed(request: RequestPlan, place: int, options: ChaosOptions) -> RequestPlan:
    """Gives a request a form for its reply, if one is due; the grammar then decides when it ends."""
    form = _FORMS[place % len(_FORMS)]
    ends_apart = request.fault is not None and request.fault.stage == "choice"
    if not form or ends_apart or ("tools" in form and not options.has_chats):
        return request
    return replace(request, form=form, min_tokens=0, ignore_eos=False)


def _laned(request: RequestPlan, place: int) -> RequestPlan:
    """Gives a request one of several tenants and one of several priorities."""
    return replace(request, tenant=(None, "a", "b")[place % 3], priority=(0, 0, 5, -3)[place % 4])


def _tokens_for(rng: random.Random, fault: Fault, *, per_chunk: int) -> int:
    """Returns enough for the fault to strike before the end."""
    needed = fault.at_chunk * fault.times * per_chunk if fault.stage == "chunk" else 20
    return needed + rng.randint(20, 80)
