"""Reads what families share from a Hugging Face `config.json`: the parts of blocks, and what is around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from penstock.engine.errors import ConfigError, shown
from penstock.engine.models.config import AttentionConfig, BlockConfig, MLPConfig, ModelConfig, NormConfig, RopeConfig
from penstock.engine.models.hf.config import HFConfig, checked_dtype
from penstock.engine.models.hf.rope import read_rope
from penstock.engine.models.layers.basic import ACTIVATIONS

# Fields that transformers reads for every family, though none declares them, with the values that change nothing.
CHANGES_ANY_FAMILY: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "per_layer_config": (None, {}),
        "is_causal": (None, True),
        "attention_chunk_size": (None,),
        "kv_sharing_modes": (None,),
    }
)


def read_model(
    config: HFConfig,
    *,
    family: str,
    dtype: str,
    blocks: Iterable[BlockConfig],
    norm: NormConfig,
    is_read: str | None = None,
) -> ModelConfig:
    """Returns a model of these blocks and this final norm. `is_read` is a field of CHANGES_ANY_FAMILY that the family
    reads.

    Raises:
        ConfigError: a field is missing, or asks for a computation that is not implemented.
    """
    for name, harmless in CHANGES_ANY_FAMILY.items():
        if name != is_read:
            config.refuse_unless(name, *harmless)
    return ModelConfig(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        blocks=tuple(blocks),
        norm=norm,
        max_position=config.integer("max_position_embeddings"),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        dtype=checked_dtype(dtype),
    )


def read_norm(config: HFConfig) -> NormConfig:
    return NormConfig(eps=config.number("rms_norm_eps"))


def read_attention(
    config: HFConfig,
    *,
    rope: Callable[[HFConfig, int], RopeConfig] = read_rope,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: NormConfig | None = None,
) -> AttentionConfig:
    """Reads attention over everything before a token, the same in all layers. `rope` is called with the head size.

    Raises:
        ConfigError: a field is missing, contradicts another, or asks for a computation that is not implemented.
    """
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads = {num_heads} is not a multiple of num_key_value_heads = {num_kv_heads}"
        )
    head_dim = _head_dim(config, hidden_size, num_heads)
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope(config, head_dim),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
    )


def read_mlp(config: HFConfig, *, bias: bool = False, activation: str = "hidden_act") -> MLPConfig:
    """Reads a gated feed-forward. `activation` is the name of the activation's field."""
    return MLPConfig(config.integer("intermediate_size"), read_activation(config, activation), bias=bias)


def sliding(block: BlockConfig, windows: Iterable[int | None]) -> list[BlockConfig]:
    """Returns one such block for each window."""
    return [block.with_attention(sliding_window=window) for window in windows]


def without_positions(block: BlockConfig) -> BlockConfig:
    """Returns the block without rotary positions."""
    return block.with_attention(rope=None)


def full_layers(config: HFConfig, block: BlockConfig) -> list[BlockConfig]:
    """Returns one such block for each layer, for a family without windows; fields that ask for one are refused."""
    windows = every_layer(config, None)
    config.refuse_unless("sliding_window", None)  # transformers' cache obeys it in any family
    return sliding(block, windows)


def every_layer(config: HFConfig, window: int | None) -> tuple[int | None, ...]:
    """Returns the same window for all layers; a `layer_types` that says otherwise is refused."""
    num_layers = config.integer("num_hidden_layers")
    kind = "full_attention" if window is None else "sliding_attention"
    config.refuse_unless("layer_types", None, [kind] * num_layers)
    return (window,) * num_layers


def mixed_layers(config: HFConfig) -> tuple[int | None, ...]:
    """Applies Qwen's rule: `layer_types` says which layers slide; without it, those from `max_window_layers` on do."""
    window = optional_window(config)
    first = config.get("max_window_layers")
    if window is None or config.get("layer_types") is not None:
        return listed_layers(config, window, lambda layer: False)
    if not isinstance(first, int) or isinstance(first, bool):
        raise ConfigError(f"config.json: max_window_layers must be a whole number, not {shown(first)}")
    return listed_layers(config, window, lambda layer: layer >= first)


def optional_window(config: HFConfig) -> int | None:
    """Returns the window of sliding layers, if `use_sliding_window` allows any."""
    return config.optional_integer("sliding_window") if config.flag("use_sliding_window") else None


def listed_layers(config: HFConfig, window: int | None, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Returns each layer's window: `layer_types` says which layers slide; without it, `slides` does."""
    num_layers = config.integer("num_hidden_layers")
    layer_types = config.get("layer_types")
    if layer_types is None:
        return tuple(window if slides(layer) else None for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ConfigError(f"config.json: layer_types must list {num_layers} layers, not {shown(layer_types)}")
    return tuple(_window_of(kind, window) for kind in layer_types)


def blocks_by_type(config: HFConfig, full: BlockConfig, local: BlockConfig, full_every: int) -> list[BlockConfig]:
    """Returns one of two blocks for each layer: `local` with a window, or `full` without, by default every
    `full_every`th layer.
    """
    can_do_without = config.get("sliding_window") is None and config.get("layer_types") is not None
    window = None if can_do_without else config.integer("sliding_window")
    windows = listed_layers(config, window, lambda layer: (layer + 1) % full_every != 0)
    return [block for size in windows for block in sliding(full if size is None else local, [size])]


def _window_of(kind: object, window: int | None) -> int | None:
    if kind == "full_attention":
        return None
    if kind != "sliding_attention":
        raise ConfigError(f"config.json: attention type {shown(kind)} in layer_types is not supported")
    if window is None:
        raise ConfigError(
            "config.json: layer_types has sliding_attention, but use_sliding_window or sliding_window is off"
        )
    return window


def _head_dim(config: HFConfig, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise ConfigError(
            f"config.json: hidden_size = {hidden_size} is not a multiple of num_attention_heads = {num_heads}, "
            "and there is no head_dim"
        )
    head_dim = config.integer("head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim = {head_dim} is odd; rotary positions need an even one")
    return head_dim


def read_activation(config: HFConfig, name: str = "hidden_act") -> str:
    activation = config.get(name)
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ConfigError(f"config.json: {name} = {shown(activation)} is not one of {', '.join(ACTIVATIONS)}")
    return str(activation)
