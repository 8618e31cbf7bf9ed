"""Several decode steps in one dispatch give what single steps give."""

from __future__ import annotations

import pytest

from penstock.engine.execution.runner import Runner
from penstock.engine.scheduling.pace import Pace
from tests.engine.execution.test_runner import Steps, runner

pytestmark = pytest.mark.versions

__all__ = ["runner"]  # the fixture
LOOPS = Pace(decode_steps={16: 4})


def generated(runner: Runner, pace: Pace, num_tokens: int) -> tuple[list[list[int]], int]:
    steps = Steps(runner, pace)
    sequences = [steps.add(1, 2, 3, max_tokens=num_tokens), steps.add(7, 8, max_tokens=num_tokens)]
    while not all(len(sequence.token_ids) - sequence.num_prompt >= num_tokens for sequence in sequences):
        steps.dispatch()
    return [sequence.token_ids[sequence.num_prompt :] for sequence in sequences], steps.num_dispatches


def test_a_loop_of_steps_gives_the_tokens_of_single_steps(runner: Runner) -> None:
    expected, num_single = generated(runner, Pace(), 9)
    found, num_dispatches = generated(runner, LOOPS, 9)
    assert found == expected
    assert (num_single, num_dispatches) == (9, 3)  # the prompts' own step, then four and four


def test_a_row_ends_at_its_stop_token_and_the_others_go_on(runner: Runner) -> None:
    (first, second), _ = generated(runner, Pace(), 6)
    stop = next(token for token in first[1:] if token not in second)
    at = first.index(stop)
    steps = Steps(runner, LOOPS)
    stopping = steps.add(1, 2, 3, max_tokens=6, stop_token_ids=(stop,))  # type: ignore[arg-type]
    other = steps.add(7, 8, max_tokens=6)
    while len(other.token_ids) < 2 + 6:
        steps.dispatch()
    assert stopping.token_ids[3 : 3 + at + 1] == first[: at + 1]
    assert other.token_ids[2:8] == second
