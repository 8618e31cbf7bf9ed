"""Records how long an engine's steps really take while it serves, and fits a model to what each step holds.

The host sees the end of a step if it waits for it. A step's time is from its dispatch, or from the end of the previous
step, to its own end; steps for which the host came too late are left out.
"""

from __future__ import annotations

import json
import random
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from penstock.engine import Engine
from penstock.engine.scheduling.slack import StepClock
from penstock.engine.scheduling.step_plan import StepPlan
from penstock.tools.plan.step_times import StepShape

_WAITED_S = 0.2e-3  # a host that waited less may have come after the end
_KNOTS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # tokens of a step
_ROUNDS = 4  # of reweighting
_KEPT = 2000  # most records that ratios are drawn from
_ALIKE = 30  # number of records of similar length that a step's ratio is drawn from


@dataclass(frozen=True, slots=True)
class StepRecord:
    shape: StepShape
    plan_s: float  # of the host, before the dispatch
    commit_s: float  # of the host, with the results
    step_s: float | None  # of the device; None: its beginning or end was not seen


@dataclass(slots=True)
class _Turn:
    shape: StepShape
    begun_s: float
    dispatched_s: float = 0.0
    ended_s: float = 0.0
    committed_s: float = 0.0
    waited_s: float = 0.0  # time that the host waited for the end


@contextmanager
def recorded(engine: Engine) -> Iterator[list[StepRecord]]:
    """Records the steps of `engine` during the block; the list is filled at its end."""
    clock, kept = _RecordingClock(), engine._clock  # noqa: SLF001
    builder: Any = engine._builder  # noqa: SLF001
    build: Callable[[StepPlan], Any] = builder.build

    def noted(plan: StepPlan) -> Any:
        clock.plan(StepShape.of(plan))
        return build(plan)

    engine._clock, builder.build = clock, noted  # noqa: SLF001
    records: list[StepRecord] = []
    try:
        yield records
    finally:
        engine._clock = kept  # noqa: SLF001
        del builder.build
        records += _records(clock.turns)


class _RecordingClock(StepClock):
    def __init__(self) -> None:
        super().__init__()
        self.turns: list[_Turn] = []
        self._under_way: list[_Turn] = []
        self._begun_at_s = self._free_s = 0.0

    def plan(self, shape: StepShape) -> None:
        self._under_way.append(_Turn(shape, self._begun_at_s))

    def begin(self, *, is_idle: bool) -> None:
        super().begin(is_idle=is_idle)
        self._begun_at_s = self._free_s = time.monotonic()

    def dispatched(self, foretold_s: float | None) -> None:
        super().dispatched(foretold_s)
        self._under_way[-1].dispatched_s = self._free_s = time.monotonic()

    def ended(self) -> None:
        super().ended()
        turn = self._under_way.pop(0)
        turn.ended_s = time.monotonic()
        turn.waited_s = turn.ended_s - self._free_s
        self.turns.append(turn)

    def committed(self) -> None:
        super().committed()
        self.turns[-1].committed_s = time.monotonic()


def _records(turns: list[_Turn]) -> Iterator[StepRecord]:
    last: _Turn | None = None
    for turn in turns:
        step_s = None
        was_idle = last is None or turn.dispatched_s >= last.ended_s
        if turn.waited_s > _WAITED_S and (was_idle or last is None or last.waited_s > _WAITED_S):
            step_s = turn.ended_s - (turn.dispatched_s if last is None else max(turn.dispatched_s, last.ended_s))
        yield StepRecord(turn.shape, turn.dispatched_s - turn.begun_s, turn.committed_s - turn.ended_s, step_s)
        last = turn


@dataclass(frozen=True)
class MeasuredSteps:
    """A fitted `StepTiming`: seconds are linear in tokens between the knots, in sampled rows and in pairs.

    Each step takes the fitted time times a ratio, drawn from the ratios of recorded steps of similar length to their
    fit. So the simulation has the machine's own noise. The same seed draws the same ratios.
    """

    tokens_s: dict[int, float]  # by knot, for one step
    row_s: float
    pair_s: float
    host_plan_s: tuple[float, float]  # per step, and per row
    host_commit_s: tuple[float, float]
    recorded: tuple[tuple[float, float], ...]  # steps: fitted seconds, in order, and the ratio of the real ones
    seed: int = 0
    _draws: random.Random = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_draws", random.Random(self.seed))

    @classmethod
    def fitted(cls, records: Sequence[StepRecord]) -> MeasuredSteps:
        known = [record for record in records if record.step_s is not None]
        largest = max(record.shape.num_tokens for record in known)
        knots = [knot for knot in _KNOTS if knot < largest] + [largest]
        features = np.array([_features(record.shape, knots) for record in known])
        seconds = np.array([record.step_s or 0.0 for record in known])
        weights = _fit(features, seconds)
        fitted_s = features @ weights
        recorded = sorted(zip(fitted_s.tolist(), (seconds / fitted_s).tolist(), strict=True))
        return cls(
            dict(zip(knots, map(float, weights), strict=False)),
            float(weights[-2]),
            float(weights[-1]),
            _per_row([(len(record.shape.chunks), record.plan_s) for record in records]),
            _per_row([(len(record.shape.chunks), record.commit_s) for record in records]),
            tuple(recorded[:: -(-len(recorded) // _KEPT)]),
        )

    @classmethod
    def read(cls, path: Path) -> MeasuredSteps:
        kept = json.loads(path.read_text())
        kept["tokens_s"] = {int(knot): seconds for knot, seconds in kept["tokens_s"].items()}
        kept["recorded"] = tuple(map(tuple, kept["recorded"]))
        for name in ("host_plan_s", "host_commit_s"):
            kept[name] = tuple(kept[name])
        return cls(**kept)

    def write(self, path: Path) -> None:
        kept = asdict(self)
        del kept["_draws"]
        path.write_text(json.dumps(kept, indent=1) + "\n")

    def usual_s(self, shape: StepShape) -> float:
        knots = list(self.tokens_s)
        weights = np.array([*self.tokens_s.values(), self.row_s, self.pair_s])
        return float(np.array(_features(shape, knots)) @ weights)

    def step_s(self, shape: StepShape) -> float:
        usual_s = self.usual_s(shape)
        place = bisect(self.recorded, (usual_s,))
        first = max(0, min(place - _ALIKE // 2, len(self.recorded) - _ALIKE))
        return usual_s * self._draws.choice(self.recorded[first : first + _ALIKE])[1]

    def plan_s(self, shape: StepShape) -> float:
        return self.host_plan_s[0] + self.host_plan_s[1] * len(shape.chunks)

    def commit_s(self, shape: StepShape) -> float:
        return self.host_commit_s[0] + self.host_commit_s[1] * len(shape.chunks)


def _features(shape: StepShape, knots: Sequence[int]) -> list[float]:
    """Returns the closeness of the tokens to each knot, the sampled rows and the pairs, all times the step count."""
    values = [0.0] * len(knots)
    tokens = min(shape.num_tokens, knots[-1])
    above = next(place for place, knot in enumerate(knots) if knot >= tokens)
    below = max(0, above - 1)
    share = (tokens - knots[below]) / (knots[above] - knots[below]) if above > below else 1.0
    values[below] += 1.0 - share
    values[above] += share
    return [shape.num_steps * value for value in (*values, shape.num_sampled, shape.num_pairs)]


def _fit(features: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Returns non-negative weights with the least relative errors, scaled so that total seconds match the records."""
    expected = seconds
    for _ in range(_ROUNDS):
        scale = np.maximum(features.max(axis=0), 1e-12)
        weights = nnls(features / scale / expected[:, None], seconds / expected)[0] / scale
        expected = np.maximum(features @ weights, 1e-6)
    scaled: np.ndarray = weights * (seconds.sum() / (features @ weights).sum())
    return scaled


def _per_row(seconds: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fits the seconds of a step and of each of its rows, without outliers."""
    rows = np.array([count for count, _ in seconds], np.float64)
    times = np.array([value for _, value in seconds])
    features = np.stack([np.ones_like(rows), rows], axis=1)
    usual = max(float(np.median(times)), 1e-6)
    kept = times < 5 * usual * (1 + rows / max(1.0, float(np.median(rows))))  # others waited for a processor
    step_s, row_s = nnls(features[kept], times[kept])[0]
    return float(step_s), float(row_s)
