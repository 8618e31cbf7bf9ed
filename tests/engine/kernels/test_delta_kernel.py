"""The TPU kernel of the gated delta rule, interpreted on CPU, against the loop over tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from penstock.engine.kernels.tpu.delta_rule import _BEGINS, _GOES_ON, _HAS_PAST, _IS_LEFT, _IS_REAL, TokenSlots
from penstock.engine.models.config import DeltaNetConfig, NormConfig
from penstock.engine.models.layers.delta_net import DeltaInputs, DeltaNet
from penstock.engine.models.layers.recurrence import StateBatch, StateCache
from penstock.engine.sharding.states import KernelDeltaNet, has_kernel
from tests.engine.models.test_packed_recurrence import Part, step_of

pytestmark = pytest.mark.versions

CONFIG = DeltaNetConfig(2, 6, 128, 128, 4, NormConfig(1e-6, scales_in_f32=True))
NUM_TOKENS, NUM_SLOTS, FIRST_SLOT = 24, 9, 3
States = tuple[jax.Array, ...]


class Device:
    """Computes what is between the matmuls of a delta net. Its states begin as values that nobody may read."""

    def __init__(self, *, interpret: Any = None) -> None:
        net = DeltaNet(CONFIG, 16, dtype=jnp.dtype("bfloat16"), rngs=nnx.Rngs(0))
        keys = iter(jax.random.split(jax.random.key(1), 40))
        spread = jax.tree.map(
            lambda leaf: leaf + 0.3 * jax.random.normal(next(keys), leaf.shape, leaf.dtype), nnx.state(net)
        )
        nnx.update(net, spread)
        if interpret is not None:
            net = KernelDeltaNet(net, None, interpret=interpret)
        self._run = jax.jit(net.through)
        kinds = CONFIG.states("bfloat16")
        self.states: States = tuple(
            jnp.full((FIRST_SLOT + NUM_SLOTS, *array.shape), 3.0, array.dtype) for array in kinds
        )

    def run(self, *parts: Part) -> list[np.ndarray]:
        _, given = step_of(parts, "bfloat16", NUM_TOKENS)
        inputs = inputs_of(parts)
        batch = StateBatch(*(jnp.asarray(given[name]) for name in ("reads", "ends", "writes", "rows", "offsets")))
        y, cache = self._run(inputs, jnp.asarray(given["positions"]), batch, StateCache(self.states, FIRST_SLOT))
        self.states = cache.arrays
        counts = np.cumsum([part.count for part in parts])
        assert not np.any(np.asarray(y[counts[-1] :], np.float32))
        return np.split(np.asarray(y, np.float32)[: counts[-1]], counts[:-1])

    def slot(self, number: int) -> list[np.ndarray]:
        return [np.asarray(array[FIRST_SLOT + number].astype(jnp.float32)) for array in self.states]


def inputs_of(parts: tuple[Part, ...]) -> DeltaInputs:
    """Makes inputs; a token's follow from its sequence's name and its position."""
    shapes = {"q": (2, 128), "k": (2, 128), "v": (6, 128), "gate": (6, 128), "beta": (6,), "decay": (6,)}
    made = []
    for place, (name, shape) in enumerate(shapes.items()):
        dtype = "float32" if name in ("beta", "decay") else "bfloat16"
        rows = []
        for part in parts:
            key = jax.random.fold_in(jax.random.key(ord(part.name)), place)
            rows.append(jax.random.normal(key, (40, *shape), dtype)[part.start : part.start + part.count])
        rows.append(jnp.ones((NUM_TOKENS - sum(part.count for part in parts), *shape), dtype))
        made.append(jnp.concatenate(rows))
    return DeltaInputs(*made)


STEPS = [
    (Part("a", 0, 9, 5, ((3, 1), (8, 2))), Part("b", 0, 1, 5, ((0, 3),)), Part("c", 0, 12, 5, ((11, 4),))),
    (Part("b", 1, 1, 3, ((0, 3),)), Part("c", 12, 7, 4, ((1, 5), (6, 4))), Part("a", 9, 1, 2, ((0, 6),))),
    (Part("a", 10, 1, 6, ((0, 6),)), Part("a", 4, 5, 1, ((4, 7),)), Part("d", 0, 2, 8, ((0, 8), (1, 1)))),
]


def test_the_kernel_computes_what_the_loop_does() -> None:
    kernel, loop = Device(interpret=True), Device()
    for parts in STEPS:
        for got, wanted in zip(kernel.run(*parts), loop.run(*parts), strict=True):
            assert np.abs(got - wanted).max() <= 2e-2 * np.abs(wanted).max()
    for slot in range(1, NUM_SLOTS):
        for held, wanted in zip(kernel.slot(slot), loop.slot(slot), strict=True):
            assert np.abs(held - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_a_token_follows_from_those_before_it() -> None:
    """Results are the same to the bit: whole, token by token, in chunks beside others, and from a state kept on the
    way.
    """
    device = Device(interpret=True)
    (whole,) = device.run(Part("a", 0, 20, 1, ((11, 2), (19, 3))))
    single = [device.run(Part("a", at, 1, 4, ((0, 4),)))[0] for at in range(20)]
    np.testing.assert_array_equal(np.concatenate(single), whole)
    chunks = [
        device.run(Part("b", 0, 5, 8, ((4, 6),)), Part("a", 0, 13, 8, ((12, 5),)))[1],
        device.run(Part("a", 13, 7, 5, ((2, 7), (6, 5))), Part("b", 5, 1, 6, ((0, 6),)))[0],
    ]
    np.testing.assert_array_equal(np.concatenate(chunks), whole)
    for one, other, third in zip(device.slot(3), device.slot(4), device.slot(5), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, third)
    np.testing.assert_array_equal(device.run(Part("a", 12, 8, 2, ((7, 2),)))[0], whole[12:])


def test_states_that_nobody_writes_stay() -> None:
    device = Device(interpret=True)
    before = [device.slot(slot) for slot in range(-FIRST_SLOT, NUM_SLOTS)]
    device.run(*STEPS[0])
    for slot, held in enumerate(before, -FIRST_SLOT):
        if slot not in (0, 1, 2, 3, 4):  # the sink too takes what it likes
            for one, other in zip(held, device.slot(slot), strict=True):
                np.testing.assert_array_equal(one, other)


def test_no_transfer_crosses_another() -> None:
    """Blocks are transferred beside the computation, and results take the place of what was read."""
    device = Device(interpret=pltpu.InterpretParams(dma_execution_mode="on_wait", detect_races=True))
    plain = Device(interpret=True)
    for parts in STEPS:
        for got, wanted in zip(device.run(*parts), plain.run(*parts), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-2, atol=2e-2)
    assert interpreter.races is not None
    assert not interpreter.races.races_found


def test_slots_of_tokens() -> None:
    parts = (Part("a", 0, 3, 5, ((1, 2),)), Part("b", 4, 2, 6, ((0, 7), (1, 6))))
    _, given = step_of(parts, "float32", 7)
    names = ("positions", "reads", "ends", "writes", "rows", "offsets")
    positions, reads, ends, writes, rows, offsets = (jnp.asarray(given[name]) for name in names)
    slots = TokenSlots.of(positions, reads, ends, writes, rows, offsets, first_slot=10)
    real, past = _IS_REAL, _HAS_PAST
    assert slots.reads[:5].tolist() == [15, 15, 15, 16, 16]
    assert slots.writes.tolist() == [12, 12, 10, 17, 16, 10, 10]
    assert slots.flags[:2].tolist() == [real | _BEGINS, real | past | _IS_LEFT]
    assert slots.flags[3:5].tolist() == [real | past | _BEGINS | _IS_LEFT, real | past | _GOES_ON]
    assert not any(flag & real for flag in (*slots.flags[2:3].tolist(), *slots.flags[5:].tolist()))


@pytest.mark.parametrize(
    "changes",
    [{"key_dim": 64}, {"value_dim": 192}, {"activation": "gelu"}, {"num_value_heads": 130}],
    ids=["keys are not tiles", "values are not tiles", "another activation", "a state that does not fit"],
)
def test_what_has_no_kernel(changes: dict[str, Any]) -> None:
    assert has_kernel(CONFIG, None)
    assert not has_kernel(replace(CONFIG, **changes), None)
