"""The logical axes of every parameter: what each of its dimensions means, whatever mesh it is laid out on.

| name | dimension |
| --- | --- |
| vocab | tokens of the vocabulary |
| embed | features of the residual stream |
| heads | query heads, each head_dim wide |
| kv_heads | key and value heads, each head_dim wide, or one number each |
| per_head | query heads, one number each |
| mlp | features inside the feed-forward |
| experts | experts of a mixture |
| expert_mlp | features inside each expert |
| channels | channels of a convolution, each by itself |
| key_heads | key heads of a delta rule, each key_dim wide |
| value_heads | value heads of a delta rule, each value_dim wide, or one number each |
| layers | layers of a stacked decoder |
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from penstock.engine.formats.packing import INPUT_FIRST, LEAVES

ParamPath = tuple[str | int, ...]
"""The path of a parameter in a Decoder, for example `("blocks", 0, "attention", "q", "kernel")`."""

Axes = tuple[str | None, ...]

KV_SCALES = ("k_scale", "v_scale")
"""The parameters of an attention that divide its keys and its values in pages of fp8."""

_KERNELS: Mapping[ParamPath, Axes] = MappingProxyType(
    {
        ("attention", "q"): ("embed", "heads"),
        ("attention", "k"): ("embed", "kv_heads"),
        ("attention", "v"): ("embed", "kv_heads"),
        ("attention", "gate"): ("embed", "heads"),
        ("attention", "out"): ("heads", "embed"),
        ("recurrence", "before"): ("embed", "channels"),
        ("recurrence", "behind"): ("embed", "channels"),
        ("recurrence", "input"): ("embed", "channels"),
        ("recurrence", "q"): ("embed", "key_heads"),
        ("recurrence", "k"): ("embed", "key_heads"),
        ("recurrence", "v"): ("embed", "value_heads"),
        ("recurrence", "gate"): ("embed", "value_heads"),
        ("recurrence", "beta"): ("embed", "value_heads"),
        ("recurrence", "decay"): ("embed", "value_heads"),
        ("recurrence", "out"): ("channels", "embed"),
        ("mlp", "gate"): ("embed", "mlp"),
        ("mlp", "up"): ("embed", "mlp"),
        ("mlp", "down"): ("mlp", "embed"),
        ("mlp", "router"): ("embed", None),
        ("mlp", "experts", "gate"): ("experts", "embed", "expert_mlp"),
        ("mlp", "experts", "up"): ("experts", "embed", "expert_mlp"),
        ("mlp", "experts", "down"): ("experts", "expert_mlp", "embed"),
        ("mlp", "shared", "gate"): ("embed", "mlp"),
        ("mlp", "shared", "up"): ("embed", "mlp"),
        ("mlp", "shared", "down"): ("mlp", "embed"),
        ("mlp", "shared_gate"): ("embed", None),
        ("per_layer", "gate"): ("embed", None),
        ("per_layer", "projection"): (None, "embed"),
        ("per_layer_projection",): ("embed", None),
        ("head",): ("embed", "vocab"),
        ("embedding",): ("embed", "vocab"),
    }
)
_OF_RECURRENCES: Mapping[str, Axes] = MappingProxyType(
    {
        "taps": ("channels", None, None),
        "taps_bias": ("channels",),
        "q_taps": ("key_heads", None, None),
        "k_taps": ("key_heads", None, None),
        "v_taps": ("value_heads", None, None),
        "a_log": ("value_heads",),
        "dt_bias": ("value_heads",),
    }
)
_NORMS: Mapping[ParamPath, Axes] = MappingProxyType(
    {
        ("attention", "q_projection_norm"): ("heads",),
        ("attention", "k_projection_norm"): ("kv_heads",),
    }
)


def logical_axes(path: ParamPath, num_dims: int) -> Axes:
    """Returns the axes of the parameter at `path`. In a stacked decoder it has a leading axis for its layers."""
    axes = _axes(path)
    return ("layers", *axes) if num_dims == len(axes) + 1 else axes


def row_axis(path: ParamPath, num_dims: int) -> int:
    """Returns the axis along which the parameters fused in one tensor stand side by side, counted from the last."""
    axes = logical_axes(path, num_dims)
    return max(place for place, axis in enumerate(axes) if axis is not None) - len(axes)


def _axes(path: ParamPath) -> Axes:
    if path == ("embedding",):
        return ("vocab", "embed")
    if path == ("per_layer_embedding",):
        return ("vocab", None)
    module = path[2:-1] if path[0] == "blocks" else path[:-1]
    if path[-1] == "kernel":
        return _KERNELS[module]
    if path[-1] == "bias":
        *lead, _, out = _KERNELS[module]
        return (*lead, out)
    if path[-1] in LEAVES:
        *lead, num_in, num_out = _KERNELS[module]
        return (*lead, num_in) if path[-1] == "group_of" else (*lead, num_out, num_in)
    if path[-1] in INPUT_FIRST.values():
        return _KERNELS[module]
    if path[-1] == "sinks":
        return ("per_head",)
    if path[-1] in KV_SCALES:
        return ("kv_heads",)
    if module == ("recurrence",):
        return _OF_RECURRENCES[str(path[-1])]
    return _NORMS.get(module, (None,))
