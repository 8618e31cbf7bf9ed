"""What determines how long a step takes, and the interface that says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.engine.scheduling.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the time of a step depends on. There are no drafts: nothing speculates."""

    chunks: tuple[tuple[int, int], ...]  # per row: tokens that its sequence has computed, tokens that it computes
    num_sampled: int  # rows
    num_steps: int = 1  # in this dispatch

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        """Returns the shape of a plan. Several decode steps in one dispatch end with the last of their rows."""
        num_steps = max(row.num_sampled for row in plan.rows) if plan.num_steps > 1 else 1
        return cls(tuple((row.start, row.num_tokens) for row in plan.rows), len(plan.sampled), num_steps)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of one step."""
        return sum(count for _, count in self.chunks)

    @property
    def num_pairs(self) -> int:
        """Number of pairs of its tokens with earlier ones, in the first of its steps."""
        return sum(start * count for start, count in self.chunks)


class StepTiming(Protocol):
    """Timing of one device, or of the devices that share a model."""

    def step_s(self, shape: StepShape) -> float:
        """Returns the seconds from the device's start of the step to its results."""

    def plan_s(self, shape: StepShape) -> float:
        """Returns the host's seconds before the step is dispatched."""

    def commit_s(self, shape: StepShape) -> float:
        """Returns the host's seconds from the results to the outputs. The device may run the next step meanwhile."""
