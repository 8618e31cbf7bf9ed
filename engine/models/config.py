"""The parts of a decoder of any supported family, as frozen values: a model states its blocks, one per layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias

from penstock.engine.errors import ConfigError
from penstock.engine.formats.packing import Packing
from penstock.engine.length_rule import LengthRule

PackedMatmuls = tuple[tuple[tuple[str, ...], Packing], ...]
"""The matmuls with quantized weights, by their path in the layer or decoder, and the packing of each."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base and, for long contexts, how its frequencies are scaled.

    `kind` is one of `default`, `linear`, `dynamic`, `llama3`, `yarn`, `longrope`, `proportional`; the other fields are
    read by the kinds that name them.
    """

    dim: int  # number of leading features of a head that rotate; an odd one is rounded up
    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope: one for each pair of features
    long_factors: tuple[float, ...] = ()  # longrope
    interleaved: bool = False  # each feature is paired with its neighbour, not with one in the other half
    num_turning: int = 0  # proportional: number of leading pairs that rotate; the others do not

    @property
    def length_rule(self) -> LengthRule | None:
        """The rule by which frequencies depend on length; None if they are the same for every length."""
        is_ruled = self.kind in ("dynamic", "longrope")
        return LengthRule(self.original_max_position, switches=self.kind == "longrope") if is_ruled else None


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Scaling of queries with position: by `1 + beta * log(1 + position // original_max_position)`."""

    beta: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class NormConfig:
    """A norm: root-mean-square, or with `kind` `layer` one that subtracts the mean too. Neither has a bias."""

    eps: float
    kind: str = "rms"
    unit_offset: bool = False  # rms: weights are stored minus 1
    scales_in_f32: bool = False  # rms: multiplies by the weights before rounding to the model's type
    has_weights: bool = True  # rms


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Grouped-query attention over everything before a token, or over a sliding window.

    A layer may read the keys and values of an earlier one. It then has neither keys and values nor pages of its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None  # None: no positional encoding
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormConfig | None = None  # for each head's queries and keys
    qk_projection_norm: NormConfig | None = None  # for all heads' queries together, and all keys together
    sliding_window: int | None = None  # number of last tokens that a token sees, itself included; None: all before it
    sinks: bool = False  # each head has a learned score that takes a share of the weights but has no value
    scale: float | None = None  # of scores; None: head_dim ** -0.5
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)
    query_scale: QueryScale | None = None
    has_kv_scales: bool = False  # fp8 pages are scaled per KV head, not per token
    kv_copies: int = 1  # copies of each of the checkpoint's KV heads, if there are more devices than heads
    has_gate: bool = False  # the result is multiplied by learned sigmoids, one per feature
    v_norm: NormConfig | None = None  # for each head's values
    has_v: bool = True  # a matmul for values; otherwise values are the result of the matmul for keys
    kv_layer: int | None = None  # the layer whose keys and values are read; None: its own

    @property
    def has_kv(self) -> bool:
        """Whether the layer has keys and values of its own."""
        return self.kv_layer is None

    @property
    def num_mixed(self) -> int:
        """Number of features that the output matmul reads."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class StateArray:
    """One array that a layer keeps for a whole sequence, of the same size however long the sequence is."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]  # logical axes, as for parameters: parallelism splits by them

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """A gated convolution over a token and the few before it, each channel by itself, in place of attention.

    A token's features give three vectors of `channels`: an input, a gate before the convolution, and one after it. The
    state of a sequence is its last inputs, which later tokens convolve over.
    """

    channels: int
    num_taps: int  # number of tokens that a result depends on, its own included: at least 2
    bias: bool = False  # of the projections and of the convolution

    def states(self, dtype: str) -> tuple[StateArray, ...]:
        """Returns the state in a model of type `dtype`: the inputs of the last `num_taps - 1` tokens, in order."""
        return (StateArray((self.num_taps - 1, self.channels), dtype, (None, "channels")),)

    @property
    def num_mixed(self) -> int:
        """Number of features that the output matmul reads."""
        return self.channels


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """A gated delta rule in place of attention: each head stores values by keys in a matrix.

    Queries, keys and values pass through a short convolution first. A key head serves `num_value_heads / num_key_heads`
    adjacent value heads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # per head; queries have it too
    value_dim: int  # of a head
    num_taps: int  # of the convolution: at least 2
    norm: NormConfig  # for each head's result
    activation: str = "silu"  # after the convolution

    def states(self, dtype: str) -> tuple[StateArray, ...]:
        """Returns the states in a model of type `dtype`: the convolution inputs of queries, keys and values, then the
        matrices.
        """
        kept = self.num_taps - 1
        keys = StateArray((kept, self.num_key_heads, self.key_dim), dtype, (None, "key_heads", None))
        values = StateArray((kept, self.num_value_heads, self.value_dim), dtype, (None, "value_heads", None))
        matrices = (self.num_value_heads, self.key_dim, self.value_dim)
        return keys, keys, values, StateArray(matrices, "float32", ("value_heads", None, None))

    @property
    def num_mixed(self) -> int:
        """Number of features that the output matmul reads."""
        return self.num_value_heads * self.value_dim


Recurrence: TypeAlias = ShortConvConfig | DeltaNetConfig
"""The alternatives to attention: mixers that keep states and have no pages."""


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """A gated feed-forward."""

    intermediate_size: int
    activation: str = "silu"
    bias: bool = False


NormPlacement = Literal["before", "after", "around"]
"""Position of a layer's norms: on the inputs of attention and feed-forward, on their results, or on both."""


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """Computes `gate * sigmoid(alpha * gate) * (up + 1)`, with the gate capped at `limit` and `up` clamped to within
    `limit` of 0.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of gated feed-forwards. A router chooses a few of them for each token."""

    num_experts: int
    num_chosen: int  # for each token
    intermediate_size: int  # of each expert
    activation: str = "silu"
    clamped: ClampedSwiGLU | None = None  # in place of `activation`
    bias: bool = False  # of the router, and of each expert
    scores: str = "softmax"  # of the router's logits: over all experts, or `sigmoid`, for each by itself
    normalized: bool = False  # the scores of the chosen are divided by their sum
    added_to_sum: float = 1e-20  # to the sum that scores are divided by; not if only softmax decides (`route`)
    scale: float = 1.0  # of the weights
    has_correction: bool = False  # a learned value per expert is added to its score, only for the choice
    num_groups: int = 1  # groups of experts; only the best `groups_chosen` of them are eligible
    groups_chosen: int = 1
    shared: MLPConfig | None = None  # a feed-forward that every token goes through as well
    has_shared_gate: bool = False  # the shared feed-forward's result is scaled by a learned sigmoid
    num_padding: int = 0  # experts that no token can choose, so that all devices hold equally many
    beside: NormConfig | None = None  # the norm of branches, if the mixture is one beside `shared` (`Branches`)
    has_expert_scales: bool = False  # each expert's weight is multiplied by a learned value


@dataclass(frozen=True, slots=True)
class PerLayerConfig:
    """What a layer adds to the residual stream from a per-token vector that belongs to this layer alone."""

    size: int  # of the vector
    activation: str  # of the gate that it is multiplied by


@dataclass(frozen=True, slots=True)
class PerLayerTable:
    """The source of all layers' per-token vectors: a table, and a matmul of the token's embedding."""

    num_layers: int
    size: int  # of the vector of one layer
    norm: NormConfig  # for each vector from the matmul
    scale: float  # of the table's rows
    projection_scale: float  # of the matmul's result
    sum_scale: float  # of the sum of both


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """One layer. A stacked decoder compiles equal layers once."""

    mixer: AttentionConfig | Recurrence  # how a token reads the tokens before it
    mlp: MLPConfig | ExpertsConfig
    norm: NormConfig
    norm_placement: NormPlacement = "before"
    parallel: bool = False  # attention and feed-forward read the same norm, and both are added to its input
    residual_scale: float = 1.0  # of what attention and feed-forward add
    packed: PackedMatmuls = ()
    per_layer: PerLayerConfig | None = None  # added after the feed-forward
    has_scalar: bool = False  # the layer's result is multiplied by one learned number

    @property
    def attention(self) -> AttentionConfig:
        """The layer's attention.

        Raises:
            TypeError: the layer keeps a state instead.
        """
        if not isinstance(self.mixer, AttentionConfig):
            raise TypeError(f"a layer of {self.mixer} has no attention")
        return self.mixer

    def with_attention(self, **changes: Any) -> Self:
        """Returns the block with fields of its attention changed; a block without attention is returned as it is."""
        return replace(self, mixer=replace(self.attention, **changes)) if self.has_attention else self

    @property
    def has_attention(self) -> bool:
        return isinstance(self.mixer, AttentionConfig)

    @property
    def has_pages(self) -> bool:
        """Whether the layer has attention with keys and values of its own."""
        return isinstance(self.mixer, AttentionConfig) and self.mixer.has_kv

    def states(self, dtype: str) -> tuple[StateArray, ...]:
        """Returns what the layer keeps of a sequence besides pages, in a model of type `dtype`."""
        return () if isinstance(self.mixer, AttentionConfig) else self.mixer.states(dtype)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: embedding, blocks, final norm, head.

    Raises:
        ConfigError: no block has attention, their length rules differ, or one reads the keys and values of a layer
            that has none, or has some of another shape, window or rope.
    """

    family: str
    vocab_size: int
    hidden_size: int
    blocks: tuple[BlockConfig, ...]
    norm: NormConfig
    max_position: int
    tie_word_embeddings: bool
    dtype: str = "bfloat16"  # of weights and activations; norms, softmax and logits are f32
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None  # scaled logits become soft_cap * tanh(logit / soft_cap)
    packed: PackedMatmuls = ()  # of the parameters around the blocks
    kv_dtype: str | None = None  # type for keys and values that the checkpoint asks for; None: it asks for none
    num_draft_layers: int = 0  # layers that checkpoints hold after the others, and that are not computed
    vocab_padding: int = 0  # extra rows of embedding and head, so that devices divide them evenly
    per_layer: PerLayerTable | None = None  # None: no layer has per-token vectors

    def __post_init__(self) -> None:
        if not self.attentions:
            raise ConfigError("a model needs layers with attention, one at least")
        for layer, block in enumerate(self.blocks):
            if block.has_attention and not block.attention.has_kv:
                self._check_shared(layer, block.attention)
        if len(self._length_rules) > 1:
            raise ConfigError(f"all layers' rotary positions need the same rule of lengths, not {self._length_rules}")

    def _check_shared(self, layer: int, attention: AttentionConfig) -> None:
        source = attention.kv_layer
        own = self.blocks[source] if source is not None and 0 <= source < layer else None
        if own is None or not own.has_pages or _read_by(own.attention) != _read_by(attention):
            raise ConfigError(f"layer {layer} cannot read the keys and values of layer {source}")

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """Attention of the layers that have it, in order."""
        return tuple(block.attention for block in self.blocks if block.has_attention)

    @property
    def has_states(self) -> bool:
        """Whether any layer keeps states."""
        return len(self.attentions) < len(self.blocks)

    @property
    def kept(self) -> tuple[AttentionConfig, ...]:
        """Attention of the layers that have pages, in order."""
        return tuple(attention for attention in self.attentions if attention.has_kv)

    @property
    def is_packed(self) -> bool:
        """Whether any of its weights are quantized."""
        return bool(self.packed) or any(block.packed for block in self.blocks)

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def vocab_rows(self) -> int:
        """Number of rows of embedding and head, padding included."""
        return self.vocab_size + self.vocab_padding

    @property
    def length_rule(self) -> LengthRule | None:
        return next(iter(self._length_rules), None)

    @property
    def _length_rules(self) -> set[LengthRule]:
        ropes = {attention.rope for attention in self.attentions}
        return {rope.length_rule for rope in ropes if rope is not None and rope.length_rule is not None}

    def first_layers(self, num_layers: int) -> Self:
        """Returns a model of only the first layers."""
        return replace(self, blocks=self.blocks[:num_layers])


def _read_by(attention: AttentionConfig) -> tuple[object, ...]:
    """Returns what must be equal in two layers if one reads the keys and values of the other."""
    return attention.num_kv_heads, attention.head_dim, attention.sliding_window, attention.rope
