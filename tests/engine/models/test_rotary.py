"""The two forms of rotary positions: pairs of features, and a matmul with a permutation, as on TPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.engine.models.layers.rope import _rotate_by_matmul, _rotate_pairs


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [16, 12])
def test_both_forms_give_the_same(dim: int, *, interleaved: bool) -> None:
    """Both rotate all features of a head, or the first ones alone."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(5, 3, 16)), jnp.float32)
    angles = jnp.asarray(rng.uniform(0, 100, size=(5, dim // 2)), jnp.float32)
    tables = jnp.cos(angles), jnp.sin(angles)
    pairs, matmul = (form(x, *tables, interleaved=interleaved) for form in (_rotate_pairs, _rotate_by_matmul))
    np.testing.assert_allclose(matmul, pairs, atol=1e-6)
    if dim < 16:
        np.testing.assert_array_equal(matmul[..., dim:], x[..., dim:])


def test_bfloat16_is_permuted_exactly() -> None:
    x = jax.random.normal(jax.random.key(0), (4, 2, 8), jnp.bfloat16)
    quarter = jnp.zeros((4, 4)), jnp.ones((4, 4))
    turned = _rotate_by_matmul(x, *quarter, interleaved=False)
    np.testing.assert_array_equal(turned, jnp.concatenate([-x[..., 4:], x[..., :4]], axis=-1))
