"""What a model family states: how its `config.json` reads, and what its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from penstock.engine.models.axes import ParamPath
from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.hf_config import HFConfig

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

# Around the layers, in the body.
OUTER_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "per_layer_embedding": "embed_tokens_per_layer",
        "per_layer_projection": "per_layer_model_projection",
        "per_layer_norm": "per_layer_projection_norm",
    }
)

# Where each expert has tensors of its own, as most checkpoints hold them.
QWEN_EXPERTS: Mapping[ParamPath, str] = MappingProxyType(
    {
        ("mlp", "router"): "mlp.gate",
        ("mlp", "experts", "gate"): "mlp.experts.{}.gate_proj",
        ("mlp", "experts", "up"): "mlp.experts.{}.up_proj",
        ("mlp", "experts", "down"): "mlp.experts.{}.down_proj",
    }
)
# As `transformers` holds a mixture in memory, and some write it: the experts of a layer in one tensor, gate above up.
FUSED_MARK, SPLIT_MARK = ".experts.gate_up_proj", ".experts.0.gate_proj.weight"
FUSED_EXPERTS: Mapping[ParamPath, str] = MappingProxyType(
    {
        ("mlp", "router", "kernel"): "mlp.gate.weight",
        ("mlp", "experts", "gate", "kernel"): "mlp.experts.gate_up_proj",
        ("mlp", "experts", "up", "kernel"): "mlp.experts.gate_up_proj",
        ("mlp", "experts", "down", "kernel"): "mlp.experts.down_proj",
    }
)


@dataclass(frozen=True, slots=True)
class Place:
    """What the language model and its head are called in a checkpoint."""

    body: str = "model"
    head: str = "lm_head"
    norm: str = "norm"  # the last one, in the body

    @property
    def embedding(self) -> str:
        return f"{self.body}.embed_tokens.weight"


BESIDE_VISION = (Place("language_model.model", "language_model.lm_head"), Place("model.language_model"))
"""Where the text part is of a model that also takes images."""

VISION_TENSORS = tuple(
    f"{prefix}{part}." for prefix in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
)
"""What the names of the other part begin with."""


@dataclass(frozen=True, slots=True)
class Family:
    """A model family of Hugging Face checkpoints.

    `defaults` are the values that the family's configuration class in `transformers` has for fields which a
    `config.json` may leave out. `configure` maps the fields and a dtype to a ModelConfig, or raises ConfigError.
    Modules that `own_modules` gives one name are fused: rows of one stored tensor, in the order that they have there;
    parameters that `own_tensors` gives one name likewise. A name with `{}` is that of one expert's tensor, for its
    number.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    configure: Callable[[HFConfig, str], ModelConfig]
    own_modules: Mapping[ParamPath, str] = field(default_factory=dict)  # in each layer, before LAYER_MODULES
    own_tensors: Mapping[ParamPath, str] = field(default_factory=dict)  # in each layer, before `own_modules`
    # Of fused ones whose parameters do not stand one behind the other, but take turns: how often, in a layer like this.
    turns: Mapping[str, Callable[[BlockConfig], int]] = field(default_factory=dict)
    places: tuple[Place, ...] = (Place(),)  # where checkpoints may have the language model
    passed_over: tuple[str, ...] = ()  # what names of tensors begin with that are not the language model's
    plain: frozenset[str] = frozenset()  # of own_tensors, those that hold kernels as we do, `[in, out]`

    def config(self, fields: Mapping[str, Any], dtype: str) -> ModelConfig:
        return self.configure(HFConfig(fields, self.defaults), dtype)

    def as_stored(self, names: Collection[str]) -> Family:
        """The family with the names that tensors have in a checkpoint of these."""
        family = replace(self, places=(self._place(names),))
        if any(name.endswith(SPLIT_MARK) for name in names):
            return family.split_experts()
        if FUSED_EXPERTS.keys() & self.own_tensors.keys() or not any(name.endswith(FUSED_MARK) for name in names):
            return family
        return replace(family, own_tensors={**self.own_tensors, **FUSED_EXPERTS})

    def split_experts(self) -> Family:
        """The family with a tensor for each matmul of each expert, where it has one for those of all experts."""
        fused = {path for path in self.own_tensors if path[:2] == ("mlp", "experts")}
        if not fused:
            return self
        tensors = {path: name for path, name in self.own_tensors.items() if path not in fused}
        down = self.own_tensors["mlp", "experts", "down", "kernel"]
        place = down.removesuffix(".down_proj") if down.endswith("experts.down_proj") else "mlp.experts"
        modules = {
            path: name.replace("mlp.experts", place)
            for path, name in QWEN_EXPERTS.items()
            if path[:2] == ("mlp", "experts")
        }
        return replace(self, own_tensors=tensors, own_modules={**self.own_modules, **modules})

    def tensor_name(self, path: ParamPath) -> str:
        """The checkpoint's name of the parameter at `path`; a `kernel` is mostly stored transposed, `[out, in]`."""
        place = self.places[0]
        if path == ("embedding",):
            return place.embedding
        if path[0] == "blocks":
            return f"{place.body}.layers.{path[1]}.{self._layer_tensor(path[2:])}"
        if path[0] == "head":
            return f"{place.head}.{_leaf(path)}"
        return f"{place.body}.{OUTER_MODULES.get(str(path[0]), place.norm)}.{_leaf(path)}"

    def unused(self, layer: int, block: BlockConfig) -> tuple[str, ...]:
        """Tensors of a layer that a checkpoint may hold though nothing reads them: its keys and values, where it reads
        another layer's.
        """
        if not block.has_attention or block.attention.has_kv:
            return ()
        parts = (("k", "kernel"), ("v", "kernel"), ("k", "bias"), ("v", "bias"), ("k_norm", "scale"))
        known = LAYER_MODULES.keys() | self.own_modules.keys()
        paths = [("attention", *part) for part in parts if ("attention", part[0]) in known]
        return tuple(self.tensor_name(("blocks", layer, *path)) for path in paths)

    def fused_with(self, path: ParamPath) -> tuple[ParamPath, ...]:
        """The parameters whose rows are, in this order, one stored tensor: that at `path`, and mostly it alone."""
        tail, module = path[2:], path[2:-1]
        if tail in self.own_tensors:
            return tuple((*path[:2], *part) for part in _of_name(self.own_tensors, self.own_tensors[tail]))
        if path[0] != "blocks" or module not in self.own_modules:
            return (path,)
        return tuple((*path[:2], *part, path[-1]) for part in _of_name(self.own_modules, self.own_modules[module]))

    def turns_of(self, path: ParamPath, blocks: Sequence[BlockConfig]) -> int:
        """How many runs the rows of the parameter at `path` are in, between those that it is fused with."""
        name = self.own_tensors.get(path[2:]) or self.own_modules.get(path[2:-1], "")
        return self.turns[name](blocks[int(path[1])]) if name in self.turns else 1

    def is_plain(self, path: ParamPath) -> bool:
        """Whether the parameter at `path` is a kernel that is stored as we hold it."""
        return self.own_tensors.get(path[2:]) in self.plain

    def _place(self, names: Collection[str]) -> Place:
        return next((place for place in self.places if place.embedding in names), self.places[0])

    def _layer_tensor(self, tail: ParamPath) -> str:
        if tail in self.own_tensors:
            return self.own_tensors[tail]
        module = self.own_modules.get(tail[:-1]) or LAYER_MODULES[tail[:-1]]
        return f"{module}.{_leaf(tail)}"


def _leaf(path: ParamPath) -> str:
    return "bias" if path[-1] == "bias" else "weight"


def _of_name(names: Mapping[ParamPath, str], name: str) -> list[ParamPath]:
    return [part for part, of in names.items() if of == name]
