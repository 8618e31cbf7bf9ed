"""A fleet on a virtual clock: cases by hand, and the steps of a real engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine import Engine, Request, SamplingParams
from penstock.engine.execution.packing import Batch
from penstock.engine.scheduling.memory.page_pool import PagePool
from penstock.engine.scheduling.pace import Pace, StepTimes
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.step_plan import StepPlan
from penstock.tools.plan.replica import Replica
from penstock.tools.plan.simulation import Simulated, simulate
from penstock.tools.plan.step_times import StepShape
from penstock.tools.plan.traces import Trace, TracedRequest
from tests.engine.engines import SMALL, drive
from tests.engine.scheduling.scheduler_harness import PAGE

STEP_S = 0.010


class Even:
    """A clock on which every step takes the same time, and the host none or a fixed time. Records the steps."""

    def __init__(self, plan_s: float = 0.0, commit_s: float = 0.0) -> None:
        self.shapes: list[StepShape] = []
        self._plan_s, self._commit_s = plan_s, commit_s

    def step_s(self, shape: StepShape) -> float:
        self.shapes.append(shape)
        return shape.num_steps * STEP_S

    def plan_s(self, shape: StepShape) -> float:
        return self._plan_s

    def commit_s(self, shape: StepShape) -> float:
        return self._commit_s


def replica(
    timing: Even,
    *,
    max_num_seqs: int = 4,
    num_pages: int = 64,
    decode_steps: int = 1,
    max_model_len: int = 96,
    foretold: bool = False,
    takes_all: bool = False,
) -> Replica:
    pool = PagePool(num_pages, PAGE)
    scheduler = Scheduler(pool, max_num_seqs=max_num_seqs, max_batch_tokens=16, max_model_len=max_model_len)
    times = StepTimes({16: STEP_S}, {16: STEP_S}) if foretold else None
    pace = Pace(times, 1.0, {max_num_seqs: decode_steps})
    return Replica(scheduler, pace, timing, max_num_seqs, takes_all=takes_all)


def asked(arrival_s: float, num_prompt: int, num_output: int, max_tokens: int | None = None) -> TracedRequest:
    return TracedRequest(arrival_s, num_prompt, num_output, max_tokens or num_output)


def simulated(replicas: Replica | list[Replica], *requests: TracedRequest) -> Simulated:
    return simulate(Trace(requests), [replicas] if isinstance(replicas, Replica) else replicas)


def stamps_ms(one: Replica, place: int) -> list[float]:
    return [round(1000 * stamp, 6) for stamp in one.served[place].stamps_s]


def test_a_lone_request_takes_a_step_for_each_token() -> None:
    """A prompt of 20 runs in steps of 16; the clock begins with its arrival."""
    one = replica(Even())
    found = simulated(one, asked(5.0, 20, 3))
    assert stamps_ms(one, 0) == [5020, 5030, 5040]
    assert one.served[0].ttft_s == pytest.approx(0.020)
    assert (found.total.itl_s.p50, found.total.itl_s.p99) == pytest.approx((0.010, 0.010))
    assert found.seconds == pytest.approx(0.040)
    assert found.total.output_tokens_per_s == pytest.approx(3 / 0.040)
    assert found.total.utilisation == pytest.approx(1.0)
    assert (found.total.steps, found.total.sequences_per_step, found.longest_queue) == (4, 1.0, 0)


def test_with_one_slot_the_second_waits_for_the_first_to_end() -> None:
    one = replica(Even(), max_num_seqs=1)
    found = simulated(one, asked(0.0, 4, 3), asked(0.0, 4, 2))
    assert stamps_ms(one, 0) == [10, 20, 30]
    assert stamps_ms(one, 1) == [40, 50]
    assert found.longest_queue == 1


def test_a_request_that_comes_during_a_step_joins_the_one_after_the_next() -> None:
    """Without a forecast, plans are made at once: the next one is on the device when the request comes."""
    one = replica(Even())
    simulated(one, asked(0.0, 4, 6), asked(0.012, 4, 1))
    assert stamps_ms(one, 1) == [40]


def test_a_request_that_comes_before_the_plan_is_due_joins_the_next_step() -> None:
    one = replica(Even(), foretold=True)
    simulated(one, asked(0.0, 4, 6), asked(0.012, 4, 1))
    assert stamps_ms(one, 0) == [10, 20, 30, 40, 50, 60]
    assert stamps_ms(one, 1) == [30]


def test_the_device_waits_for_a_host_that_takes_longer_than_a_step() -> None:
    hidden, slow = replica(Even(0.003, 0.004)), replica(Even(0.006, 0.009))
    simulated(hidden, asked(0.0, 4, 4))
    assert stamps_ms(hidden, 0) == [17, 27, 37, 47]
    found = simulated(slow, asked(0.0, 4, 4))
    assert stamps_ms(slow, 0) == [25, 40, 55, 65]
    assert found.total.utilisation == pytest.approx(40 / 65)


def test_an_end_that_the_scheduler_cannot_foresee_costs_a_step() -> None:
    known, unknown = Even(), Even()
    simulated(replica(known), asked(0.0, 4, 3))
    simulated(replica(unknown), asked(0.0, 4, 3, max_tokens=9))
    assert (len(known.shapes), len(unknown.shapes)) == (3, 4)


def test_several_steps_of_a_dispatch_come_at_once_and_end_with_the_last_row() -> None:
    timing = Even()
    one = replica(timing, decode_steps=4)
    simulated(one, asked(0.0, 4, 7))
    assert stamps_ms(one, 0) == [10, 50, 50, 50, 50, 70, 70]
    assert [shape.num_steps for shape in timing.shapes] == [1, 4, 2]


def test_replicas_share_what_comes_in_turn() -> None:
    fleet = [replica(Even(), max_num_seqs=1) for _ in range(3)]
    found = simulated(fleet, *(asked(0.0, 4, 2) for _ in range(6)))
    assert [figures.requests for figures in found.replicas] == [2, 2, 2]
    assert (found.seconds, found.longest_queue) == pytest.approx((0.040, 3))
    assert found.total.output_tokens_per_s == pytest.approx(12 / 0.040)
    assert found.replicas[0].output_tokens_per_s == pytest.approx(4 / 0.040)


def test_a_replica_with_room_takes_what_another_has_none_for() -> None:
    fleet = [replica(Even(), max_num_seqs=1) for _ in range(2)]
    simulated(fleet, asked(0.0, 4, 9), asked(0.001, 4, 2), asked(0.002, 4, 2), asked(0.003, 4, 2))
    assert [len(one.served) for one in fleet] == [1, 3]


def test_a_prefix_that_is_cached_is_not_computed_again() -> None:
    def requests(num_prefix: int) -> list[TracedRequest]:
        return [TracedRequest(time_s, 40, 2, 2, num_prefix=num_prefix) for time_s in (0.0, 1.0)]

    alone, shared = replica(Even()), replica(Even())
    assert simulated(alone, *requests(0)).total.cached_tokens == 0
    assert simulated(shared, *requests(30)).total.cached_tokens == 28  # whole pages of 4
    assert [round(each.ttft_s, 6) for each in alone.served] == [0.030, 0.030]
    assert [round(each.ttft_s, 6) for each in shared.served] == [0.030, 0.010]


def test_too_few_pages_preempt_and_all_come_to_their_ends() -> None:
    one = replica(Even(), num_pages=18, max_model_len=64)
    found = simulated(one, *(asked(0.0, 8, 40) for _ in range(4)))
    assert found.total.preemptions > 0
    assert all(each.is_complete for each in one.served)
    one.scheduler.check()


def traffic(count: int, num_prefix: int, seed: int) -> list[TracedRequest]:
    rng = np.random.default_rng(seed)
    lengths = zip(rng.integers(1, 40, count).tolist(), rng.integers(1, 40, count).tolist(), strict=True)
    return [
        TracedRequest(0.0, num_prefix + own, num_output, num_output, num_prefix=num_prefix)
        for own, num_output in lengths
    ]


def steps_of(engine: Engine, requests: list[TracedRequest]) -> list[StepShape]:
    """Returns the steps that a real engine dispatches for the requests, all there at once."""
    rng = np.random.default_rng(0)
    prefix = tuple(rng.integers(10, 250, 16).tolist())
    shapes: list[StepShape] = []
    build = engine._builder.build

    def noted(plan: StepPlan) -> Batch:
        shapes.append(StepShape.of(plan))
        return build(plan)

    engine._builder.build = noted  # type: ignore[method-assign]
    made = []
    for i, each in enumerate(requests):
        own = rng.integers(10, 250, each.num_prompt - each.num_prefix).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=each.num_output, ignore_eos=True)
        made.append(Request(str(i), (*prefix[: each.num_prefix], *own), params))
    drive(engine, made)
    return shapes


@pytest.mark.parametrize(
    ("more", "count", "num_prefix"),
    [
        ({}, 12, 0),
        ({}, 12, 16),
        ({"num_pages": 21}, 12, 0),
        ({"decode_steps": 4}, 3, 0),
        ({"decode_steps": 4}, 12, 16),
        ({"max_num_seqs": 1}, 4, 0),
    ],
    ids=str,
)
def test_the_steps_are_those_of_a_real_engine(
    tiny_model: Path, more: dict[str, Any], count: int, num_prefix: int
) -> None:
    """Steps are compared one by one: which sequences compute how many tokens, how many are sampled, in how
    many steps.
    """
    config = replace(SMALL, speculation="off", **more)
    engine = Engine.from_checkpoint(tiny_model, config)
    requests = traffic(count, num_prefix, seed=count)
    expected = steps_of(engine, requests)
    timing = Even()
    one = replica(
        timing,
        max_num_seqs=config.max_num_seqs,
        num_pages=config.num_pages or 0,
        decode_steps=config.decode_steps or 1,
        max_model_len=engine.max_model_len,
        takes_all=True,
    )
    found = simulated(one, *requests)
    stats = engine.stats()
    assert timing.shapes == expected
    assert (found.total.preemptions, found.total.cached_tokens) == (stats.preemptions_total, stats.cached_tokens_total)
    assert (found.total.preemptions > 0) == ("num_pages" in more)
    assert not num_prefix or stats.cached_tokens_total
