"""Registry of the supported model families, by the model_type of a config.json."""

from __future__ import annotations

from slime.errors import UserError
from slime.models.families.deepseek import DEEPSEEK_V3, DEEPSEEK_V32, GLM5, KIMI_K2
from slime.models.families.glm4 import GLM4, GLM4_MOE, GLM4_MOE_LITE
from slime.models.families.gpt_oss import GPT_OSS
from slime.models.families.llama import LLAMA
from slime.models.families.minimax_m2 import MINIMAX_M2
from slime.models.families.qwen import (
    MIMO,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
)
from slime.models.families.weight_map import Family, Fields, HfConfig, Ignored, Support

__all__ = ["FAMILIES", "Family", "Fields", "HfConfig", "Ignored", "Support", "family_of"]

FAMILIES: tuple[Family, ...] = (
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    LLAMA,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GLM5,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    KIMI_K2,
    GPT_OSS,
    MIMO,
    MINIMAX_M2,
)
_BY_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}


def family_of(config: HfConfig) -> Family:
    """The family of a model; UserError with the supported families if it belongs to none of them."""
    model_type = str(config.get("model_type"))
    family = _BY_TYPE.get(model_type)
    if family is None:
        raise UserError(
            f"model_type {model_type} of config.json is not a supported family: {', '.join(sorted(_BY_TYPE))}"
        )
    return family
