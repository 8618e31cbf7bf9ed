"""The TPU sampling kernel, interpreted and compared with the XLA form; and compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.engine.execution.sampling.draw_kernel import draw
from penstock.engine.execution.sampling.prefix_sums import LANES, prefix_lanes, prefix_sums
from penstock.engine.execution.sampling.sampling import _draw, _sample_by_xla, survey
from penstock.engine.execution.sampling_rows import (
    NEVER,
    NOT_A_TOKEN,
    NOTHING_LEFT,
    PARAMETERS,
    SamplingRows,
)
from penstock.engine.request import SamplingParams
from penstock.tools.plan.device.topology import devices_of
from tests.engine.execution.test_sampling import KINDS, rows
from tests.support.needs import needs_libtpu
from tests.support.parameter_values import a_value
from tests.support.patience import slow

MIXED: dict[str, Any] = {
    "temperature": [1.0, 0.0, 0.7, 1.5, 1.0, 0.3],
    "top_k": [0, 5, 40, 0, 3, 2**31 - 1],
    "top_p": [1.0, 0.5, 0.95, 0.8, 1.0, 0.999],
    "min_p": [0.0, 0.5, 0.01, 0.0, 0.3, 1e-4],
}
MIXED |= {name: [getattr(SamplingParams(), name), a_value(name)] for name in PARAMETERS if name not in MIXED}


def by_kernel(
    scores: np.ndarray, of_rows: SamplingRows, num_shares: int = 1, block_rows: int = 8, strip: int = 256
) -> np.ndarray:
    count, vocab = scores.shape
    share = -(-vocab // num_shares)
    padded = np.pad(scores, ((0, 0), (0, num_shares * share - vocab)), constant_values=7.0)  # it must not be drawn
    shares = np.ascontiguousarray(padded.reshape(count, num_shares, share).swapaxes(0, 1))
    drawing = partial(draw, vocab_size=vocab, interpret=True, block_rows=block_rows, strip=strip)
    return np.asarray(jax.jit(drawing)(shares, of_rows))


def by_xla(scores: np.ndarray, of_rows: SamplingRows) -> np.ndarray:
    drawing = partial(_sample_by_xla, vocab_size=scores.shape[1])
    return np.asarray(jax.jit(drawing)(scores[None], of_rows))


@pytest.mark.parametrize(
    ("vocab", "count", "strip"), [(1, 3, 128), (60, 20, 256), (128, 20, 256), (5003, 20, 512), (33_000, 9, 2048)]
)
def test_it_draws_what_xla_draws(vocab: int, count: int, strip: int) -> None:
    scores = np.random.default_rng(vocab).normal(size=(count, vocab)).astype(np.float32) * 3
    scores[0] = np.round(scores[0])  # equal maxima, and equals at the filters' edges
    of_rows = rows(count, **{name: np.resize(values, count) for name, values in MIXED.items()})
    np.testing.assert_array_equal(by_kernel(scores, of_rows, strip=strip), by_xla(scores, of_rows))


@pytest.mark.parametrize("num_shares", [slow(2), 3, 8])
def test_shares_of_the_vocabulary_change_nothing(num_shares: int) -> None:
    scores = np.random.default_rng(0).normal(size=(12, 5003)).astype(np.float32) * 3
    of_rows = rows(12, **{name: np.resize(values, 12) for name, values in MIXED.items()})
    np.testing.assert_array_equal(by_kernel(scores, of_rows, num_shares), by_kernel(scores, of_rows))


def test_rows_whose_candidates_fit_draw_the_same_beside_a_row_whose_do_not() -> None:
    """Filters are bisected over a few candidates, or over all tokens if one row of a block has too many."""
    scores = np.random.default_rng(0).normal(size=(16, 20_000)).astype(np.float32) * 4
    scores[7::8] *= 0.01
    values = {"top_k": np.resize([0, 40, 7], 16), "top_p": np.resize([0.9, 0.7, 1.0, 0.95], 16)}
    values["top_k"][7::8], values["top_p"][7::8] = 0, 0.9
    of_rows = rows(16, **values)
    together, alone = (by_kernel(scores, of_rows, block_rows=size, strip=2048) for size in (8, 1))
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(together, by_xla(scores, of_rows))


def test_of_many_tokens_that_are_forbidden_none_is_drawn() -> None:
    """Fewer are left than top_k, so the threshold is that of forbidden ones."""
    scores = np.full((3, 20_000), NEVER, np.float32)
    scores[:, [5, 9_000, 9_001]] = 1.0
    drawn = by_kernel(scores, rows(3, top_k=40, top_p=0.9), strip=2048)
    assert set(drawn) <= {5, 9_000, 9_001}


@pytest.mark.usefixtures("as_shipped")
def test_hardly_any_draw_differs_from_that_of_xla() -> None:
    """The two forms round their sums differently."""
    count, vocab = 20_000, 700
    rng = np.random.default_rng(1)
    scores = (rng.normal(size=(count, vocab)) * rng.uniform(0.5, 4, size=(count, 1))).astype(np.float32)
    values = {"top_k": rng.integers(0, 100, count), "top_p": rng.uniform(0.5, 1.1, count).clip(max=1)}
    of_rows = rows(count, temperature=rng.uniform(0.3, 1.5, count), min_p=rng.uniform(0, 0.1, count), **values)
    assert (by_kernel(scores, of_rows, block_rows=20_000, strip=1024) != by_xla(scores, of_rows)).sum() <= 1


def test_sums_are_associated_as_in_a_parallel_prefix_sum() -> None:
    x = np.random.default_rng(0).random((5, 3 * LANES)).astype(np.float32)
    expected = np.asarray(jax.lax.associative_scan(jnp.add, jnp.asarray(x), axis=-1))
    columns = [jnp.asarray(x[:, i : i + 1]) for i in range(21)]
    np.testing.assert_array_equal(jnp.concatenate(prefix_sums(columns), axis=1), expected[:, :21])

    def kernel(x: Any, before: Any, end: Any, out: Any) -> None:
        out[...] = prefix_lanes(x[...], before[...], end[...])

    behind_two = x[:, 2 * LANES :], expected[:, 2 * LANES - 1 :][:, :1], expected[:, -1:]
    shape = jax.ShapeDtypeStruct((5, LANES), jnp.float32)
    found = pl.pallas_call(kernel, out_shape=shape, interpret=True)(*behind_two)
    np.testing.assert_array_equal(found, expected[:, 2 * LANES :])


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_at_the_edge(kind: str) -> None:
    scores = np.random.default_rng(0).normal(size=(16, 300)).astype(np.float32)
    scores[1, 299], scores[2, 5], scores[3, 0] = np.nan, np.inf, -np.nan
    scores[4], scores[5] = -np.inf, NEVER
    scores[6], scores[6, [7, 9]] = -np.inf, 0.5
    scores[7] *= 1e30
    drawn = by_kernel(scores, rows(16, **KINDS[kind]))
    np.testing.assert_array_equal(drawn[1:6], [NOT_A_TOKEN] * 3 + [NOTHING_LEFT] * 2)
    assert drawn[6] in ({7} if kind == "greedy" else {7, 9})
    np.testing.assert_array_equal(drawn, by_xla(scores, rows(16, **KINDS[kind])))


@pytest.mark.parametrize(
    "values",
    [
        {"top_p": 1e-45},
        {"min_p": 1.0},
        {"top_k": 1},
        {"temperature": 1e-38},
        {"temperature": 1e-20, "top_p": 1e-45, "min_p": 1.0, "top_k": 1},
    ],
    ids=str,
)
def test_the_strictest_values_leave_the_most_likely_token(values: dict[str, Any]) -> None:
    scores = np.random.default_rng(0).normal(size=(32, 300)).astype(np.float32)
    np.testing.assert_array_equal(by_kernel(scores, rows(32, **values)), scores.argmax(-1))


def test_a_draw_that_no_sum_exceeds_is_the_most_likely_token() -> None:
    """Temperatures next to 0 make weights that are not numbers; both forms then take the greedy token."""
    scores = np.random.default_rng(0).normal(size=(8, 300)).astype(np.float32) * np.float32(1e30)
    of_rows, logits = rows(8, temperature=1e-30), jnp.asarray(scores)
    np.testing.assert_array_equal(by_kernel(scores, of_rows), _draw(logits, of_rows, survey(logits).greedy))


@needs_libtpu
@pytest.mark.usefixtures("as_shipped_elsewhere")
@pytest.mark.parametrize(
    ("topology", "num_shares", "num_rows", "vocab"),
    [("v5e:2x2", 4, 4, 128_256), ("v6e:2x2", 1, 20, 50_257), ("tpu7x:2x2x1", 8, 32, 262_144), ("v5e:2x2", 3, 9, 1000)],
)
def test_it_compiles_for_tpus(topology: str, num_shares: int, num_rows: int, vocab: int) -> None:
    mesh = Mesh(np.array(devices_of(topology)), ("all",))
    whole = NamedSharding(mesh, PartitionSpec())
    share = -(-vocab // num_shares)
    of_rows, scores = rows(num_rows), jax.ShapeDtypeStruct((num_shares, num_rows, share), jnp.float32, sharding=whole)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), of_rows)
    drawing = jax.shard_map(
        partial(draw, vocab_size=vocab),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    assert "draw_tokens" in (jax.jit(drawing).lower(scores, abstract).compile().as_text() or "")
