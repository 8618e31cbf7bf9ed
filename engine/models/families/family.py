"""What a model family states: how its `config.json` reads, and what its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.hf_config import HFConfig

ParamPath = tuple[str | int, ...]
"""Where a parameter is in a Decoder, for example `("blocks", 0, "attention", "q", "kernel")`."""

MODULES: Mapping[ParamPath, str] = MappingProxyType(
    {
        ("embedding",): "model.embed_tokens",
        ("norm",): "model.norm",
        ("head",): "lm_head",
    }
)
LAYER_MODULES: Mapping[ParamPath, str] = MappingProxyType(
    {
        ("attention_norm",): "input_layernorm",
        ("attention", "q"): "self_attn.q_proj",
        ("attention", "k"): "self_attn.k_proj",
        ("attention", "v"): "self_attn.v_proj",
        ("attention", "out"): "self_attn.o_proj",
        ("mlp_norm",): "post_attention_layernorm",
        ("mlp", "gate"): "mlp.gate_proj",
        ("mlp", "up"): "mlp.up_proj",
        ("mlp", "down"): "mlp.down_proj",
    }
)


@dataclass(frozen=True, slots=True)
class Family:
    """A model family of Hugging Face checkpoints.

    `defaults` are the values that the family's configuration class in `transformers` has for fields which a
    `config.json` may leave out. `configure` maps the fields and a dtype to a ModelConfig, or raises ConfigError.
    Modules that `own_modules` gives one name are fused: rows of one stored tensor, in the order that they have there.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    configure: Callable[[HFConfig, str], ModelConfig]
    own_modules: Mapping[ParamPath, str] = field(default_factory=dict)  # in each layer, before LAYER_MODULES

    def config(self, fields: Mapping[str, Any], dtype: str) -> ModelConfig:
        return self.configure(HFConfig(fields, self.defaults), dtype)

    def tensor_name(self, path: ParamPath) -> str:
        """The checkpoint's name of the parameter at `path`; a `kernel` is stored transposed, `[out, in]`."""
        if path == ("embedding",):
            return f"{MODULES[path]}.weight"
        module, leaf = path[:-1], "bias" if path[-1] == "bias" else "weight"
        if module[0] == "blocks":
            return f"model.layers.{module[1]}.{self._layer_module(module[2:])}.{leaf}"
        return f"{MODULES[module]}.{leaf}"

    def fused_with(self, path: ParamPath) -> tuple[ParamPath, ...]:
        """The parameters whose rows are, in this order, one stored tensor: that at `path`, and mostly it alone."""
        module = path[2:-1]
        if path[0] != "blocks" or module not in self.own_modules:
            return (path,)
        name = self.own_modules[module]
        return tuple((*path[:2], *part, path[-1]) for part, of in self.own_modules.items() if of == name)

    def _layer_module(self, module: ParamPath) -> str:
        return self.own_modules.get(module) or LAYER_MODULES[module]
