"""What a decoder of any supported family is made of, as frozen values: a model states its blocks, one per layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias

from penstock.engine.errors import ConfigError
from penstock.engine.formats.packing import Packing
from penstock.engine.length_rule import LengthRule

Packed = tuple[tuple[tuple[str, ...], Packing], ...]
"""The matmuls whose weights are quantized, by where they are in their layer or decoder, and how they are held."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base and, for long contexts, how its frequencies are scaled.

    `kind` is one of `default`, `linear`, `dynamic`, `llama3`, `yarn`, `longrope`, `proportional`; the other fields are
    read by the kinds that name them.
    """

    dim: int  # features of a head that rotate, from its beginning; an odd one is rounded up
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
    short_factors: tuple[float, ...] = ()  # longrope: of each pair of features
    long_factors: tuple[float, ...] = ()  # longrope
    interleaved: bool = False  # each feature is paired with its neighbour, not with the one half of them further on
    num_turning: int = 0  # proportional: of the pairs, how many turn, from the first on; the others stand still

    @property
    def length_rule(self) -> LengthRule | None:
        """None: the same frequencies for every length."""
        is_ruled = self.kind in ("dynamic", "longrope")
        return LengthRule(self.original_max_position, switches=self.kind == "longrope") if is_ruled else None


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries grow with their position: `1 + beta * log(1 + position // original_max_position)` times as large."""

    beta: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class NormConfig:
    """A norm: root-mean-square, or `kind` `layer`, which takes the mean away too. Neither has a bias."""

    eps: float
    kind: str = "rms"
    unit_offset: bool = False  # rms: its weights are stored less 1
    scales_in_f32: bool = False  # rms: multiplied by its weights before it is rounded to the model's type
    has_weights: bool = True  # rms


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Grouped-query attention over everything before a token, or over a sliding window.

    A layer may read the keys and values of an earlier one: then it has none of its own, and no pages.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None  # None: no positions
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormConfig | None = None  # of each head's queries and keys
    qk_projection_norm: NormConfig | None = None  # of the queries of all heads together, and of the keys
    sliding_window: int | None = None  # a token sees itself and the others of the last so many; None: all before it
    sinks: bool = False  # each head has a learned score that takes its share of the weights, and has no value
    scale: float | None = None  # of scores; None: head_dim ** -0.5
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)
    query_scale: QueryScale | None = None
    has_kv_scales: bool = False  # what pages of fp8 hold is divided by scales of each KV head, not of each token
    kv_copies: int = 1  # times that each of the checkpoint's KV heads is in `num_kv_heads`, for more devices than heads
    has_gate: bool = False  # what is attended is scaled by learned sigmoids, one of each of its features
    v_norm: NormConfig | None = None  # of each head's values
    has_v: bool = True  # a matmul for values; else they are the keys, as that of the keys gives them
    kv_layer: int | None = None  # the layer whose keys and values it reads; None: it has its own

    @property
    def has_kv(self) -> bool:
        """Whether it has keys and values of its own."""
        return self.kv_layer is None

    @property
    def num_mixed(self) -> int:
        """Features that its last matmul reads."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class StateArray:
    """What a layer keeps of all of a sequence's tokens together: one array, of the same size however many they are."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]  # logical, as of parameters: what parallelism splits

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """A gated convolution over a token and the few before it, each channel by itself, in the place of attention.

    From a token's features come three vectors of `channels`: an input, a gate in front of the convolution, and one
    behind it. What it keeps of a sequence is the last inputs, which later tokens convolve over.
    """

    channels: int
    num_taps: int  # tokens that one of its results follows from, itself included: 2 at least
    bias: bool = False  # of the projections and of the convolution

    def states(self, dtype: str) -> tuple[StateArray, ...]:
        """Of a model of type `dtype`: the inputs of the last `num_taps - 1` tokens, in order."""
        return (StateArray((self.num_taps - 1, self.channels), dtype, (None, "channels")),)

    @property
    def num_mixed(self) -> int:
        """Features that its last matmul reads."""
        return self.channels


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """A gated delta rule in the place of attention: heads that remember values by keys, in a matrix each.

    Queries, keys and values go through a short convolution first. A key head serves `num_value_heads / num_key_heads`
    value heads that stand together.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head, of queries too
    value_dim: int  # of a head
    num_taps: int  # of the convolution: 2 at least
    norm: NormConfig  # of each head's result
    activation: str = "silu"  # behind the convolution

    def states(self, dtype: str) -> tuple[StateArray, ...]:
        """Of a model of type `dtype`: what the convolution reads of queries, keys and values; and the matrices."""
        kept = self.num_taps - 1
        keys = StateArray((kept, self.num_key_heads, self.key_dim), dtype, (None, "key_heads", None))
        values = StateArray((kept, self.num_value_heads, self.value_dim), dtype, (None, "value_heads", None))
        matrices = (self.num_value_heads, self.key_dim, self.value_dim)
        return keys, keys, values, StateArray(matrices, "float32", ("value_heads", None, None))

    @property
    def num_mixed(self) -> int:
        """Features that its last matmul reads."""
        return self.num_value_heads * self.value_dim


Recurrence: TypeAlias = ShortConvConfig | DeltaNetConfig
"""What may be in the place of attention: layers that keep states, and no pages."""


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """A gated feed-forward."""

    intermediate_size: int
    activation: str = "silu"
    bias: bool = False


NormPlacement = Literal["before", "after", "around"]
"""Where a layer's norms stand: on what attention and feed-forward take in, on what they give, or both."""


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """`gate * sigmoid(alpha * gate) * (up + 1)`, of a gate up to `limit` and an up within `limit` of 0."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of gated feed-forwards, of which a router chooses a few for each token."""

    num_experts: int
    num_chosen: int  # for each token
    intermediate_size: int  # of each expert
    activation: str = "silu"
    clamped: ClampedSwiGLU | None = None  # in place of `activation`
    bias: bool = False  # of the router, and of each expert
    scores: str = "softmax"  # of the router's logits, over all experts, or `sigmoid`, each for itself
    normalized: bool = False  # the scores of the chosen are divided by their sum
    scale: float = 1.0  # of the weights
    has_correction: bool = False  # a learned value of each expert is added to its score, for choosing alone
    num_groups: int = 1  # of experts, of which only the best `groups_chosen` can be chosen from
    groups_chosen: int = 1
    shared: MLPConfig | None = None  # a feed-forward that every token goes through as well
    has_shared_gate: bool = False  # the shared one's result is scaled by a learned sigmoid
    num_padding: int = 0  # experts that no token can choose, so that devices hold equally many
    beside: NormConfig | None = None  # the mixture is a branch beside `shared`: see `Branches`; None: it is not
    has_expert_scales: bool = False  # the weight of each expert is multiplied by a learned value of its own


@dataclass(frozen=True, slots=True)
class PerLayerConfig:
    """What a layer adds of a vector of each token that is this layer's alone, beside the residual stream."""

    size: int  # of the vector
    activation: str  # of the gate that it is multiplied by


@dataclass(frozen=True, slots=True)
class PerLayerTable:
    """Where all layers' vectors of a token come from: a table, and a matmul of its embedding."""

    num_layers: int
    size: int  # of the vector of one layer
    norm: NormConfig  # of each vector that the matmul gives
    scale: float  # of the table's rows
    projection_scale: float  # of what the matmul gives
    sum_scale: float  # of both together


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """One layer. Layers that are equal are compiled once, where a decoder is stacked."""

    mixer: AttentionConfig | Recurrence  # what a token learns of those before it by
    mlp: MLPConfig | ExpertsConfig
    norm: NormConfig
    norm_placement: NormPlacement = "before"
    parallel: bool = False  # attention and feed-forward read the same norm, and both are added to what it read
    residual_scale: float = 1.0  # of what attention and feed-forward add
    packed: Packed = ()
    per_layer: PerLayerConfig | None = None  # what is added behind the feed-forward
    has_scalar: bool = False  # all that the layer gives is multiplied by one learned number

    @property
    def attention(self) -> AttentionConfig:
        """Of a layer that has pages.

        Raises:
            TypeError: it keeps a state instead.
        """
        if not isinstance(self.mixer, AttentionConfig):
            raise TypeError(f"a layer of {self.mixer} has no attention")
        return self.mixer

    def with_attention(self, **changes: Any) -> Self:
        """With other values in fields of its attention; a layer without attention as it is."""
        return replace(self, mixer=replace(self.attention, **changes)) if self.has_attention else self

    @property
    def has_attention(self) -> bool:
        return isinstance(self.mixer, AttentionConfig)

    @property
    def has_pages(self) -> bool:
        """Whether it has attention with keys and values of its own."""
        return isinstance(self.mixer, AttentionConfig) and self.mixer.has_kv

    def states(self, dtype: str) -> tuple[StateArray, ...]:
        """What it keeps of a sequence beside pages, in a model of type `dtype`."""
        return () if isinstance(self.mixer, AttentionConfig) else self.mixer.states(dtype)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: embedding, blocks, final norm, head.

    Raises:
        ConfigError: no block has attention, their rules of lengths differ, or one reads the keys and values of a layer
            that has none, or others than it could read.
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
    packed: Packed = ()  # of what is around the blocks
    kv_dtype: str | None = None  # that the checkpoint's keys and values are to be kept in; None: it says nothing
    num_draft_layers: int = 0  # that checkpoints hold behind the others, and that nothing here computes
    vocab_padding: int = 0  # rows of embedding and head beyond the vocabulary, for devices that do not divide it
    per_layer: PerLayerTable | None = None  # None: no layer is given a vector of its own

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
        """Of the layers that have it, in order."""
        return tuple(block.attention for block in self.blocks if block.has_attention)

    @property
    def has_states(self) -> bool:
        """Whether any layer keeps states."""
        return len(self.attentions) < len(self.blocks)

    @property
    def kept(self) -> tuple[AttentionConfig, ...]:
        """Of the layers that have pages, in order."""
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
        """Of embedding and head, padding included."""
        return self.vocab_size + self.vocab_padding

    @property
    def length_rule(self) -> LengthRule | None:
        return next(iter(self._length_rules), None)

    @property
    def _length_rules(self) -> set[LengthRule]:
        ropes = {attention.rope for attention in self.attentions}
        return {rope.length_rule for rope in ropes if rope is not None and rope.length_rule is not None}

    def of_layers(self, num_layers: int) -> Self:
        """A model of the first layers alone."""
        return replace(self, blocks=self.blocks[:num_layers])


def _read_by(attention: AttentionConfig) -> tuple[object, ...]:
    """What layers have in common of which one reads the keys and values of the other."""
    return attention.num_kv_heads, attention.head_dim, attention.sliding_window, attention.rope
