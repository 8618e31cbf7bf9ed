"""When chunks are joined for longer."""

from __future__ import annotations

import pytest

from penstock.worker.publish import coalescing
from penstock.worker.publish.coalescing import Coalescing

NUM_PROCESSORS = 4


class Clocks:
    """Clocks that the code reads, in seconds."""

    def __init__(self) -> None:
        self.now_s = self.process_s = self.thread_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return self.process_s

    def thread_time(self) -> float:
        return self.thread_s

    def pass_(self, seconds: float, *, process: float, thread: float) -> None:
        """Lets time pass; `process` and `thread`: how many processors they used meanwhile."""
        self.now_s += seconds
        self.process_s += process * seconds
        self.thread_s += thread * seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(coalescing, "time", clocks)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(NUM_PROCESSORS), raising=False)
    return clocks


def test_the_interval_follows_the_loops_share_while_processors_are_short(clocks: Clocks) -> None:
    told: list[float] = []
    subject = Coalescing(0.03, 0.1, told.append)
    clocks.pass_(1, process=3.8, thread=0.08)  # 2 % of all, which is twice what it may
    subject.look()
    assert subject.interval_s == pytest.approx(0.06)
    clocks.pass_(1, process=3.8, thread=0.04)  # and now just that
    subject.look()
    assert subject.interval_s == pytest.approx(0.06)
    clocks.pass_(1, process=3.8, thread=0.06)
    subject.look()
    assert subject.interval_s == pytest.approx(0.09)
    clocks.pass_(1, process=3.8, thread=0.4)
    subject.look()
    assert subject.interval_s == pytest.approx(0.1)  # the longest
    was_stretched = subject.is_stretched
    clocks.pass_(1, process=3.8, thread=0.001)
    subject.look()
    assert subject.interval_s == pytest.approx(0.03)  # the shortest
    assert (was_stretched, subject.is_stretched) == (True, False)
    assert told == pytest.approx([0.03, 0.06, 0.06, 0.09, 0.1, 0.03])


def test_it_grows_step_by_step(clocks: Clocks) -> None:
    subject = Coalescing(0.03, 1.0, lambda _: None)
    for expected_s in (0.06, 0.12, 0.24):
        clocks.pass_(1, process=3.8, thread=3)
        subject.look()
        assert subject.interval_s == pytest.approx(expected_s)


def test_nothing_is_held_back_while_processors_are_to_spare(clocks: Clocks) -> None:
    subject = Coalescing(0.03, 0.1, lambda _: None)
    clocks.pass_(1, process=3.8, thread=1)
    subject.look()
    assert subject.interval_s == pytest.approx(0.06)
    clocks.pass_(1, process=1.1, thread=1)  # an engine with a device of its own, and a loop at full load
    subject.look()
    assert subject.interval_s == pytest.approx(0.03)


def test_it_does_not_look_at_every_flush(clocks: Clocks) -> None:
    subject = Coalescing(0.03, 0.1, lambda _: None)
    clocks.pass_(coalescing.WINDOW_S / 2, process=4, thread=4)
    subject.look()
    assert subject.interval_s == pytest.approx(0.03)
    clocks.pass_(coalescing.WINDOW_S, process=4, thread=4)
    subject.look()
    assert subject.interval_s == pytest.approx(0.06)


@pytest.mark.parametrize(("shortest_s", "longest_s"), [(0.0, 0.1), (0.2, 0.1), (0.05, 0.0)])
def test_what_may_not_be_stretched_is_not(clocks: Clocks, shortest_s: float, longest_s: float) -> None:
    subject = Coalescing(shortest_s, longest_s, lambda _: None)
    clocks.pass_(1, process=4, thread=2)
    subject.look()
    assert subject.interval_s == shortest_s
