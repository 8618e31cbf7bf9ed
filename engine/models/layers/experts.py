"""Mixtures of experts (Shazeer et al., arXiv 1701.06538): a router chooses some of many feed-forwards for a token."""

from __future__ import annotations

from itertools import chain

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.models.config import ClampedSwiGLU, ExpertsConfig, NormConfig
from penstock.engine.models.layers.basic import ACTIVATIONS, GatedMLP, norm_of, scaled
from penstock.engine.models.layers.linear import GroupedLinear, Linear, Plain, RowGroups, present


class Branches(nnx.Module):
    """The norms of a mixture that is a branch beside the shared feed-forward (Gemma 4).

    One norms the residual stream for the experts, another norms it for the router, and one norms each branch's result.
    The router's logits are divided by the square root of the number of features.
    """

    def __init__(self, config: NormConfig, hidden: int, *, dtype: jnp.dtype) -> None:
        made = [norm_of(config, hidden, dtype) for _ in range(4)]
        self.norm, self.router_norm, self.out_norm, self.shared_out_norm = made
        self.router_scale = hidden**-0.5


class Experts(nnx.Module):
    """The weighted sum of the results of a token's experts, plus that of the shared feed-forward, if there is one."""

    def __init__(self, config: ExpertsConfig, hidden: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.router = Linear.plain(hidden, config.num_experts, bias=config.bias, dtype=dtype, rngs=rngs)
        self.correction = nnx.Param(jnp.zeros((config.num_experts,), jnp.float32)) if config.has_correction else None
        self.experts = GroupedMLP(config, hidden, dtype=dtype, rngs=rngs)
        self.shared = None if config.shared is None else GatedMLP(config.shared, hidden, dtype=dtype, rngs=rngs)
        self.shared_gate = (
            Linear.plain(hidden, 1, bias=False, dtype=dtype, rngs=rngs) if config.has_shared_gate else None
        )
        self.expert_scale = nnx.Param(jnp.ones((config.num_experts,), dtype)) if config.has_expert_scales else None
        self.branches = None if config.beside is None else Branches(config.beside, hidden, dtype=dtype)
        self.config = config

    def __call__(
        self,
        x: jax.Array,  # [num_tokens, hidden]
        is_real: jax.Array | None = None,  # bool [num_tokens]: padding costs no expert time; None: there is none
        layer: jax.Array | None = None,  # i32 []: the layer, if all layers' experts are held; None: one layer's are
        stream: jax.Array | None = None,  # [num_tokens, hidden]: the input of the norm that gave `x`; only for branches
    ) -> jax.Array:
        branches = self.branches
        if branches is None or stream is None:
            y = self._mixed(x, x, is_real, layer)
            return y if self.shared is None else y + self._apply_shared(self.shared, x)
        routed = scaled(branches.router_norm(stream), branches.router_scale)
        y = branches.out_norm(self._mixed(branches.norm(stream), routed, is_real, layer))
        return y if self.shared is None else branches.shared_out_norm(self._apply_shared(self.shared, x)) + y

    def _mixed(self, x: jax.Array, routed: jax.Array, is_real: jax.Array | None, layer: jax.Array | None) -> jax.Array:
        """Computes the experts' weighted sum for `x`; the router chooses by `routed`."""
        correction = None if self.correction is None else self.correction[...]
        chosen, weights = self.experts.route(self.router.wide(routed), correction, self.config)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[...].astype(weights.dtype)[chosen]
        if is_real is not None:
            chosen = jnp.where(is_real[:, None], chosen, self.experts.num_experts)
        return self.experts.mix(x, chosen, weights, layer).astype(x.dtype)

    def _apply_shared(self, shared: GatedMLP, x: jax.Array) -> jax.Array:
        if self.shared_gate is None:
            return shared(x)
        gate = jax.nn.sigmoid(self.shared_gate.wide(x))
        return gate.astype(x.dtype) * shared(x)


MOST_FETCHED_AHEAD = 32 * 2**20
"""Upper limit, in bytes per device, of one of a layer's expert matrices that is cut out of the stack of all layers.

On v5e, compiled XLA fetches 50 MB into VMEM ahead of use. On v6e it copies some matrices of that size within HBM, and
on both it copies ones of 100 MB. Above the limit a grouped matmul gets the whole stack, and reads the experts that have
rows. Smaller matrices are cut out, because a grouped matmul's setup takes time for each group of the stack, empty ones
included.
"""


class GroupedMLP(nnx.Module):
    """A GatedMLP per expert."""

    def __init__(self, config: ExpertsConfig, hidden: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        num_experts, intermediate = config.num_experts + config.num_padding, config.intermediate_size

        def linear(num_in: int, num_out: int) -> GroupedLinear:
            return GroupedLinear.plain(num_experts, num_in, num_out, bias=config.bias, dtype=dtype, rngs=rngs)

        self.gate = linear(hidden, intermediate)
        self.up: GroupedLinear | None = linear(hidden, intermediate)
        self.down = linear(intermediate, hidden)
        self.num_experts = num_experts
        self.activation, self.clamped = config.activation, config.clamped

    def __call__(self, rows: jax.Array, groups: RowGroups) -> jax.Array:  # as GroupedLinear; f32
        results = [linear.held.split(linear(rows, groups, rows.dtype)) for linear in present(self.gate, self.up)]
        gate, *up = chain.from_iterable(results)
        return self.down(self.gated(gate, up[0]) if up else gate, groups)  # joined: their kernel has gated

    def gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        if self.clamped is not None:
            return clamped_swiglu(gate, up, self.clamped)
        return ACTIVATIONS[self.activation](gate) * up

    @property
    def is_read_in_stack(self) -> bool:
        """Whether a layer of a stack gets the matrices of all layers. Quantized ones are unpacked by layer."""
        linears = present(self.gate, self.up, self.down)
        kernels = [linear.kernel for linear in linears if isinstance(linear.held, Plain)]
        sizes = [kernel.size // kernel.shape[0] * kernel.dtype.itemsize for kernel in kernels]
        return max(sizes, default=0) // self.num_shares > MOST_FETCHED_AHEAD

    @property
    def num_shares(self) -> int:
        """Number of devices that share the experts."""
        return 1

    def route(
        self, logits: jax.Array, correction: jax.Array | None, config: ExpertsConfig
    ) -> tuple[jax.Array, jax.Array]:
        """Calls the function `route`."""
        return route(logits, correction, config)

    def mix(self, x: jax.Array, chosen: jax.Array, weights: jax.Array, layer: jax.Array | None = None) -> jax.Array:
        """Calls the function `mix`."""
        return mix(self, x, chosen, weights, self.num_experts, layer)


def clamped_swiglu(gate: jax.Array, up: jax.Array, config: ClampedSwiGLU) -> jax.Array:
    gate, up = jnp.minimum(gate, config.limit), jnp.clip(up, -config.limit, config.limit)
    return (up + 1) * (gate * jax.nn.sigmoid(config.alpha * gate))


def route(logits: jax.Array, correction: jax.Array | None, config: ExpertsConfig) -> tuple[jax.Array, jax.Array]:
    """Returns each token's experts, i32 `[num_tokens, num_chosen]`, and their weights in f32, from f32 `[num_tokens,
    experts]`.

    Ties go to the expert with the lower number; `torch.topk` leaves them open.
    """
    is_plain = config.scores == "softmax" and correction is None and config.num_groups == 1
    chosen, weights = _route_by_softmax(logits, config) if is_plain else _route_by_scores(logits, correction, config)
    return chosen, weights if config.scale == 1.0 else weights * config.scale


def _route_by_softmax(logits: jax.Array, config: ExpertsConfig) -> tuple[jax.Array, jax.Array]:
    """Chooses by logits, which have the order of their softmax: the first chosen is the largest of all."""
    best, chosen = jax.lax.top_k(logits, config.num_chosen)
    if config.normalized:
        powers = jnp.exp(best - best[:, :1])
        return chosen, powers / jnp.sum(powers, axis=1, keepdims=True)
    powers = jnp.exp(logits - best[:, :1])
    return chosen, jnp.take_along_axis(powers, chosen, axis=1) / jnp.sum(powers, axis=1, keepdims=True)


def _route_by_scores(
    logits: jax.Array, correction: jax.Array | None, config: ExpertsConfig
) -> tuple[jax.Array, jax.Array]:
    scores = jax.nn.sigmoid(logits) if config.scores == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    choice = scores if correction is None else scores + correction
    if config.num_groups > 1:
        choice = _mask_other_groups(choice, config)
    _, chosen = jax.lax.top_k(choice, config.num_chosen)
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if config.normalized:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + config.added_to_sum)
    return chosen, weights


def _mask_other_groups(choice: jax.Array, config: ExpertsConfig) -> jax.Array:
    """Sets the experts of all but the best groups to -inf. A group's score is the sum of its two best experts."""
    grouped = choice.reshape(choice.shape[0], config.num_groups, -1)
    best_two, _ = jax.lax.top_k(grouped, 2)
    _, groups = jax.lax.top_k(best_two.sum(axis=-1), config.groups_chosen)
    is_best = jnp.any(groups[:, :, None] == jnp.arange(config.num_groups), axis=1)
    return jnp.where(is_best[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


def mix(
    experts: GroupedMLP,
    x: jax.Array,  # [num_tokens, hidden]
    chosen: jax.Array,  # i32 [num_tokens, num_chosen]; numbers without an expert add nothing
    weights: jax.Array,  # f32 [num_tokens, num_chosen]
    num_experts: int,
    layer: jax.Array | None = None,  # i32 []: as in Experts
) -> jax.Array:
    """Sorts the tokens by expert, so that each expert's weights are read once, and sums the weighted results in f32.

    A token's sum is taken in the order of its choice, whatever other tokens there are.
    """
    num_tokens, num_chosen = chosen.shape
    numbers = chosen.reshape(-1)
    order = jnp.argsort(numbers, stable=True)
    group_sizes = jnp.sum(numbers[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    sorted_rows = experts(x[order // num_chosen], RowGroups(group_sizes, layer))
    rows = sorted_rows[jnp.argsort(order)].reshape(num_tokens, num_chosen, -1)
    is_held = (chosen < num_experts)[:, :, None]
    return jnp.sum(jnp.where(is_held, rows * weights[:, :, None], 0.0), axis=1)
