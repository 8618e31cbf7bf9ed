"""A plan follows from its seed, and holds what was asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from penstock.tools.chaos.plan import FREEZE_MOMENTS, KILL_MOMENTS, ChaosOptions, FaultPlan, calm_id, make_plan


def planned(plan: FaultPlan) -> Counter[str]:
    counts: Counter[str] = Counter()
    for request in plan.requests:
        if request.fault is not None:
            counts[request.fault.kind] += request.fault.times
    return counts


@pytest.mark.parametrize("engine", ["fake", "model"])
def test_same_seed_same_plan(engine: str) -> None:
    options = ChaosOptions(5, engine=engine)  # type: ignore[arg-type]
    plan = make_plan(options, heartbeat_ttl_s=1.0)
    assert plan == make_plan(options, heartbeat_ttl_s=1.0)
    other = make_plan(ChaosOptions(6, engine=engine), heartbeat_ttl_s=1.0)  # type: ignore[arg-type]
    assert plan.requests != other.requests


@pytest.mark.parametrize(
    ("kills", "zombies", "restarts"), [(0, 0, 0), (1, 1, 1), (20, 10, 2), (100, 50, 5), (31, 7, 3)]
)
def test_as_many_faults_as_asked_for(kills: int, zombies: int, restarts: int) -> None:
    options = ChaosOptions(3, requests=1000, kills=kills, zombies=zombies, restarts=restarts, losses=0)
    counts = planned(make_plan(options, heartbeat_ttl_s=1.0))
    assert (counts["kill"], counts["freeze"], counts["restart"]) == (kills, zombies, restarts)


def test_every_moment_is_visited() -> None:
    plan = make_plan(ChaosOptions(1, requests=1000, kills=100, zombies=50), heartbeat_ttl_s=1.0)
    faults = [request.fault for request in plan.requests if request.fault is not None]
    assert {(fault.stage, fault.side) for fault in faults if fault.kind == "kill"} == set(KILL_MOMENTS)
    assert {(fault.stage, fault.side) for fault in faults if fault.kind == "freeze"} == set(FREEZE_MOMENTS)
    assert max(fault.times for fault in faults if fault.kind == "kill") == 10
    assert any(fault.times == 2 for fault in faults if fault.kind == "freeze")
    assert all(fault.length_s > 1.0 for fault in faults if fault.kind == "freeze")


def test_requests_to_the_model_vary_in_all_that_a_takeover_rebuilds() -> None:
    plan = make_plan(ChaosOptions(1, requests=200, kills=30, engine="model"), heartbeat_ttl_s=1.0)
    requests = plan.requests
    assert all(request.seed is not None for request in requests)  # or the undisturbed run would say something else
    for stop in (False, True):
        assert {request.n for request in requests if bool(request.stop) is stop} == {1, 2}
    assert {request.temperature == 0.0 for request in requests if request.penalties} == {False, True}
    assert len({name for request in requests for name in request.penalties}) == 3
    assert any(request.min_tokens for request in requests)
    assert not any(request.is_chat for request in requests)  # whether the model has a template is not known
    assert {request.n for request in requests if "regex" in request.form and request.fault} == {1, 2}
    at_choice = [request for request in requests if request.fault is not None and request.fault.stage == "choice"]
    assert {request.fault.side for request in at_choice if request.fault is not None} == {"before", "after"}
    assert all(request.n == 2 and request.stop and request.ignore_eos for request in at_choice)  # its choices end apart


def test_some_requests_to_a_model_with_a_template_are_chats_that_call_tools() -> None:
    options = ChaosOptions(1, requests=200, kills=30, engine="model", has_chats=True)
    plan = make_plan(options, heartbeat_ttl_s=1.0)
    chats = [request for request in plan.requests if request.is_chat]
    assert {request.n for request in chats} == {1, 2}
    assert any(request.fault for request in chats)
    for request in plan.requests:
        assert not (request.form and (request.ignore_eos or request.min_tokens))  # a grammar says when a reply may end
    plain = make_plan(replace(options, has_chats=False), heartbeat_ttl_s=1.0)
    assert [request.prompt for request in plain.requests] == [request.prompt for request in plan.requests]


def test_the_undisturbed_requests_are_the_same_ones_in_peace() -> None:
    plan = make_plan(ChaosOptions(1, engine="model"), heartbeat_ttl_s=1.0)
    for request, calm in zip(plan.requests, plan.undisturbed, strict=True):
        assert calm.id == calm_id(request.id) == calm_id(f"{request.id}.again.twice") == calm_id(calm.id)
        assert (calm.prompt, calm.seed, calm.stop, calm.n) == (request.prompt, request.seed, request.stop, request.n)
        assert calm.fault is None
        assert not calm.may_end_early


def test_requests_that_a_fault_waits_for_run_to_their_end() -> None:
    plan = make_plan(ChaosOptions(1, requests=1000, kills=100), heartbeat_ttl_s=1.0)
    assert not any(request.fault and request.may_end_early for request in plan.requests)
    assert any(request.may_end_early for request in plan.requests)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kills": -1}, "kills must be 0 or more, not -1"),
        ({"workers": 1}, "workers must be 2 or more, so that another can take over from a killed one, not 1"),
        ({"requests": 0, "kills": 0, "zombies": 0, "restarts": 0, "losses": 0}, "requests must be at least 1 .* not 0"),
        ({"requests": 10}, "requests must be at least 1 and the number of faults, 52, not 10"),
    ],
)
def test_options_out_of_range(values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChaosOptions(1, **values)  # type: ignore[arg-type]
