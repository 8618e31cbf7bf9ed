"""What decides how long a step takes, and who knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.engine.scheduling.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the time of a step depends on. Without drafts: nobody speculates."""

    chunks: tuple[tuple[int, int], ...]  # of each row, how many tokens its sequence has computed, and it computes
    num_sampled: int  # rows
    num_steps: int = 1  # that run in this dispatch

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        """Several decode steps in one dispatch end with the last of the rows."""
        num_steps = max(row.num_sampled for row in plan.rows) if plan.num_steps > 1 else 1
        return cls(tuple((row.start, row.num_tokens) for row in plan.rows), len(plan.sampled), num_steps)

    @property
    def num_tokens(self) -> int:
        """Of one step."""
        return sum(count for _, count in self.chunks)

    @property
    def num_pairs(self) -> int:
        """Of its tokens with those before it, in the first of its steps."""
        return sum(start * count for start, count in self.chunks)


class StepTiming(Protocol):
    """Of one device, or of those that share a model."""

    def step_s(self, shape: StepShape) -> float:
        """Seconds from when it begins with the step to its results."""

    def plan_s(self, shape: StepShape) -> float:
        """Seconds of the host before the step is dispatched."""

    def commit_s(self, shape: StepShape) -> float:
        """Seconds of the host from the results to the outputs. The device may be at the next step meanwhile."""
