"""Recurrences in the CPU kernel's call, compared with the block as XLA computes it, and with themselves.

A token's bits follow from the tokens before it, however they were cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from penstock.engine.attention import GroupedBatch, attend_in_groups, attention_for
from penstock.engine.formats.packing import Packing
from penstock.engine.kernels.cpu import NativeLibrary
from penstock.engine.models import BlockConfig, MLPConfig
from penstock.engine.models.block import Block
from penstock.engine.models.config import DeltaNetConfig, ShortConvConfig
from penstock.engine.models.layers.attention import LayerInputs
from penstock.engine.models.layers.recurrence import StateBatch, StateCache
from tests.engine.models.test_packed_block import BUILD_DIR, HIDDEN, RMS, random_block
from tests.support.needs import needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.usefixtures("as_shipped"),
]
HEADS = DeltaNetConfig(2, 6, 24, 149, 4, RMS)  # with 16 lanes columns of a head are summed 8 vectors, 1, and 5 at once
MIXERS: dict[str, ShortConvConfig | DeltaNetConfig] = {
    "convolution": ShortConvConfig(HIDDEN, 3),
    "convolution with biases, of many channels": ShortConvConfig(1046, 4, bias=True),
    "delta net": HEADS,
    "delta net of small heads": DeltaNetConfig(4, 4, 6, 10, 2, replace(RMS, unit_offset=True), "swish"),
}
BLOCKS = {name: BlockConfig(mixer, MLPConfig(64), RMS) for name, mixer in MIXERS.items()}
CODES = Packing("int8", 0)
BLOCKS["delta net in int8"] = replace(
    BLOCKS["delta net"],
    mixer=replace(HEADS, value_dim=152),
    packed=tuple((("recurrence", name), CODES) for name in ("q", "k", "v", "gate", "out")),
)
NUM_SLOTS, NUM_TOKENS, MAX_SEQS = 9, 48, 6
CASES = [
    ("convolution", "bfloat16"), ("convolution with biases, of many channels", "float32"), ("delta net", "float32"),
    ("delta net", "bfloat16"), ("delta net of small heads", "float32"), ("delta net in int8", "bfloat16"),
]  # fmt: skip

States = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Part:
    """Tokens of one sequence that a step has."""

    name: str
    start: int
    count: int
    read: int  # slot
    writes: tuple[tuple[int, int], ...]  # tokens of this step behind which the state is wanted, and slots


@cache
def native() -> Any:
    return attention_for("native", "cpu", "float32", NativeLibrary(BUILD_DIR))


def inputs_of(name: str, dtype: str, count: int = 40) -> jax.Array:
    seed = sum(map(ord, name))
    return jax.random.normal(jax.random.key(seed), (count, HIDDEN), dtype)


def step_of(parts: Sequence[Part], dtype: str, num_tokens: int) -> tuple[jax.Array, dict[str, np.ndarray]]:
    """Makes a step of the tokens of all parts, one after the other, with padding behind them."""
    counts = [part.count for part in parts]
    ends = np.cumsum(counts)
    x = np.full((num_tokens, HIDDEN), 7.0, np.float32)
    arrays = {
        "positions": np.zeros(num_tokens, np.int32), "cu_q_lens": np.zeros(MAX_SEQS + 1, np.int32),
        "reads": np.zeros(MAX_SEQS, np.int32), "rows": np.full(num_tokens, MAX_SEQS - 1, np.int32),
        "offsets": np.zeros(num_tokens, np.int32), "ends": np.zeros(12, np.int32), "writes": np.zeros(12, np.int32),
    }  # fmt: skip
    arrays["cu_q_lens"][1:] = ends[-1]
    arrays["cu_q_lens"][1 : len(parts) + 1] = ends
    wanted = []
    for row, (part, end) in enumerate(zip(parts, ends, strict=True)):
        tokens = slice(end - part.count, end)
        x[tokens] = np.asarray(inputs_of(part.name, dtype), np.float32)[part.start : part.start + part.count]
        arrays["positions"][tokens] = np.arange(part.start, part.start + part.count)
        arrays["reads"][row] = part.read
        arrays["rows"][tokens], arrays["offsets"][tokens] = row, np.arange(part.count)
        wanted += [(end - part.count + token, slot) for token, slot in part.writes]
    for place, (token, slot) in enumerate(wanted[::-1]):  # in no order
        arrays["ends"][place], arrays["writes"][place] = token, slot
    arrays["num_seqs"] = np.asarray([len(parts)], np.int32)
    return jnp.asarray(x, dtype), arrays


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def attended(
    graph: nnx.GraphDef[Block], state: nnx.State[Any, Any], x: jax.Array, given: dict[str, jax.Array], states: States
) -> tuple[jax.Array, States]:
    batch = GroupedBatch(
        (jnp.zeros(x.shape[0], jnp.int32),), given["cu_q_lens"][1:], (jnp.zeros((MAX_SEQS, 1), jnp.int32),),
        given["cu_q_lens"], given["num_seqs"],
    )  # fmt: skip
    of_states = StateBatch(*(given[name] for name in ("reads", "ends", "writes", "rows", "offsets")))
    step = LayerInputs(given["positions"], {}, attend_in_groups(native(), batch, 1), states=of_states)
    y, kept = nnx.merge(graph, state).attend(x, step, StateCache(states))
    return y, kept.arrays


class Device:
    """A block with states of its own, which begin as numbers that nobody may read."""

    def __init__(self, config: BlockConfig, dtype: str, *, packed: bool) -> None:
        self._graph, self._state = nnx.split(random_block(config, dtype, packed=packed))
        self._dtype = dtype
        self.states = tuple(jnp.full((NUM_SLOTS, *array.shape), 3.0, array.dtype) for array in config.states(dtype))

    def run(self, *parts: Part, num_tokens: int = NUM_TOKENS) -> list[np.ndarray]:
        x, given = step_of(parts, self._dtype, num_tokens)
        y, self.states = attended(self._graph, self._state, x, given, self.states)
        counts = np.cumsum([part.count for part in parts])
        return np.split(np.asarray(y.astype(jnp.float32))[: counts[-1]], counts[:-1])

    def slot(self, number: int) -> list[np.ndarray]:
        return [np.asarray(array[number].astype(jnp.float32)) for array in self.states]

    def text(self) -> str:
        x, given = step_of([Part("a", 0, 3, 0, ())], self._dtype, NUM_TOKENS)
        return str(attended.lower(self._graph, self._state, x, given, self.states).as_text())


def ragged(device: Device) -> list[np.ndarray]:
    """Runs prompts, a chunk of another, states behind the middle of sequences, and decoding tokens beside them."""
    first = device.run(
        Part("a", 0, 9, 5, ((3, 1), (8, 2))), Part("b", 0, 1, 5, ((0, 3),)), Part("c", 0, 20, 5, ((19, 4),))
    )
    second = device.run(
        Part("b", 1, 1, 3, ((0, 3),)), Part("c", 20, 7, 4, ((1, 5), (6, 4))), Part("a", 9, 1, 2, ((0, 6),)),
        Part("d", 0, 2, 1, ((1, 7),)),
    )  # fmt: skip
    return [*first, *second, *device.run(Part("a", 10, 1, 6, ((0, 6),)), Part("a", 4, 5, 1, ((4, 8),)))]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_kernel_computes_what_a_block_does(name: str, dtype: str) -> None:
    config, most = BLOCKS[name], 1e-4 if dtype == "float32" else 6e-2
    if config.packed:  # XLA rounds each weight too
        most = 0.2
    packed, plain = (Device(config, dtype, packed=packed) for packed in (True, False))
    assert packed.text().count("@penstock_halves") == 1
    for got, wanted in zip(ragged(packed), ragged(plain), strict=True):
        assert np.abs(got - wanted).max() <= most * np.abs(wanted).max()
    for slot in range(1, NUM_SLOTS):
        for held, wanted in zip(packed.slot(slot), plain.slot(slot), strict=True):
            assert np.abs(held - wanted).max() <= most * max(1.0, np.abs(wanted).max())


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_token_follows_from_those_before_it(name: str, dtype: str) -> None:
    """Results are the same to the bit: in one step, token by token, in chunks beside others, and from a kept state."""
    device = Device(BLOCKS[name], dtype, packed=True)
    (whole,) = device.run(Part("a", 0, 30, 1, ((11, 2), (29, 3))))
    single = [device.run(Part("a", 0, 1, 4, ((0, 4),)))[0]]
    single += [device.run(Part("a", at, 1, 4, ((0, 4),)))[0] for at in range(1, 30)]
    np.testing.assert_array_equal(np.concatenate(single), whole)
    chunks = [
        device.run(Part("b", 0, 5, 8, ((4, 6),)), Part("a", 0, 13, 8, ((12, 5),)))[1],
        device.run(Part("a", 13, 16, 5, ((2, 7), (15, 5))), Part("b", 5, 1, 6, ((0, 6),)), num_tokens=19)[0],
        device.run(Part("b", 6, 30, 6, ()), Part("a", 29, 1, 5, ((0, 5),)))[1],
    ]
    np.testing.assert_array_equal(np.concatenate(chunks), whole)
    for one, other, third in zip(device.slot(3), device.slot(4), device.slot(5), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, third)
    np.testing.assert_array_equal(device.run(Part("a", 12, 18, 2, ()))[0], whole[12:])
    np.testing.assert_array_equal(device.run(Part("a", 16, 14, 7, ()))[0], whole[16:])


@pytest.mark.parametrize("config", [BLOCKS["convolution"], BLOCKS["delta net"]], ids=["convolution", "delta net"])
def test_no_state_is_touched_that_nobody_writes(config: BlockConfig) -> None:
    """Padding touches none, nor does a sequence that is over; the sink, slot 0, keeps what it had too."""
    device = Device(config, "float32", packed=True)
    device.run(Part("a", 0, 9, 1, ((8, 1),)), Part("b", 0, 3, 2, ((2, 2),)))
    before = [device.slot(slot) for slot in range(NUM_SLOTS)]
    device.run(Part("a", 9, 4, 1, ()), Part("b", 3, 1, 2, ((0, 4),)))
    for slot, held in enumerate(before):
        for one, other in zip(held, device.slot(slot), strict=True):
            assert (slot == 4) != np.array_equal(one, other)
