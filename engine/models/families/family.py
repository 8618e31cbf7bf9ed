"""The declaration of a model family: how its `config.json` is read, and what its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from penstock.engine.errors import ConfigError, shown
from penstock.engine.models.axes import ParamPath
from penstock.engine.models.config import BlockConfig, ModelConfig
from penstock.engine.models.hf.config import HFConfig

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

# For checkpoints with separate tensors for each expert, as most have.
QWEN_EXPERTS: Mapping[ParamPath, str] = MappingProxyType(
    {
        ("mlp", "router"): "mlp.gate",
        ("mlp", "experts", "gate"): "mlp.experts.{}.gate_proj",
        ("mlp", "experts", "up"): "mlp.experts.{}.up_proj",
        ("mlp", "experts", "down"): "mlp.experts.{}.down_proj",
    }
)
# The in-memory form of `transformers`, which some checkpoints have: a layer's experts in one tensor, gate above up.
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
class ModelPlace:
    """The names of the language model and its head in a checkpoint."""

    body: str = "model"
    head: str = "lm_head"
    norm: str = "norm"  # the final norm, in the body

    @property
    def embedding(self) -> str:
        return f"{self.body}.embed_tokens.weight"


BESIDE_VISION = (ModelPlace("language_model.model", "language_model.lm_head"), ModelPlace("model.language_model"))
"""The places of the text part in a model that also takes images."""


@dataclass(frozen=True, slots=True)
class Family:
    """A model family of Hugging Face checkpoints.

    `defaults` are the values that the family's configuration class in `transformers` has for fields which a
    `config.json` may leave out. `configure` maps the fields and a dtype to a ModelConfig, or raises ConfigError.

    Modules with the same name in `own_modules` are fused: they are rows of one stored tensor, in the order listed. The
    same holds for parameters in `own_tensors`. A name with `{}` is that of one expert's tensor, with its number in
    place of the braces.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    configure: Callable[[HFConfig, str], ModelConfig]
    own_modules: Mapping[ParamPath, str] = field(default_factory=dict)  # in each layer, before LAYER_MODULES
    own_tensors: Mapping[ParamPath, str] = field(default_factory=dict)  # in each layer, before `own_modules`
    # For fused tensors whose parameters alternate instead of following one another: the number of rounds in a layer.
    turns: Mapping[str, Callable[[BlockConfig], int]] = field(default_factory=dict)
    places: tuple[ModelPlace, ...] = (ModelPlace(),)  # possible places of the language model in checkpoints
    passed_over: tuple[str, ...] = ()  # name prefixes of tensors outside the language model
    plain: frozenset[str] = frozenset()  # names in own_tensors whose kernels are stored as held here, `[in, out]`
    # Names in own_tensors whose kernels are stored either way: their shapes say which.
    plain_or_not: frozenset[str] = frozenset()
    # For the text part of a model that also takes images or sound: the families that it may be of.
    texts: tuple[Family, ...] = ()

    def config(self, fields: Mapping[str, Any], dtype: str) -> ModelConfig:
        return self.configure(HFConfig(fields, self.defaults), dtype)

    def with_text_of(self, fields: Mapping[str, Any]) -> Family:
        """Returns the family with the tensors of its text part, which `text_config` names if it may be of several.

        Raises:
            ConfigError: the text part is of none of them.
        """
        if not self.texts:
            return self
        table = fields.get("text_config")
        text = text_family(self.model_type, self.texts, table if isinstance(table, Mapping) else {})
        places = tuple(replace(place, norm=text.places[0].norm) for place in self.places)
        return replace(
            self,
            own_modules=text.own_modules,
            own_tensors=text.own_tensors,
            turns=text.turns,
            plain=text.plain,
            plain_or_not=text.plain_or_not,
            places=places,
        )

    def as_stored(self, names: Collection[str]) -> Family:
        """Returns the family with the tensor names that a checkpoint uses; `names` are all those of its tensors."""
        family = replace(self, places=(self._place(names),))
        if any(name.endswith(SPLIT_MARK) for name in names):
            return family.split_experts()
        if FUSED_EXPERTS.keys() & self.own_tensors.keys() or not any(name.endswith(FUSED_MARK) for name in names):
            return family
        return replace(family, own_tensors={**self.own_tensors, **FUSED_EXPERTS})

    def split_experts(self) -> Family:
        """Returns the family with a tensor per matmul and expert, where it has one for all experts."""
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
        """Returns the checkpoint's name of the parameter at `path`; a `kernel` is usually stored transposed, `[out,
        in]`.
        """
        place = self.places[0]
        if path == ("embedding",):
            return place.embedding
        if path[0] == "blocks":
            return f"{place.body}.layers.{path[1]}.{self._layer_tensor(path[2:])}"
        if path[0] == "head":
            return f"{place.head}.{_leaf(path)}"
        return f"{place.body}.{OUTER_MODULES.get(str(path[0]), place.norm)}.{_leaf(path)}"

    def unused(self, layer: int, block: BlockConfig) -> tuple[str, ...]:
        """Returns a layer's tensors that a checkpoint may hold though nothing reads them: the keys and values of a
        layer that reads another's.
        """
        if not block.has_attention or block.attention.has_kv:
            return ()
        parts = (("k", "kernel"), ("v", "kernel"), ("k", "bias"), ("v", "bias"), ("k_norm", "scale"))
        known = LAYER_MODULES.keys() | self.own_modules.keys()
        paths = [("attention", *part) for part in parts if ("attention", part[0]) in known]
        return tuple(self.tensor_name(("blocks", layer, *path)) for path in paths)

    def fused_with(self, path: ParamPath) -> tuple[ParamPath, ...]:
        """Returns the parameters whose rows form one stored tensor, in this order: the one at `path`, and usually no
        other.
        """
        tail, module = path[2:], path[2:-1]
        if tail in self.own_tensors:
            return tuple((*path[:2], *part) for part in _parts_named(self.own_tensors, self.own_tensors[tail]))
        if path[0] != "blocks" or module not in self.own_modules:
            return (path,)
        return tuple((*path[:2], *part, path[-1]) for part in _parts_named(self.own_modules, self.own_modules[module]))

    def turns_of(self, path: ParamPath, blocks: Sequence[BlockConfig]) -> int:
        """Returns into how many runs the rows of the parameter at `path` are split, where those that it is fused with
        lie in between.
        """
        name = self.own_tensors.get(path[2:]) or self.own_modules.get(path[2:-1], "")
        return self.turns[name](blocks[int(path[1])]) if name in self.turns else 1

    def is_plain(self, path: ParamPath) -> bool:
        """Whether the parameter at `path` is a kernel that is stored as held here, `[in, out]`."""
        return self.own_tensors.get(path[2:]) in self.plain

    def may_be_plain(self, path: ParamPath) -> bool:
        """Whether the kernel at `path` is stored as held here in some checkpoints, and transposed in others."""
        return self.own_tensors.get(path[2:]) in self.plain_or_not

    def _place(self, names: Collection[str]) -> ModelPlace:
        return next((place for place in self.places if place.embedding in names), self.places[0])

    def _layer_tensor(self, tail: ParamPath) -> str:
        if tail in self.own_tensors:
            return self.own_tensors[tail]
        module = self.own_modules.get(tail[:-1]) or LAYER_MODULES[tail[:-1]]
        return f"{module}.{_leaf(tail)}"


def text_family(model_type: str, texts: Sequence[Family], text_fields: Mapping[str, Any]) -> Family:
    """Returns the one of `texts` that the fields of a text part name; the first if they name none.

    Raises:
        ConfigError: they name another one.
    """
    named = text_fields.get("model_type", texts[0].model_type)
    found = next((text for text in texts if text.model_type == named), None)
    if found is None:
        names = ", ".join(text.model_type for text in texts)
        raise ConfigError(
            f"config.json: model_type = {shown(named)} in text_config is not supported; {model_type} may have {names}"
        )
    return found


def _leaf(path: ParamPath) -> str:
    return "bias" if path[-1] == "bias" else "weight"


def _parts_named(names: Mapping[ParamPath, str], name: str) -> list[ParamPath]:
    return [part for part, of in names.items() if of == name]
