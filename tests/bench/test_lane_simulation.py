"""The simulated fleet of `benchmarks.lane_policy`: nothing is lost, and small tenants do not wait behind large ones."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lanes.simulated import Homes, Simulation
from benchmarks.lanes.traffic import BURSTING, Size, drawn

SIZE = Size(
    workers=40, slots=4, tenants=200, per_day=86_400 * 6.0, seconds=120.0, burst_s=(40.0, 80.0), output_tokens=300
)


@pytest.mark.parametrize("homes", ["none", "if free", "patient"])
def test_every_request_is_begun_once_there_is_room(homes: Homes) -> None:
    run = Simulation(SIZE, drawn(SIZE, 0), homes=homes, deaths={60.0: 0.1})
    run.run()
    assert run.calls["enqueue"] == len(run.traffic)
    begun = sum(wait_s >= 0 for wait_s in run.waits_s)
    at_home = sum(run.waits_s[place] < 0 for worker in run.workers for place in set(worker.own))
    waiting = len(run.queue) - len(run.orphans)
    assert begun + waiting <= len(run.traffic) <= begun + waiting + at_home
    assert run.resumed_s
    assert all(len(worker.running) + worker.free == SIZE.slots for worker in run.workers if worker.is_alive)


def test_small_tenants_wait_less_than_where_the_first_is_served_first() -> None:
    traffic = drawn(SIZE, 1)
    is_small = np.array(traffic.tenant) >= BURSTING.stop
    in_burst = (np.array(traffic.at_s) > 45) & (np.array(traffic.at_s) < 80) & (np.array(traffic.priority) >= 0)
    means = []
    for is_fair in (True, False):
        run = Simulation(SIZE, traffic, is_fair=is_fair)
        run.run()
        means.append(float(np.mean(np.array(run.waits_s)[is_small & in_burst])))
    assert means[0] < 0.5 * means[1]
