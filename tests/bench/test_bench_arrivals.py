"""Times at which requests are sent."""

from __future__ import annotations

from penstock.tools.bench.traffic.arrivals import Arrivals


def test_arrivals() -> None:
    assert Arrivals().times_s(3, seed=0) == [0.0, 0.0, 0.0]
    assert Arrivals("closed", concurrency=2).times_s(2, seed=0) == [0.0, 0.0]
    assert Arrivals("constant", rate=4.0).times_s(3, seed=0) == [0.0, 0.25, 0.5]
    times_s = Arrivals("poisson", rate=10.0).times_s(5000, seed=3)
    assert times_s == sorted(times_s)
    assert times_s == Arrivals("poisson", rate=10.0).times_s(5000, seed=3)
    assert times_s != Arrivals("poisson", rate=10.0).times_s(5000, seed=4)
    assert 450 < times_s[-1] < 550
