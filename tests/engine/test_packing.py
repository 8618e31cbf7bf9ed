"""A plan, packed into one array and unpacked as the device sees it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.packing import Batch, BatchBuilder
from penstock.engine.execution.sampling import NEVER, NOT_A_TOKEN
from penstock.engine.execution.unpacking import StepInputs, unpack_extended, unpack_sampling, unpack_step
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling.pace import Pace
from penstock.engine.scheduling.page_pool import PagePool
from penstock.engine.scheduling.scheduler import Scheduler, StepPlan
from penstock.engine.scheduling.sequence import Sequence

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
    assert (batch.extended, batch.stops) == (None, None)
    np.testing.assert_array_equal(inputs.token_ids[:8], [1, 2, 3, 4, 5, 6, 7, 8])
    np.testing.assert_array_equal(inputs.positions[:8], [0, 1, 2, 3, 4, 0, 1, 2])
    np.testing.assert_array_equal(inputs.sources, [-1] * 16)
    np.testing.assert_array_equal(inputs.ragged.cu_q_lens[:4], [0, 5, 8, 8])
    np.testing.assert_array_equal(inputs.ragged.kv_lens[:3], [5, 3, 0])
    np.testing.assert_array_equal(inputs.ragged.num_seqs, [2])
    for place, sequence in enumerate((first, second)):
        held = len(sequence.pages)
        np.testing.assert_array_equal(inputs.ragged.page_indices[place, :held], sequence.pages)
        np.testing.assert_array_equal(inputs.ragged.page_indices[place, held:], 0)
    slots = [first.pages[i // 4] * 4 + i % 4 for i in range(5)] + [second.pages[0] * 4 + i for i in range(3)]
    np.testing.assert_array_equal(inputs.ragged.slots, slots + [0] * 8)  # padding writes to the sink
    np.testing.assert_array_equal(inputs.sampled_tokens[:2], [4, 7])  # the last of each


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
    pages = inputs_of(builder.build(plan)).ragged.page_indices[0]
    np.testing.assert_array_equal(pages, [*short.pages, *[0] * (len(pages) - len(short.pages))])


def test_sampling_parameters_arrive_to_the_bit() -> None:
    by, builder = scheduler(), BatchBuilder(GEOMETRY, (EOS,))
    params = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "top_k": 2**40, "seed": 5}
    sequence = add(by, "a", (1, 2, 3), **params)
    rows = unpack_sampling(inputs_of(builder.build(planned(by))).sampling)
    assert (rows.temperature[0], rows.top_p[0], rows.min_p[0]) == (np.float32(0.7), np.float32(0.9), np.float32(0.05))
    assert rows.top_k[0] == 2**31 - 1
    assert int(rows.seed[0, 0]) << 32 | int(rows.seed[0, 1]) == sequence.seed
    assert rows.output_index[0] == 0
    rows = unpack_sampling(inputs_of(builder.build(planned(by))).sampling)
    assert rows.output_index[0] == 1


def test_extended_options_are_packed_for_the_rows_that_ask_and_neutral_for_the_others() -> None:
    by, builder = scheduler(), BatchBuilder(GEOMETRY, (EOS,))
    add(by, "plain", (9,))
    asking = {"logit_bias": {3: 1.5}, "bad_token_ids": (4,), "min_tokens": 2, "stop_token_ids": (5,)}
    add(by, "asking", (6, 7), 1, repetition_penalty=1.25, ignore_eos=False, **asking)
    batch = builder.build(planned(by))
    assert batch.extended is not None
    layout = GEOMETRY.extended_layout(batch.num_rows)
    rows = unpack_extended(layout, jnp.asarray(batch.extended), jnp.zeros(16, jnp.int32))
    np.testing.assert_array_equal(rows.repetition_penalty[:2], [1.0, 1.25])
    np.testing.assert_array_equal(rows.history[0], [50] * 40)  # an id past the vocabulary
    np.testing.assert_array_equal(rows.history[1, :3], [6, 7, 50])
    np.testing.assert_array_equal(rows.bias_ids[1, :3], [3, 4, 50])
    np.testing.assert_array_equal(rows.bias[1, :2], np.array([1.5, NEVER], np.float32))
    np.testing.assert_array_equal(rows.blocked_ids[1, :3], [EOS, 5, 50])
    batch = builder.build(planned(by))  # its first token is in flight
    assert batch.extended is not None
    rows = unpack_extended(layout, jnp.asarray(batch.extended), jnp.asarray([*range(20, 36)], jnp.int32))
    np.testing.assert_array_equal(rows.history[1, :4], [6, 7, 21, 50])


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
