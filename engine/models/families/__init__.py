"""The model families: which checkpoints can be served."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from penstock.engine.errors import ConfigError, shown
from penstock.engine.models.families.afmoe import AFMOE
from penstock.engine.models.families.cohere import COHERE
from penstock.engine.models.families.cohere2 import COHERE2
from penstock.engine.models.families.cwm import CWM
from penstock.engine.models.families.dots1 import DOTS1
from penstock.engine.models.families.ernie4_5 import ERNIE4_5
from penstock.engine.models.families.ernie4_5_moe import ERNIE4_5_MOE
from penstock.engine.models.families.exaone4 import EXAONE4
from penstock.engine.models.families.exaone_moe import EXAONE_MOE
from penstock.engine.models.families.family import Family
from penstock.engine.models.families.flex_olmo import FLEX_OLMO
from penstock.engine.models.families.flint import FLINT
from penstock.engine.models.families.gemma import GEMMA
from penstock.engine.models.families.gemma2 import GEMMA2
from penstock.engine.models.families.gemma3 import GEMMA3, GEMMA3_TEXT
from penstock.engine.models.families.gemma4 import GEMMA4, GEMMA4_TEXT, GEMMA4_UNIFIED, GEMMA4_UNIFIED_TEXT
from penstock.engine.models.families.glm import GLM
from penstock.engine.models.families.glm4 import GLM4
from penstock.engine.models.families.glm4_moe import GLM4_MOE
from penstock.engine.models.families.gpt_oss import GPT_OSS
from penstock.engine.models.families.granite import GRANITE
from penstock.engine.models.families.granite_swa import GRANITE_SWA, GRANITEMOE_SWA
from penstock.engine.models.families.granitemoe import GRANITEMOE
from penstock.engine.models.families.granitemoeshared import GRANITEMOESHARED
from penstock.engine.models.families.helium import HELIUM
from penstock.engine.models.families.hy_v3 import HY_V3
from penstock.engine.models.families.hyperclovax import HYPERCLOVAX
from penstock.engine.models.families.internlm3 import INTERNLM3
from penstock.engine.models.families.iquestcoder import IQUESTCODER
from penstock.engine.models.families.lfm2 import LFM2
from penstock.engine.models.families.lfm2_moe import LFM2_MOE
from penstock.engine.models.families.llama import LLAMA
from penstock.engine.models.families.mellum import MELLUM
from penstock.engine.models.families.minimax_m2 import MINIMAX_M2
from penstock.engine.models.families.ministral import MINISTRAL
from penstock.engine.models.families.ministral3 import MINISTRAL3
from penstock.engine.models.families.mistral import MISTRAL
from penstock.engine.models.families.mistral3 import MISTRAL3
from penstock.engine.models.families.mixtral import MIXTRAL
from penstock.engine.models.families.olmo2 import OLMO2
from penstock.engine.models.families.olmo3 import OLMO3
from penstock.engine.models.families.olmoe import OLMOE
from penstock.engine.models.families.phi3 import PHI3
from penstock.engine.models.families.qwen2 import QWEN2
from penstock.engine.models.families.qwen2_moe import QWEN2_MOE
from penstock.engine.models.families.qwen2_vl import QWEN2_5_VL, QWEN2_VL
from penstock.engine.models.families.qwen3 import QWEN3
from penstock.engine.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from penstock.engine.models.families.qwen3_moe import QWEN3_MOE
from penstock.engine.models.families.qwen3_next import QWEN3_NEXT
from penstock.engine.models.families.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE
from penstock.engine.models.families.seed_oss import SEED_OSS
from penstock.engine.models.families.smollm3 import SMOLLM3
from penstock.engine.models.families.solar_open import SOLAR_OPEN
from penstock.engine.models.families.unserved import UNSERVED
from penstock.engine.models.families.vaultgemma import VAULTGEMMA

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            LLAMA,
            INTERNLM3,
            IQUESTCODER,
            CWM,
            HELIUM,
            MISTRAL,
            MIXTRAL,
            MINIMAX_M2,
            GPT_OSS,
            QWEN2,
            QWEN2_VL,
            QWEN2_5_VL,
            QWEN2_MOE,
            QWEN3,
            QWEN3_MOE,
            AFMOE,
            FLINT,
            QWEN3_VL,
            QWEN3_VL_MOE,
            MELLUM,
            QWEN3_NEXT,
            QWEN3_5_TEXT,
            QWEN3_5,
            QWEN3_5_MOE_TEXT,
            QWEN3_5_MOE,
            MINISTRAL,
            MINISTRAL3,
            MISTRAL3,
            GEMMA,
            GEMMA2,
            VAULTGEMMA,
            GEMMA3_TEXT,
            GEMMA3,
            GEMMA4_TEXT,
            GEMMA4,
            GEMMA4_UNIFIED_TEXT,
            GEMMA4_UNIFIED,
            OLMO2,
            OLMO3,
            OLMOE,
            FLEX_OLMO,
            SMOLLM3,
            PHI3,
            GRANITE,
            GRANITEMOE,
            GRANITEMOESHARED,
            GRANITE_SWA,
            GRANITEMOE_SWA,
            HYPERCLOVAX,
            COHERE,
            COHERE2,
            GLM,
            GLM4,
            GLM4_MOE,
            SOLAR_OPEN,
            EXAONE4,
            EXAONE_MOE,
            SEED_OSS,
            ERNIE4_5,
            ERNIE4_5_MOE,
            DOTS1,
            HY_V3,
            LFM2,
            LFM2_MOE,
        )
    }
)


def family_of(fields: Mapping[str, Any]) -> Family:
    """Returns the family of a `config.json`, by its `model_type`, or by `architectures` if that is absent.

    Raises:
        ConfigError: the family is not supported, or the model is not one of its causal language models.
    """
    architectures = fields.get("architectures") or []
    if not isinstance(architectures, list):
        raise ConfigError(f"config.json: architectures must be a list, not {shown(architectures)}")
    model_type = fields.get("model_type")
    if model_type is None:
        model_type = next((f.model_type for f in FAMILIES.values() if f.architecture in architectures), None)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        part = UNSERVED.get(model_type) if isinstance(model_type, str) else None
        why = f"it needs {part}" if part else f"supported are {', '.join(FAMILIES)}"
        raise ConfigError(
            f"model type {shown(model_type)} (architectures {shown(architectures)}) is not supported; {why}"
        )
    if architectures and family.architecture not in architectures:
        raise ConfigError(
            f"architectures {shown(architectures)} is not supported; {model_type} needs {family.architecture}"
        )
    return family.with_text_of(fields)
