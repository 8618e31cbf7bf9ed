"""Converts the metadata of a GGUF file to the fields of a `config.json`.

Some properties of a model are in no file, because llama.cpp has them in its code: they are stated here by architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from penstock.engine.errors import ConfigError, shown
from penstock.engine.loading.gguf.header import GGUFHeader

# Metadata keys, after the architecture's name, to fields of config.json.
COMMON: Mapping[str, str] = MappingProxyType(
    {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    }
)
SOFT_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
EXPERTS = {"expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size"}
NUM_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
SIGMOID_EXPERTS = {
    **EXPERTS,
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that are not weights, but the divisors of rotary frequencies."""

Fields = dict[str, Any]
ReadTensor = Callable[[str], np.ndarray]


@dataclass(frozen=True, slots=True)
class Described:
    """A file's metadata, as an architecture reads it."""

    header: GGUFHeader
    read: ReadTensor

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.header.architecture}.{key}", default)

    def has(self, tensor: str) -> bool:
        return f"{tensor}.weight" in self.header.tensors or f"{tensor}.bias" in self.header.tensors

    def integer(self, key: str, default: int | None = None) -> int:
        """Reads a positive whole number.

        Raises:
            ConfigError: it is none.
        """
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise self.wrong(key, value, "expected a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Reads a number above 0.

        Raises:
            ConfigError: it is none.
        """
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.wrong(key, value, "expected a number above 0")
        return float(value)

    @property
    def head_dim(self) -> int:
        of_all = self.integer("embedding_length") // self.integer("attention.head_count")
        return self.integer("attention.key_length", of_all)

    def wrong(self, key: str, value: object, why: str) -> ConfigError:
        return ConfigError(f"{self.header.file.name}: {self.header.architecture}.{key} = {shown(value)}: {why}")


def _nothing(described: Described) -> Fields:
    del described
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The conversion of one of llama.cpp's architectures to a model family."""

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)  # in addition to COMMON
    more: Callable[[Described], Fields] = _nothing
    permutes: bool = False  # rows of queries and keys are stored with neighbouring features paired
    adds_one: bool = False  # 1 is added to the weights of norms


def _llama(described: Described) -> Fields:
    if described.get("expert_count"):
        return {"model_type": "mixtral", "num_local_experts": described.get("expert_count")}
    return {"model_type": "mistral"} if described.get("attention.sliding_window") else {}


def _gemma(large: int) -> Callable[[Described], Fields]:
    """Returns the fields of a Gemma. With `large` layers, queries are scaled by another size than the head's."""

    def more(described: Described) -> Fields:
        is_large = described.get("block_count") == large
        size = described.integer("embedding_length") // described.integer("attention.head_count")
        return {
            "query_pre_attn_scalar": size if is_large else described.head_dim,
            "rope_local_base_freq": described.number("rope.freq_base_swa", 10_000.0),
        }

    return more


def _olmo2(described: Described) -> Fields:
    if not described.get("attention.sliding_window"):
        return {}
    return {"model_type": "olmo3", "rope_local_base_freq": described.number("rope.freq_base", 10_000.0)}


def _glm4_moe(described: Described) -> Fields:
    return {"use_qk_norm": described.has("blk.0.attn_q_norm")}


def _gpt_oss(described: Described) -> Fields:
    return {"rope_scaling": {**_scaling(described), "truncate": False}}


def _normalized(described: Described) -> Fields:
    del described
    return {"norm_topk_prob": True}


def _not_normalized(described: Described) -> Fields:
    del described
    return {"norm_topk_prob": False}


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture("llama", {"expert_used_count": "num_experts_per_tok"}, _llama, permutes=True),
        "qwen2": Architecture("qwen2"),
        "qwen2moe": Architecture(
            "qwen2_moe",
            {
                **EXPERTS,
                "expert_count": "num_experts",
                "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            },
        ),
        "qwen3": Architecture("qwen3"),
        "qwen3moe": Architecture("qwen3_moe", {**EXPERTS, "expert_count": "num_experts"}, _normalized),
        "gemma": Architecture("gemma", adds_one=True),
        "gemma2": Architecture("gemma2", SOFT_CAPS, _gemma(46), adds_one=True),
        "gemma3": Architecture("gemma3_text", SOFT_CAPS, _gemma(62), adds_one=True),
        "phi3": Architecture("phi3"),
        "olmo2": Architecture("olmo2", more=_olmo2),
        "olmoe": Architecture(
            "olmoe", {"expert_used_count": "num_experts_per_tok", "expert_count": "num_experts"}, _not_normalized
        ),
        "smollm3": Architecture("smollm3", permutes=True),
        "granite": Architecture("granite", GRANITE, permutes=True),
        "granitemoe": Architecture("granitemoe", {**GRANITE, **NUM_EXPERTS}, permutes=True),
        "cohere2": Architecture(
            "cohere2", {"logit_scale": "logit_scale", "attention.layer_norm_epsilon": "layer_norm_eps"}
        ),
        "glm4": Architecture("glm4"),
        "gpt-oss": Architecture(
            "gpt_oss", {**NUM_EXPERTS, "expert_feed_forward_length": "intermediate_size"}, _gpt_oss
        ),
        "glm4moe": Architecture("glm4_moe", SIGMOID_EXPERTS, _glm4_moe),
        "dots1": Architecture("dots1", SIGMOID_EXPERTS),
    }
)


def architecture_of(header: GGUFHeader) -> Architecture:
    """Returns the file's architecture. Raises ConfigError if it is not supported."""
    name = header.architecture
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{header.file.name}: general.architecture = {shown(name)} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def config_fields(header: GGUFHeader, read: ReadTensor) -> Fields:
    """Returns the fields of a config.json. `read` reads a tensor of floats by name.

    Raises:
        ConfigError: the model, or something it asks for, is not supported.
    """
    architecture, described = architecture_of(header), Described(header, read)
    _refuse_unsupported(described)
    fields: Fields = {"model_type": architecture.model_type, **_sizes(described)}
    for key, name in {**COMMON, **architecture.keys}.items():
        value = described.get(key)
        if value is not None:
            fields[name] = value
    return {**fields, **_windows(described), **_rope(described), **architecture.more(described)}


def _sizes(described: Described) -> Fields:
    num_draft = described.integer("nextn_predict_layers") if described.get("nextn_predict_layers") else 0
    num_heads = described.integer("attention.head_count")
    embedding = described.header.tensors.get("token_embd.weight")
    return {
        "num_hidden_layers": described.integer("block_count") - num_draft,
        "num_key_value_heads": _same_in_all_layers(described, "attention.head_count_kv", num_heads),
        "head_dim": described.head_dim,
        "vocab_size": described.get("vocab_size") if embedding is None else embedding.shape[0],
        "tie_word_embeddings": not described.has("output"),
        "attention_bias": "blk.0.attn_q.bias" in described.header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in described.header.tensors,
    }


def _same_in_all_layers(described: Described, key: str, default: int) -> Any:
    value = described.get(key, default)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise described.wrong(key, value, "layers that differ are not supported")
    return value[0]


def _windows(described: Described) -> Fields:
    """Reads the windows. Without a pattern in the metadata, the family's applies."""
    window, pattern = described.get("attention.sliding_window"), described.get("attention.sliding_window_pattern")
    if not window:
        return {"sliding_window": None}
    if type(pattern) is int and pattern > 0:
        pattern = [bool((layer + 1) % pattern) for layer in range(described.integer("block_count"))]
    if not isinstance(pattern, list):
        return {"sliding_window": window}
    return {
        "sliding_window": window,
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern],
    }


def _rope(described: Described) -> Fields:
    scaling = _scaling(described)
    fields: Fields = {"rope_theta": described.number("rope.freq_base", 10_000.0), "rope_scaling": scaling}
    length = "original_max_position_embeddings"  # a family's default beside the table would override it
    fields[length] = scaling.get(length)
    dim = described.integer("rope.dimension_count", described.head_dim)
    if dim != described.head_dim:
        fields["partial_rotary_factor"] = (dim + 0.5) / described.head_dim  # readers round down to whole features
    return fields


def _scaling(described: Described) -> Fields:
    factors = {name for name in ROPE_FACTORS if name in described.header.tensors}
    if factors:
        return _divided_frequencies(described, factors)
    kind = described.get("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default"}  # otherwise the family's default would apply
    table = {"rope_type": kind, "factor": described.number("rope.scaling.factor")}
    if kind == "linear":
        return table
    if kind != "yarn":
        raise described.wrong("rope.scaling.type", kind, "expected none, linear or yarn")
    return {**table, **_yarn(described, table["factor"])}


def _yarn(described: Described, factor: float) -> Fields:
    usual = 0.1 * math.log(max(factor, 1.0)) + 1.0  # YaRN's own factor
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        stated = described.number(key, 1.0)
        if not any(math.isclose(stated, accepted, rel_tol=1e-4) for accepted in (1.0, usual)):
            raise described.wrong(key, stated, f"expected 1 or {usual:.6g} with yarn")
    for key, accepted in (("yarn_log_multiplier", (None, 0.0)), ("yarn_ext_factor", (None, 1.0, -1.0))):
        if described.get(f"rope.scaling.{key}") not in accepted:
            raise described.wrong(f"rope.scaling.{key}", described.get(f"rope.scaling.{key}"), "is not supported")
    return {
        "original_max_position_embeddings": described.get("rope.scaling.original_context_length"),
        "beta_fast": described.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": described.get("rope.scaling.yarn_beta_slow"),
    }


def _divided_frequencies(described: Described, names: set[str]) -> Fields:
    """Reads longrope, or Llama 3's scaling, which llama.cpp stores as its divisors of frequencies, the same for every
    length.
    """
    one, short, long = ROPE_FACTORS
    if names not in ({one}, {short, long}):
        raise ConfigError(f"{described.header.file.name} has {', '.join(sorted(names))} without what belongs to them")
    length = described.integer("context_length")
    if names == {one}:
        short = long = one
    return {
        "rope_type": "longrope",
        "short_factor": [float(factor) for factor in described.read(short)],
        "long_factor": [float(factor) for factor in described.read(long)],
        "attention_factor": described.number("rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": described.integer("rope.scaling.original_context_length", length)
        if short != long
        else length,
    }


def _refuse_unsupported(described: Described) -> None:
    size = described.get("attention.key_length")
    for key, accepted in (
        ("attention.value_length", (None, size)),
        ("attention.causal", (None, True)),
        ("pooling_type", (None, 0)),
        ("tensor_data_layout", (None, "reference", "Meta AI original pth")),
        ("expert_group_count", (None, 0, 1)),
    ):
        if described.get(key) not in accepted:
            raise described.wrong(key, described.get(key), f"expected {' or '.join(map(str, accepted))}")
