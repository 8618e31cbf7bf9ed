"""When the next step has to be planned."""

from __future__ import annotations

import pytest

from penstock.engine.scheduling.slack import StepClock


class Machine:
    """A device that takes `real_s` for each step, of which `foretold_s` is expected, and a host that takes 1 ms."""

    host_s = 0.001
    commit_s = 0.0

    def __init__(self, real_s: float, foretold_s: float | None = 0.010) -> None:
        self.now_s, self.real_s, self.foretold_s = 0.0, real_s, foretold_s
        self.clock = StepClock(lambda: self.now_s)
        self.ends_s: list[float] = []  # when dispatched steps end
        self.idle_s = 0.0  # that the device had nothing to do, in the newest step

    def step(self, *, waits: bool = True) -> float:
        """Runs one step as an engine does. Returns the slack that there was before."""
        slack_s = self.clock.slack_s()
        self.now_s += slack_s if waits else 0.0
        self.clock.begin(is_idle=not self.ends_s)
        self.now_s += self.host_s
        free_s = self.ends_s[-1] if self.ends_s else self.now_s
        self.idle_s = max(0.0, self.now_s - free_s)
        self.ends_s.append(max(self.now_s, free_s) + self.real_s)
        self.clock.dispatched(self.foretold_s)
        if len(self.ends_s) > 1:
            self.now_s = max(self.now_s, self.ends_s[-2])
            self.clock.ended()
            self.now_s += self.commit_s
            self.clock.committed()
        return slack_s

    def steps(self, count: int) -> list[float]:
        return [self.step() for _ in range(count)]


def test_a_plan_waits_until_the_device_needs_it_soon() -> None:
    machine = Machine(real_s=0.010)
    assert machine.step() == 0.0
    assert machine.steps(5) == [pytest.approx(0.0085)] * 5  # without the host's millisecond, and half of one in case
    assert machine.idle_s == 0.0


def test_a_device_that_is_faster_than_foretold_is_soon_not_kept_waiting() -> None:
    machine = Machine(real_s=0.005)
    machine.steps(6)
    assert machine.idle_s == 0.0
    assert machine.steps(200)[-1] == pytest.approx(0.0035, abs=0.001)
    assert machine.idle_s == 0.0


def test_slower_steps_change_nothing_so_that_the_next_quick_one_is_not_missed() -> None:
    machine = Machine(real_s=0.015)
    assert machine.steps(100)[-1] == pytest.approx(0.0085)
    machine.real_s = 0.010
    machine.steps(3)
    assert machine.idle_s == 0.0


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    machine = Machine(real_s=0.010)
    usual_s = machine.steps(4)[-1]
    machine.clock.ended()  # the one that failed; the one behind it is lost
    machine.ends_s.clear()
    machine.steps(2)
    assert machine.step() == pytest.approx(usual_s)


@pytest.mark.parametrize(("real_s", "foretold_s"), [(0.0, 0.010), (0.010, None)])
def test_where_steps_take_no_time_or_nobody_measured_them_nothing_waits(
    real_s: float, foretold_s: float | None
) -> None:
    assert Machine(real_s, foretold_s).steps(80)[-20:] == [0.0] * 20


def test_after_the_last_step_there_is_nothing_to_wait_for() -> None:
    machine = Machine(real_s=0.010)
    machine.steps(3)
    machine.clock.begin(is_idle=False)
    machine.now_s = machine.ends_s[-1]
    machine.clock.ended()
    assert machine.clock.slack_s() == 0.0


def test_a_step_that_the_host_waited_in_says_nothing_about_others() -> None:
    machine = Machine(real_s=0.010)
    usual_s = machine.steps(4)[-1]
    machine.foretold_s, machine.host_s = None, 0.008  # as a grammar does: its masks need the tokens before
    machine.steps(3)
    machine.foretold_s, machine.host_s = 0.010, 0.001
    assert machine.steps(3)[-1] == pytest.approx(usual_s, abs=0.001)


def test_what_the_host_works_for_a_step_follows_the_steps_of_late() -> None:
    machine = Machine(real_s=0.010)
    assert machine.clock.turn_s == 0.0
    machine.commit_s = 0.0005
    machine.steps(3)
    assert 0.001 <= machine.clock.turn_s < 0.0015  # the first had no results to commit
    machine.steps(60)
    assert machine.clock.turn_s == pytest.approx(0.0015, rel=0.01)
    machine.host_s = 0.003
    machine.steps(60)
    assert machine.clock.turn_s == pytest.approx(0.0035, rel=0.01)
