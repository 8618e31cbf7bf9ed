"""The functions of a step, as the compiler takes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.engine.attention import AttentionBackend, attend_in_groups
from penstock.engine.execution.compilation import compiled
from penstock.engine.execution.decode_loop import decode_loop
from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.sampling.extended import sample_extended
from penstock.engine.execution.sampling.logprobs import Logprobs
from penstock.engine.execution.sampling.sampling import Form
from penstock.engine.execution.sampling.sampling_state import SamplingState, filled, sampling_state
from penstock.engine.execution.sampling.vocab_shares import sample_shares
from penstock.engine.execution.sampling_rows import NUM_SAMPLING_WORDS
from penstock.engine.execution.unpacking import lengths_at, unpack_extended, unpack_sampling, unpack_step
from penstock.engine.models import Decoder, LayerCache
from penstock.engine.models.decoder import Unembedding
from penstock.engine.sharding.placement import Placement

LayerCaches = tuple[LayerCache, ...]
Params = list[jax.Array]
Rebuild = Callable[[Params], Decoder]
RebuildHead = Callable[[Params], Unembedding]
_M = TypeVar("_M", bound=nnx.Module)

_ADDRESS = re.compile(" at 0x[0-9a-f]+")  # where a function is in this process


class Step(NamedTuple):
    """A function of a step, and what it is compiled for."""

    name: str  # which one of an engine's steps it is
    function: Any  # as jax.jit returns it
    arguments: tuple[Any, ...]  # arrays, some of them abstract
    num_tokens: int = 0  # of a backbone, or of each step of a loop

    def lower(self) -> jax.stages.Lowered:
        lowered: jax.stages.Lowered = self.function.lower(*self.arguments)
        return lowered


class Steps:
    """The functions of a step, shape by shape, for a runner's arrays or for abstract ones."""

    def __init__(
        self, model: Decoder, attention: AttentionBackend, geometry: Geometry, placement: Placement | None = None
    ) -> None:
        graph, self.params, self._rebuild = _split(model)
        _, self.head_params, self._rebuild_head = _split(model.unembedding)
        self.structure = _ADDRESS.sub("", repr(graph))
        """What programs depend on of the model, besides its parameters' shapes and types."""
        self.is_stacked, self.overlaps = model.is_stacked, model.overlaps
        self._config = model.config
        self._attention = attention
        self._geometry = geometry
        self._placement = placement
        self._sharding = None if placement is None else placement.sharding()
        self._device = jax.devices()[0] if placement is None else placement.mesh.devices.flat[0]
        self._form = Form.on(self._device.platform, is_native=model.unembedding.is_native)
        self._has_places = placement is not None or self._device.platform == "tpu"

    @property
    def devices(self) -> list[jax.Device]:
        return [self._device] if self._placement is None else list(self._placement.mesh.devices.flat)

    def backbone(self, num_tokens: int, cache: LayerCaches) -> Step:
        """Returns the backbone of a token bucket; `cache` is donated."""
        step = partial(_compute_hidden, self._rebuild, self._attention, self._geometry, num_tokens)
        last_tokens = self._shape(self._geometry.max_rows)
        flat = self._shape(self._geometry.step_layout(num_tokens).size)
        shardings = None
        if self._has_places:
            shardings = (self._sharding, self._sharding, self._places(cache))
        jitted = jax.jit(step, donate_argnames=("cache",), out_shardings=shardings)
        return Step(f"backbone {num_tokens}", jitted, (self.params, cache, last_tokens, flat), num_tokens)

    def head(self, num_rows: int, *, is_extended: bool) -> Step:
        """Returns the head of a row bucket, with all sampling options or only the basic ones.

        With all options, the sampling state is donated.
        """
        function = _sample_extended_rows if is_extended else _sample_rows
        jitted = jax.jit(
            partial(function, self._rebuild_head, self._geometry, num_rows, self._placement, self._form),
            donate_argnames=("state",) if is_extended else None,
            out_shardings=self._sharding,
        )
        model, max_rows = self._config, self._geometry.max_rows
        rows = (self._shape(max_rows, model.hidden_size, dtype=model.dtype), self._shape(max_rows, NUM_SAMPLING_WORDS))
        basic = self.head_params, *rows, self._shape(1)
        if not is_extended:
            return Step(f"head {num_rows}", jitted, basic)
        masks = self._shape(num_rows, self._geometry.mask_words)
        extended = *basic, self._state(), self._options(num_rows), masks
        return Step(f"head {num_rows}, all options", jitted, extended)

    def loop(self, num_rows: int, num_steps: int, cache: LayerCaches) -> Step:
        """Returns several decode steps of a row bucket; `cache` and the sampling state are donated."""
        sampling = self._placement, self._form
        step = partial(_decode, self._rebuild, self._attention, self._geometry, num_rows, num_steps, *sampling)
        shardings = None
        if self._has_places:
            shardings = (self._sharding, self._sharding, self._sharding, self._places(cache), self._sharding)
        arguments = (
            self.params,
            cache,
            self._state(),
            self._shape(self._geometry.max_rows),
            self._shape(self._geometry.step_layout(num_rows).size),
            self._shape(self._geometry.stops_layout(num_rows).size),
            self._options(num_rows),
        )
        jitted = jax.jit(step, donate_argnames=("cache", "state"), out_shardings=shardings)
        return Step(f"loop {num_rows} x {num_steps}", jitted, arguments, num_rows)

    def fill(self) -> Step:
        """Returns filling one batch slot of the sampling state, which is donated."""
        state = self._state()
        rows = [self._shape(array.shape[1], dtype=array.dtype) for array in (state.tokens, state.bias)]
        # A function of its own, as all steps are: those of other engines in the process stay theirs.
        jitted = jax.jit(partial(filled), donate_argnames=("state",), out_shardings=self._sharding)
        return Step("fill", jitted, (state, self._shape(), *rows))

    def _places(self, cache: LayerCaches) -> Any:
        """Returns each cache array's placement and, on TPU, its axis order in memory: it must come back unchanged."""
        is_tpu = self._device.platform == "tpu"
        return jax.tree.map(lambda array: array.format if is_tpu else array.sharding, cache)

    def _state(self) -> SamplingState:
        return sampling_state(self._geometry, lambda shape, dtype: self._shape(*shape, dtype=dtype))

    def _options(self, num_rows: int) -> jax.ShapeDtypeStruct:
        return self._shape(self._geometry.extended_layout(num_rows).size)

    def compile(self, step: Step, lowered: jax.stages.Lowered | None = None) -> jax.stages.Compiled:
        """Compiles a step, which may have been lowered before."""
        return compiled(lowered or step.lower(), self._device, overlaps=self.overlaps(step.num_tokens))

    def _shape(self, *shape: int, dtype: Any = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)


def _split(module: _M) -> tuple[nnx.GraphDef[_M], Params, Callable[[Params], _M]]:
    """Splits a module into its structure, parameters and a rebuild function: plain arrays enter compiled calls much
    faster.
    """
    graph, state = nnx.split(module)
    params, structure = jax.tree.flatten(state)

    def rebuild(params: Params) -> _M:
        whole: _M = nnx.merge(graph, jax.tree.unflatten(structure, params))
        return whole

    return graph, params, rebuild


def _compute_hidden(
    rebuild: Rebuild,
    attention: AttentionBackend,
    geometry: Geometry,
    num_tokens: int,
    params: Params,
    cache: LayerCaches,
    last_tokens: jax.Array,  # i32 [max_rows]: what the step before sampled
    flat: jax.Array,  # i32: the packed step
) -> tuple[jax.Array, jax.Array, LayerCaches]:
    """Returns hidden states `[max_rows, hidden]` of the tokens to sample after, their packed parameters, the cache."""
    inputs = unpack_step(geometry.step_layout(num_tokens), flat)
    token_ids = jnp.where(inputs.sources >= 0, last_tokens[inputs.sources], inputs.token_ids)
    ragged, lengths = inputs.ragged, lengths_at(inputs.positions, inputs.rope_lengths)
    is_real = jnp.arange(num_tokens) < ragged.cu_q_lens[ragged.num_seqs[0]]
    attend = attend_in_groups(attention, ragged, geometry.page_size)
    model = rebuild(params)
    rows, cache = model(token_ids, inputs.positions, cache, attend, is_real, lengths, inputs.sampled, inputs.states)
    padding = ((0, geometry.max_rows - rows.shape[0]), (0, 0))
    return jnp.pad(rows, padding), jnp.pad(inputs.sampling, padding), cache


def _sample_rows(
    rebuild: RebuildHead,
    geometry: Geometry,
    num_rows: int,
    placement: Placement | None,
    form: Form,
    params: Params,
    rows: jax.Array,  # [max_rows, hidden]
    sampling: jax.Array,  # i32 [max_rows, words]
    num_sampled: jax.Array,  # i32 [1]: the rows after these are padding
) -> jax.Array:
    """Samples the first `num_rows` rows. Returns i32 `[max_rows]`, so that the next step has one shape for all."""
    logits = rebuild(params)(rows[:num_rows], num_sampled)
    token_ids = sample_shares(logits, unpack_sampling(sampling[:num_rows]), placement, geometry.vocab_size, form)
    return jnp.pad(token_ids, (0, geometry.max_rows - num_rows))


def _sample_extended_rows(
    rebuild: RebuildHead,
    geometry: Geometry,
    num_rows: int,
    placement: Placement | None,
    form: Form,
    params: Params,
    rows: jax.Array,
    sampling: jax.Array,
    num_sampled: jax.Array,
    state: SamplingState,
    options: jax.Array,  # i32, packed
    masks: jax.Array,  # i32 [num_rows, mask_words]
) -> tuple[jax.Array, Logprobs, SamplingState]:
    """Samples rows like `_sample_rows`, with all options."""
    head = rebuild(params)
    token_ids, logprobs, state = sample_extended(
        lambda order: head(rows[order], num_sampled),  # padding asks for nothing, so it stays behind
        unpack_sampling(sampling[:num_rows]),
        unpack_extended(geometry.extended_layout(num_rows), options),
        state,
        masks,
        placement=placement,
        form=form,
        raw_logprobs=geometry.raw_logprobs,
    )
    return jnp.pad(token_ids, (0, geometry.max_rows - num_rows)), logprobs, state


def _decode(
    rebuild: Rebuild,
    attention: AttentionBackend,
    geometry: Geometry,
    num_rows: int,
    num_steps: int,
    placement: Placement | None,
    form: Form,
    params: Params,
    cache: LayerCaches,
    state: SamplingState,
    last_tokens: jax.Array,
    flat: jax.Array,
    stops: jax.Array,
    options: jax.Array,
) -> tuple[jax.Array, Logprobs, jax.Array, LayerCaches, SamplingState]:
    loop = partial(decode_loop, rebuild(params), attention, geometry, num_rows, num_steps, placement, form)
    return loop(cache, state, last_tokens, flat, stops, options)
