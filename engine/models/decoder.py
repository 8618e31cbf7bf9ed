"""The decoder that all families share: embedding, blocks of attention and feed-forward, final norm, language-model
head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.models.attention_interface import Attend, GroupCache, LayerCache, StackedCache
from penstock.engine.models.axes import ParamPath
from penstock.engine.models.block import Block
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.layer_groups import LayerPlace, StatePlace, layer_groups
from penstock.engine.models.layer_scans import LayerRun, layer_runs, stacked_layers
from penstock.engine.models.layers.attention import LayerInputs, SumParts
from penstock.engine.models.layers.basic import norm_of, normed, scaled, soft_capped
from penstock.engine.models.layers.experts import Experts
from penstock.engine.models.layers.linear import Linear, Weight
from penstock.engine.models.layers.quantized import quantize_modules
from penstock.engine.models.layers.recurrence import StateBatch, StateCache
from penstock.engine.models.layers.rope import rotary_tables
from penstock.engine.models.residual_stream import ResidualStream, Whole


class WantedTokens(NamedTuple):
    """The tokens of a step whose hidden states are wanted."""

    tokens: jax.Array  # i32 [num_wanted]: their places in the step; those after the first `num` are padding
    num: jax.Array  # i32 [1]


class Overlap(NamedTuple):
    """How sums over devices overlap with computation."""

    pays: Callable[[int], bool]  # whether overlap pays off in a step of this many tokens
    sum_parts: SumParts


class Decoder(nnx.Module):
    """A causal language model. A call returns hidden states; `logits` turns chosen rows of them into logits.

    There is one block per layer, each traced and compiled for itself. If `stacked`, there is one per layer of the
    repeating patterns, and each parameter has a leading axis of layers: compile time then does not grow with depth.
    """

    overlap: Overlap | None = None
    """Set only for stacked layers that `ResidualStream.serve`; None: sums over devices overlap with nothing."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, stacked: bool = False) -> None:
        dtype = jnp.dtype(config.dtype)
        self.config = config
        self.is_stacked = stacked
        init = nnx.initializers.normal(0.02)
        # A Linear, with tokens as its columns, if it is quantized; None if only the head holds the table.
        self.embedding: Any = nnx.Param(init(rngs.params(), (config.vocab_rows, config.hidden_size), dtype))
        blocks = [Block(block, config.hidden_size, dtype=dtype, rngs=rngs) for block in config.blocks]
        if stacked:
            blocks = [_stack([blocks[layer] for layer in layers]) for layers in stacked_layers(config)]
        self.blocks = nnx.List(blocks)
        self.norm = norm_of(config.norm, config.hidden_size, dtype)
        self._init_per_layer(config, dtype, rngs)
        self.head = (
            None
            if config.tie_word_embeddings
            else Linear.plain(config.hidden_size, config.vocab_rows, bias=False, dtype=dtype, rngs=rngs)
        )
        quantize_modules(self, config.packed)

    def _init_per_layer(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        table = config.per_layer
        if table is None:
            self.per_layer_embedding = self.per_layer_projection = self.per_layer_norm = None
            return
        width = table.num_layers * table.size
        made = nnx.initializers.normal(0.02)(rngs.params(), (config.vocab_rows, width), dtype)
        self.per_layer_embedding = nnx.Param(made)
        self.per_layer_projection = Linear.plain(config.hidden_size, width, bias=False, dtype=dtype, rngs=rngs)
        self.per_layer_norm = norm_of(table.norm, table.size, dtype)

    def __call__(
        self,
        token_ids: jax.Array,  # i32 [num_tokens]
        positions: jax.Array,  # i32 [num_tokens]
        # One per array of a page (`layer_groups`), kind by kind, then one per layer that keeps states; stacked, one per
        # kind of pages, then one per kind of states.
        caches: tuple[LayerCache, ...],
        attend: Attend,
        is_real: jax.Array | None = None,  # bool [num_tokens]: which tokens are not padding; None: all
        lengths: jax.Array | None = None,  # i32 [num_tokens]: for the model's length rule; None: up to each token
        wanted: WantedTokens | None = None,  # None: all tokens, in order
        states: StateBatch | None = None,  # None: the model keeps none
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """Returns the final hidden states `[num_wanted, hidden]` and the caches with what this step adds."""
        x = scaled(self._embedded(token_ids), self.config.embedding_scale)
        vectors = self._layer_vectors(x, token_ids)
        ropes = dict.fromkeys(attention.rope for attention in self.config.attentions)
        rotary = {rope: rotary_tables(positions, rope, lengths) for rope in ropes if rope is not None}
        step = LayerInputs(positions, rotary, attend, is_real, states=states)
        if self.is_stacked:
            x, caches = self._scan(x, step, caches, vectors)
            return self.norm(x if wanted is None else x[wanted.tokens]), caches
        x, caches = self._layers(x, step, caches, wanted, vectors)
        return self.norm(x), caches

    def _layers(
        self,
        x: jax.Array,
        step: LayerInputs,
        caches: tuple[LayerCache, ...],
        wanted: WantedTokens | None,
        vectors: jax.Array | None,  # [layers, num_tokens, size]
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        written, groups = list(caches), layer_groups(self.config)
        for layer, (block, place) in enumerate(zip(self.blocks, groups.places, strict=True)):
            before = x
            step = step if vectors is None else step._replace(per_layer=vectors[layer])
            if isinstance(place, StatePlace):
                array = groups.state_array(place)
                x, states = block.attend(before, step, StateCache(written[array]))
                written[array] = states.arrays
            else:
                array = groups.page_array(place)
                x, cache = block.attend(before, step, GroupCache(written[array], place.group))
                written[array] = cache.pages
            if block is self.blocks[-1]:
                x, before, step = _taken(x, before, step, wanted)
            x = block.feed_forward(x, before, step)
        return x, tuple(written)

    def _scan(
        self, x: jax.Array, step: LayerInputs, caches: tuple[LayerCache, ...], vectors: jax.Array | None
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """Computes all layers in one loop per run. The loop carries the caches, so that they are updated in place."""
        groups, blocks, in_parts = layer_groups(self.config), iter(self.blocks), self.overlap is not None
        num_kinds = len(groups.page_kinds)
        sizes = [kind.size for kind in groups.page_kinds] + [kind.num_layers for kind in groups.state_kinds]
        # For each cache, the number of pages in one of its arrays, or of slots in one layer.
        strides = [jax.tree.leaves(held)[0].shape[0] // size for held, size in zip(caches, sizes, strict=True)]
        stream: Whole | ResidualStream = (
            ResidualStream.of(x, 2 if self.overlaps(x.shape[0]) else 1) if in_parts else Whole.of(x)
        )
        if self.overlap is not None:
            step = step._replace(sum_parts=self.overlap.sum_parts)
        for run in layer_runs(self.config):
            split = [_split(next(blocks), all_linears=in_parts) for _ in run.pattern]
            graphs, wholes, stacks = zip(*split, strict=True)
            places = [_places([groups.places[layer] for layer in run.layers(i)]) for i in range(len(run.pattern))]

            def layers(
                carry: _Carry,
                inputs: tuple[Any, Any, Any],
                graphs: Sequence[nnx.GraphDef[Block]] = graphs,
                wholes: Sequence[Any] = wholes,
                places: Sequence[_Places] = places,
                run: LayerRun = run,
            ) -> tuple[_Carry, None]:
                i, stream, caches = carry
                for at, ((graph, whole, held), params, array, group) in enumerate(
                    zip(zip(graphs, wholes, places, strict=True), *inputs, strict=True)
                ):
                    number = held.array + i if array is None else array
                    own = step._replace(layer=i) if jax.tree.leaves(whole) else step
                    if vectors is not None:
                        own = own._replace(per_layer=vectors[run.first + at + i * len(run.pattern)])
                    block = _select_layer(nnx.merge(graph, whole, params), i, all_linears=in_parts)
                    if held.has_states:
                        place = num_kinds + held.kind
                        states = StateCache(caches[place], number * strides[place])
                        stream, states = stream.through(block, own, states)
                        written = states.arrays
                    else:
                        place = held.kind
                        pages = StackedCache(caches[place], number * strides[place])
                        cache = GroupCache(pages, held.group if group is None else group)
                        stream, cache = stream.through(block, own, cache)
                        written = cache.pages.pages
                    caches = (*caches[:place], written, *caches[place + 1 :])
                return (i + 1, stream, caches), None

            inputs = stacks, tuple(held.arrays for held in places), tuple(held.groups for held in places)
            (_, stream, caches), _ = jax.lax.scan(layers, (jnp.int32(0), stream, caches), inputs, length=run.repeats)
        return stream.end(), caches

    def _layer_vectors(self, x: jax.Array, token_ids: jax.Array) -> jax.Array | None:
        """Returns each layer's vectors of the tokens, `[layers, num_tokens, size]`, from their embeddings `x`."""
        config = self.config.per_layer
        if config is None or self.per_layer_embedding is None or self.per_layer_projection is None:
            return None
        shape = (token_ids.shape[0], config.num_layers, config.size)
        known = scaled(self.per_layer_embedding[...][token_ids], config.scale).reshape(shape)
        projected = scaled(self.per_layer_projection(x), config.projection_scale).reshape(shape)
        return scaled(normed(self.per_layer_norm, projected) + known, config.sum_scale).swapaxes(0, 1)

    def overlaps(self, num_tokens: int) -> bool:
        """Whether a step of `num_tokens` overlaps sums over devices with computation."""
        return self.overlap is not None and self.overlap.pays(num_tokens)

    def _embedded(self, token_ids: jax.Array) -> jax.Array:  # i32 [num_tokens] -> [num_tokens, hidden]
        table: Any = self.embedding
        if isinstance(table, Linear):
            return table.columns(token_ids).astype(self.config.dtype)
        if self.head is not None and table is None:
            return self.head.columns(token_ids)
        rows: jax.Array = table[...][token_ids]
        return rows[:, : self.config.hidden_size]  # it may be padded

    def logits(self, hidden: jax.Array, num_real: jax.Array | None = None) -> jax.Array:
        """Returns logits as `Unembedding` does."""
        return self.unembedding(hidden, num_real)

    @property
    def is_native(self) -> bool:
        """Whether the CPU's kernels compute all matmuls: the result of a row then does not depend on other rows."""
        modules: Iterable[tuple[Any, Any]] = nnx.iter_modules(self)
        weights = (module for path, module in modules if is_matmul(path, module))
        return self.unembedding.is_native and all(weight.held.is_native for weight in weights)

    @property
    def unembedding(self) -> Unembedding:
        """The part that computes logits, as a module of its own with the same parameters."""
        return Unembedding(self.config, self.embedding if self.head is None else self.head)


class Unembedding(nnx.Module):
    """Turns hidden states into logits. A call with only these parameters has less overhead than one with the whole
    model's.
    """

    def __init__(self, config: ModelConfig, table: Any) -> None:
        self.config = config
        self.table = table  # the head, or the embedding if the two are tied

    @property
    def is_native(self) -> bool:
        """Whether logits come from the CPU's kernels, in the memory of one device."""
        return not isinstance(self.table, nnx.Param) and self.table.held.is_native

    def __call__(self, hidden: jax.Array, num_real: jax.Array | None = None) -> jax.Array:
        """Returns logits, f32 `[num_rows, vocab_rows]`, of hidden states `[num_rows, hidden]`.

        The first `num_real`, i32 `[1]`, are wanted: those of the others may be undefined. None: all are.
        """
        if isinstance(self.table, nnx.Param):
            logits = jnp.einsum("rh,vh->rv", hidden, self.table[...], preferred_element_type=jnp.float32)
        else:
            logits = self.table.wide(hidden) if num_real is None else self.table.wide_first(hidden, num_real)
        return soft_capped(scaled(logits, self.config.logit_scale), self.config.logit_soft_cap)


def is_matmul(path: ParamPath, module: nnx.Module) -> bool:
    """Checks whether steps multiply by the module at `path`; tokens are only looked up in an embedding."""
    return isinstance(module, Weight) and path != ("embedding",)


def _taken(
    x: jax.Array, before: jax.Array, step: LayerInputs, wanted: WantedTokens | None
) -> tuple[jax.Array, jax.Array, LayerInputs]:
    """Returns the inputs of the last feed-forward.

    Without a choice of tokens a barrier makes programs round these inputs as the choice would: XLA leaves out a
    rounding if the next operation is wider again.
    """
    if wanted is not None:
        return x[wanted.tokens], before[wanted.tokens], select_wanted(step, wanted)
    barrier: Any = jax.lax.optimization_barrier
    x, before = barrier((x, before))
    return x, before, step


def select_wanted(step: LayerInputs, wanted: WantedTokens) -> LayerInputs:
    """Restricts the step to the wanted tokens for the last feed-forward: nothing after it needs the others."""
    is_real = jnp.arange(wanted.tokens.shape[0]) < wanted.num
    vectors = None if step.per_layer is None else step.per_layer[wanted.tokens]
    return step._replace(is_real=is_real, num_rows=wanted.num, per_layer=vectors)


def _split(block: Block, *, all_linears: bool) -> tuple[nnx.GraphDef[Block], Any, Any]:
    """Splits a stack of layers into its structure, the parameters that each layer gets whole, and those that it gets a
    slice of.
    """
    reads_stack = isinstance(block.mlp, Experts) and block.mlp.experts.is_read_in_stack
    linears = _read_in_stack(block, all_linears=all_linears)

    def is_whole(path: Any, _: Any) -> bool:
        if path[:-1] in linears:
            return bool(path[-1] != "bias")
        return bool(reads_stack and path[:2] == ("mlp", "experts") and path[-1] == "kernel")

    graph, *states = nnx.split(block, is_whole, ...)
    return graph, states[0], states[1]


_Carry: TypeAlias = tuple[jax.Array, Whole | ResidualStream, tuple[LayerCache, ...]]
"""The state carried from layer to layer of a loop: its number, the residual stream, pages and states."""


def _read_in_stack(block: Block, *, all_linears: bool) -> dict[Any, Weight]:
    """Returns the matmuls that get the weights of all layers, by their paths."""
    found = {path: module for path, module in nnx.iter_modules(block) if isinstance(module, Weight)}
    return {path: weight for path, weight in found.items() if all_linears or weight.held.is_read_in_stack}


def _select_layer(block: Block, layer: jax.Array | None, *, all_linears: bool) -> Block:
    """Tells matmuls which layer's weights to use; experts learn it with their rows."""
    for linear in _read_in_stack(block, all_linears=all_linears).values():
        if isinstance(linear, Linear):
            linear.layer = layer
    return block


class _Places(NamedTuple):
    """Location of the keys and values, or states, of the layers that one loop computes."""

    array: int  # of the first layer: its array in a page, or its number among layers with such states
    arrays: jax.Array | None  # i32 [layers]; None if they count up, which a loop does without reading memory
    group: int = 0  # of the first
    groups: jax.Array | None = None  # i32 [layers]; None if all are in one group
    kind: int = 0  # of their pages or states
    has_states: bool = False  # instead of pages


def _places(places: Sequence[LayerPlace | StatePlace]) -> _Places:
    """Returns the location for layers of one kind of pages or states."""
    arrays = tuple(place.number if isinstance(place, StatePlace) else place.array for place in places)
    is_counting = arrays == tuple(range(arrays[0], arrays[0] + len(arrays)))
    counted = None if is_counting else jnp.asarray(arrays, jnp.int32)
    groups = [place.group for place in places if isinstance(place, LayerPlace)]
    if not groups:
        return _Places(arrays[0], counted, kind=places[0].kind, has_states=True)
    of_each = jnp.asarray(groups, jnp.int32) if len(set(groups)) > 1 else None
    return _Places(arrays[0], counted, groups[0], of_each, places[0].kind)


def _stack(blocks: Sequence[Block]) -> Block:
    """Returns one block whose parameters are those of `blocks`, stacked."""
    states = [nnx.state(block) for block in blocks]
    block: Block = nnx.merge(nnx.graphdef(blocks[0]), jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
    return block
