"""The families the project knows, found by the model_type of a config.json."""

from __future__ import annotations

from slime.errors import UserError
from slime.models.families.facts import Family, Fields, HfConfig, Ignored, Support
from slime.models.families.llama import LLAMA
from slime.models.families.qwen2 import QWEN2
from slime.models.families.qwen3 import QWEN3, QWEN3_MOE

__all__ = ["FAMILIES", "Family", "Fields", "HfConfig", "Ignored", "Support", "family_of"]

FAMILIES: tuple[Family, ...] = (QWEN2, QWEN3, QWEN3_MOE, LLAMA)
_BY_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}


def family_of(config: HfConfig) -> Family:
    """The family of a model; UserError with those known where it is none of them."""
    model_type = str(config.get("model_type"))
    family = _BY_TYPE.get(model_type)
    if family is None:
        raise UserError(
            f"model_type {model_type} of config.json is no family known here: {', '.join(sorted(_BY_TYPE))}"
        )
    return family
