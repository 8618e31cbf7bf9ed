"""A plan is packed into one array, and unpacked as the device sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.packing import Batch, BatchBuilder
from penstock.engine.execution.sampling.extended_rows import NO_TARGET
from penstock.engine.execution.sampling.sampling_state import GENERATED, IN_PROMPT, STOPS
from penstock.engine.execution.sampling_rows import GREEDY, NEVER, NOT_A_TOKEN, PARAMETERS
from penstock.engine.execution.unpacking import StepInputs, unpack_extended, unpack_sampling, unpack_step
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling.memory.page_pool import PagePool
from penstock.engine.scheduling.pace import Pace
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.step_plan import StepPlan
from tests.support.parameter_values import a_value

GEOMETRY = Geometry(max_num_seqs=4, max_batch_tokens=32, max_model_len=40, page_size=4, vocab_size=50)
EOS = 49


def scheduler(num_pages: int = 64) -> Scheduler:
    pool = PagePool(num_pages, GEOMETRY.page_size)
    return Scheduler(pool, max_num_seqs=4, max_batch_tokens=32, max_model_len=40)


def add(to: Scheduler, name: str, prompt: tuple[int, ...], arrival: int = 0, **params: Any) -> Sequence:
    sequence = Sequence(Request(name, prompt, SamplingParams(**{"ignore_eos": True, **params})), 0, arrival)
    to.add(sequence)
    return sequence


def planned(by: Scheduler, pace: Pace | None = None) -> StepPlan:
    plan = by.plan(pace or Pace())
    assert plan is not None
    return plan


def inputs_of(batch: Batch) -> StepInputs:
    return unpack_step(GEOMETRY.step_layout(batch.num_tokens), jnp.asarray(batch.flat))


def test_a_prompt_is_packed_with_its_positions_slots_and_pages() -> None:
    by, builder = scheduler(), BatchBuilder(GEOMETRY, (EOS,))
    first, second = add(by, "a", (1, 2, 3, 4, 5)), add(by, "b", (6, 7, 8), 1)
    batch = builder.build(planned(by))
    inputs = inputs_of(batch)
    assert (batch.num_tokens, batch.num_rows, batch.num_steps) == (16, 16, 1)
    assert (batch.options, batch.stops) == (None, None)
    np.testing.assert_array_equal(inputs.token_ids[:8], [1, 2, 3, 4, 5, 6, 7, 8])
    np.testing.assert_array_equal(inputs.positions[:8], [0, 1, 2, 3, 4, 0, 1, 2])
    np.testing.assert_array_equal(inputs.sources, [-1] * 16)
    np.testing.assert_array_equal(inputs.ragged.cu_q_lens[:4], [0, 5, 8, 8])
    np.testing.assert_array_equal(inputs.ragged.kv_lens[:3], [5, 3, 0])
    np.testing.assert_array_equal(inputs.ragged.num_seqs, [2])
    for place, sequence in enumerate((first, second)):
        held = len(sequence.pages)
        np.testing.assert_array_equal(inputs.ragged.page_indices[0][place, :held], sequence.pages.groups[0])
        np.testing.assert_array_equal(inputs.ragged.page_indices[0][place, held:], 0)
    pages, others = first.pages.groups[0], second.pages.groups[0]
    slots = [pages[i // 4] * 4 + i % 4 for i in range(5)] + [others[0] * 4 + i for i in range(3)]
    np.testing.assert_array_equal(inputs.ragged.slots[0], slots + [0] * 8)  # padding writes to the sink
    np.testing.assert_array_equal(inputs.sampled.tokens[:2], [4, 7])  # the last of each


def test_a_token_in_flight_is_read_where_the_step_before_sampled_it() -> None:
    by, builder = scheduler(), BatchBuilder(GEOMETRY, (EOS,))
    add(by, "a", (1, 2))
    add(by, "b", (3,), 1)
    builder.build(planned(by))
    inputs = inputs_of(builder.build(planned(by)))
    np.testing.assert_array_equal(inputs.sources[:3], [0, 1, -1])
    np.testing.assert_array_equal(inputs.token_ids[:2], [0, 0])
    np.testing.assert_array_equal(inputs.positions[:2], [2, 1])


def test_a_new_holder_of_a_batch_slot_inherits_no_page() -> None:
    by, builder = scheduler(), BatchBuilder(GEOMETRY, (EOS,))
    long = add(by, "long", tuple(range(30)))
    builder.build(planned(by))
    slot = long.batch_slot
    by.finish(long)
    short = add(by, "short", (41, 42), 1)
    plan = planned(by)
    assert short.batch_slot == slot
    pages = inputs_of(builder.build(plan)).ragged.page_indices[0][0]
    np.testing.assert_array_equal(pages, [*short.pages.groups[0], *[0] * (len(pages) - len(short.pages))])


def test_each_group_of_layers_has_a_table_without_the_pages_that_its_window_has_passed() -> None:
    geometry = replace(GEOMETRY, num_groups=2)
    pool = PagePool(64, geometry.page_size, windows=(None, 3))
    by = Scheduler(pool, max_num_seqs=4, max_batch_tokens=32, max_model_len=40)
    builder = BatchBuilder(geometry, (EOS,))
    sequence = add(by, "a", tuple(range(30)), max_tokens=5)
    for _ in range(4):  # the prompt, and three tokens, of which the last begins the ninth page
        plan = planned(by)
        batch = builder.build(plan)
        by.commit(plan.rows[0], 1)
    ragged = unpack_step(geometry.step_layout(batch.num_tokens), jnp.asarray(batch.flat)).ragged
    full, sliding = sequence.pages.groups
    assert sliding == [0] * 7 + sliding[7:]  # it sees tokens 30 to 32
    for group, pages in enumerate((full, sliding)):
        np.testing.assert_array_equal(ragged.page_indices[group][0], [*pages, 0])
        assert ragged.slots[group][0] == pages[8] * 4
    assert not set(full) & set(sliding[7:])


def test_sampling_parameters_arrive_to_the_bit() -> None:
    by, builder = scheduler(), BatchBuilder(GEOMETRY, (EOS,))
    params: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "top_k": 2**40}
    params |= {name: a_value(name) for name in PARAMETERS if name not in params}
    sequence = add(by, "a", (1, 2, 3), **params, seed=2**63 - 5)
    rows = unpack_sampling(inputs_of(builder.build(planned(by))).sampling)
    held = params | {"top_k": 2**31 - 1}
    for name, kind in PARAMETERS.items():
        assert getattr(rows, name)[0] == kind(held[name]) != kind(getattr(GREEDY, name))
        assert getattr(rows, name).dtype == kind
    assert int(rows.seed[0, 0]) << 32 | int(rows.seed[0, 1]) == sequence.seed
    assert rows.output_index[0] == 0
    rows = unpack_sampling(inputs_of(builder.build(planned(by))).sampling)
    assert rows.output_index[0] == 1


def test_bounds_that_no_count_reaches_are_packed_as_the_largest_word() -> None:
    by, builder = scheduler(), BatchBuilder(GEOMETRY, (EOS,))
    add(by, "a", (1, 2), max_tokens=2**70, min_tokens=2**31, top_k=2**70)
    batch = builder.build(planned(by))
    assert batch.options is not None
    rows = unpack_extended(GEOMETRY.extended_layout(batch.num_rows), jnp.asarray(batch.options.flat))
    assert rows.min_tokens[0] == 2**31 - 1
    plan = planned(by, Pace(decode_steps={16: 4}))
    assert plan.num_steps == 4
    stops = builder.build(plan).stops
    assert stops is not None
    assert GEOMETRY.stops_layout(16).unpack(jnp.asarray(stops))["limits"][0] == 4


def test_extended_options_are_packed_for_the_rows_that_ask_and_neutral_for_the_others() -> None:
    by, builder = scheduler(), BatchBuilder(GEOMETRY, (EOS,))
    add(by, "plain", (9,))
    asking = add(by, "asking", (6, 7), 1, repetition_penalty=1.25, min_tokens=2, logprobs=3)
    batch = builder.build(planned(by))
    assert batch.options is not None
    rows = unpack_extended(GEOMETRY.extended_layout(batch.num_rows), jnp.asarray(batch.options.flat))
    np.testing.assert_array_equal(rows.is_adjusted[:3], [False, True, False])
    np.testing.assert_array_equal(rows.slot[:2], [0, asking.batch_slot])
    np.testing.assert_array_equal(rows.repetition_penalty[:3], [1.0, 1.25, 1.0])
    np.testing.assert_array_equal(rows.min_tokens[:2], [0, 2])
    np.testing.assert_array_equal(rows.target, [NO_TARGET] * batch.num_rows)
    np.testing.assert_array_equal(rows.is_scored[:3], [False, True, False])
    assert batch.options.has_logprobs


def test_a_batch_slots_state_is_uploaded_once_after_each_start() -> None:
    by, builder = scheduler(), BatchBuilder(GEOMETRY, (EOS,))
    asking: dict[str, Any] = {"logit_bias": {3: 1.5}, "bad_token_ids": (4,), "min_tokens": 3, "stop_token_ids": (5,)}
    sequence = add(by, "a", (6, 7, 6), repetition_penalty=1.25, ignore_eos=False, **asking)
    batch = builder.build(planned(by))
    assert batch.options is not None
    (fill,) = batch.options.fills
    assert fill.slot == sequence.batch_slot
    assert dict(enumerate(fill.tokens[:8])) == {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: STOPS, 6: IN_PROMPT, 7: IN_PROMPT}
    assert fill.tokens[EOS] == STOPS
    np.testing.assert_array_equal(fill.bias[:5], np.array([0, 0, 0, 1.5, NEVER], np.float32))
    plan = planned(by)
    later = builder.build(plan)
    assert later.options is not None
    assert later.options.fills == ()
    by.commit(plan.rows[0], 6)
    by.commit(plan.rows[0], 8)
    by._preempt(sequence)
    again = builder.build(planned(by))
    assert again.options is not None
    (fill,) = again.options.fills
    assert (fill.tokens[6], fill.tokens[8]) == (IN_PROMPT + GENERATED, GENERATED)


def test_what_min_tokens_asks_for_ends_with_them() -> None:
    by, builder = scheduler(), BatchBuilder(GEOMETRY, (EOS,))
    add(by, "a", (6, 7), min_tokens=2)
    assert [builder.build(planned(by)).options is not None for _ in range(3)] == [True, True, False]


def test_scored_tokens_have_rows_of_their_own_before_the_one_that_samples() -> None:
    by, builder = scheduler(), BatchBuilder(GEOMETRY, (EOS,))
    add(by, "plain", (9,))
    add(by, "asking", (6, 7, 8), 1, repetition_penalty=2.0)
    plan = planned(by)
    plan = replace(plan, rows=(plan.rows[0], plan.rows[1]._replace(num_scored=2)))
    batch = builder.build(plan)
    assert (batch.num_sampled, batch.places) == (4, (0, 3))
    np.testing.assert_array_equal(inputs_of(batch).sampled.tokens[:4], [0, 1, 2, 3])
    assert batch.options is not None
    rows = unpack_extended(GEOMETRY.extended_layout(batch.num_rows), jnp.asarray(batch.options.flat))
    np.testing.assert_array_equal(rows.target[:4], [NO_TARGET, 7, 8, NO_TARGET])
    np.testing.assert_array_equal(rows.is_adjusted[:4], [False, False, False, True])
    np.testing.assert_array_equal(np.flatnonzero(rows.is_scored), [1, 2])
    np.testing.assert_array_equal(inputs_of(builder.build(planned(by))).sources[:2], [0, 3])


def test_several_steps_carry_when_each_row_ends() -> None:
    by, builder = scheduler(), BatchBuilder(GEOMETRY, (EOS,))
    pace = Pace(decode_steps={16: 4})
    first = add(by, "a", (1, 2), max_tokens=20, ignore_eos=False, stop_token_ids=(7,))
    second = add(by, "b", (3, 4), 1, max_tokens=3)
    plan = planned(by, pace)
    builder.build(plan)
    for row in plan.rows:
        by.commit(row, 8)
    plan = planned(by, pace)
    assert plan.num_steps == 4
    batch = builder.build(plan)
    assert batch.stops is not None
    ends = GEOMETRY.stops_layout(16).unpack(jnp.asarray(batch.stops))
    np.testing.assert_array_equal(ends["stop_ids"][:2, :3], [[EOS, 7, NOT_A_TOKEN], [NOT_A_TOKEN] * 3])
    np.testing.assert_array_equal(ends["limits"][:3], [4, 2, 0])
    np.testing.assert_array_equal(inputs_of(batch).token_ids[:2], [8, 8])
    assert [row.sequence for row in plan.rows] == [first, second]
