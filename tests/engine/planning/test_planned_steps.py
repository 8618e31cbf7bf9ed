"""Step times of a plan come from its own table, and follow from what a step holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.deployment.deployment import deploy
from penstock.engine.models import FAMILIES, ModelConfig
from penstock.tools.plan import PRESETS, Plan, Trace, planned_replicas, simulate
from penstock.tools.plan.device.hlo import Traffic
from penstock.tools.plan.device.roofline import kv_bytes_moved, kv_token_bytes
from penstock.tools.plan.device.topology import devices_of
from penstock.tools.plan.planned_steps import HOST_ROW_S, HOST_STEP_S, PlannedSteps, keys_seen
from penstock.tools.plan.schedules import table
from penstock.tools.plan.step_times import StepShape
from penstock.tools.plan.traces import TracedRequest
from tests.engine.planning.plans import plan
from tests.support.needs import needs_libtpu

CONFIG = EngineConfig(max_num_seqs=16, max_batch_tokens=16, max_model_len=2048, tensor_parallel=2)
CONTEXT = 1024


@pytest.mark.parametrize(
    ("window", "start", "count", "expected"),
    [(None, 3, 2, 4 + 5), (4, 3, 2, 4 + 4), (10, 3, 2, 4 + 5), (4, 0, 6, 1 + 2 + 3 + 4 + 4 + 4), (4, 9, 1, 4)],
)
def test_keys_that_a_chunk_sees_by_hand(window: int | None, start: int, count: int, expected: int) -> None:
    assert keys_seen(window, start, count) == expected


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    sizes = {"vocab_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    return FAMILIES["llama"].config({**PRESETS["Llama-3.1-8B"], **sizes}, "bfloat16")


@pytest.fixture(scope="module")
def made(model: ModelConfig) -> Plan:
    return plan(model, "v6e:2x2", CONFIG, context=CONTEXT)


@pytest.fixture
def steps(model: ModelConfig, made: Plan) -> PlannedSteps:
    return PlannedSteps(made, deploy(CONFIG, model, devices_of("v6e:2x2")))


@needs_libtpu
def test_a_full_decode_step_is_that_of_the_plan(made: Plan, steps: PlannedSteps) -> None:
    shape = StepShape(((CONTEXT, 1),) * 16, 16)
    assert made.decode_filtered[-1].num_tokens == 16
    assert steps.step_s(shape) == pytest.approx(made.decode_filtered[-1].seconds, rel=1e-6)
    host_s = steps.plan_s(shape) + steps.commit_s(shape)
    assert host_s == pytest.approx(HOST_STEP_S + 16 * HOST_ROW_S)


@pytest.fixture
def _no_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves kernels their bytes, which can be counted by hand."""
    monkeypatch.setattr(table, "shipped", tuple)


@needs_libtpu
@pytest.mark.usefixtures("_no_schedules")
def test_padding_is_computed_and_contexts_are_read(model: ModelConfig, made: Plan, steps: PlannedSteps) -> None:
    """Three rows take as long as sixteen but for their pages; a chunk reads its context once."""
    deployment = deploy(CONFIG, model, devices_of("v6e:2x2"))
    page_s = kv_bytes_moved(deployment, CONTEXT) / made.chip.hbm_bytes_per_s
    full_s = steps.step_s(StepShape(((CONTEXT, 1),) * 16, 16))
    assert full_s - steps.step_s(StepShape(((CONTEXT, 1),) * 3, 3)) == pytest.approx(13 * page_s)
    one_s, chunk_s = (steps.step_s(StepShape(((CONTEXT, count),), 1)) for count in (1, 16))
    token_s = kv_token_bytes(deployment.model, "bfloat16") / 2 / made.chip.hbm_bytes_per_s
    assert chunk_s - one_s == pytest.approx(15 * token_s)


@needs_libtpu
def test_programs_that_were_not_printed_count_their_weights(
    model: ModelConfig, made: Plan, steps: PlannedSteps
) -> None:
    """Without their cycles, only the roofline is left."""
    buckets = tuple(replace(bucket, traffic=Traffic(), full_traffic=Traffic()) for bucket in made.buckets)
    silent = PlannedSteps(replace(made, buckets=buckets), deploy(CONFIG, model, devices_of("v6e:2x2")))
    shape = StepShape(((CONTEXT, 1),) * 16, 16)
    least_s = (made.decode[-1].ideal_bytes - 16 * 2**20) / made.chip.hbm_bytes_per_s
    at_roofline = made.decode[-1].time
    assert least_s < silent.step_s(shape) < at_roofline.memory_s + at_roofline.collective_s < steps.step_s(shape)


@needs_libtpu
def test_a_prompt_of_the_largest_step_is_that_of_the_plan(made: Plan, steps: PlannedSteps) -> None:
    """Only the sampled row is added."""
    assert steps.step_s(StepShape(((0, 16),), 1)) == pytest.approx(made.prefill.seconds, rel=0.1)


@needs_libtpu
def test_two_slices_serve_twice_as_fast(model: ModelConfig, made: Plan) -> None:
    trace = Trace(tuple(TracedRequest(0.0, 200, 20, 20) for _ in range(256)))
    one, two = (simulate(trace, planned_replicas(made, model, CONFIG, slices)) for slices in (1, 2))
    assert [len(found.replicas) for found in (one, two)] == [2, 4]
    # But for the beginning and the end.
    assert two.total.output_tokens_per_s == pytest.approx(2 * one.total.output_tokens_per_s, rel=0.05)
    assert one == simulate(trace, planned_replicas(made, model, CONFIG))
