"""Tables of Megatron-LM's flags and of the fields of Megatron-Core's config classes, and what each does here.

Megatron-LM flags that existing slime scripts pass are parsed with their type and carried through under their name. Each
belongs to one of four classes, and none is ignored silently. SHAPE: the shape of the model; the trainer reads it from
the Hugging Face config, and a flag with another number is refused (`slime.config.checks`). NUMBERS: the flag changes
the computation; only the values in `NEUTRAL`, which have no effect here, are accepted. SPEED: kernels and their
rounding, which cannot change what is learned; Megatron gets them, and with FSDP plan and run report the given ones.
OTHERS: tasks that slime handles itself with both backends, such as files and logs; the given ones are reported.

Invariant: every field of TransformerConfig, OptimizerConfig and DistributedDataParallelConfig is one of these, and a
test compares the tables (`megatron_flags.toml`) with the classes: a flag of the config; a flag of Megatron-LM, of which
SPEED is passed to its class as given; a flag of `FIELD_FLAGS`, which is too; one of `REFUSED_FIELDS`, with the reason;
or one of `TRAINER_FIELDS`, which cannot be written as text. Values passed to the classes change speed, memory or
rounding, never what is learned.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from slime.storage.json_types import JsonMapping, JsonObject

SWITCH, INT, FLOAT, NUMBER, TEXT, TEXTS = "switch", "int", "float", "number", "text", "texts"
SHAPE, NUMBERS, SPEED, OTHERS = "shape", "numbers", "speed", "others"

_TABLES: JsonObject = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_ROWS = [
    (name, role, kind)
    for role, kinds in _TABLES["flags"].items()
    for kind, names in kinds.items()
    for name in names.split()
]

MEGATRON_FLAGS: dict[str, str] = {name: kind for name, _, kind in _ROWS}
"""Flag (without leading dashes) -> type of value."""
MEGATRON_CLASSES: dict[str, str] = {name: role for name, role, _ in _ROWS}
"""Flag -> SHAPE, NUMBERS, SPEED or OTHERS."""
MEGATRON_DEFAULTS: JsonObject = _TABLES["defaults"]
"""Megatron's own defaults, by attribute."""
NEUTRAL: dict[str, tuple[list[object], str]] = {
    name: (_TABLES["neutral"].get(name, []), why) for name, why in _TABLES["refused_numbers"].items()
}
"""Flag that changes the computation -> the values that have no effect here, and why others are refused. `finetune` is
accepted if there is no checkpoint to resume from."""
REFUSED_BY_MEGATRON: dict[str, str] = _TABLES["refused_by_megatron"]
"""Flags that FSDP ignores and Megatron does not support here, with the reason."""
IMPLIED_FLAGS = ("bf16", "accumulate-allreduce-grads-in-fp32", "variable-seq-lengths")
"""Flags that are always on, or set by other flags: their effect is not reported."""
CHOICES: dict[str, list[str]] = _TABLES["choices"]
"""Field -> its allowed values."""
FIELD_FLAGS: dict[str, str] = {
    name.replace("_", "-"): kind for kind, names in _TABLES["fields"].items() for name in names.split()
}
"""Flag -> type of value, for the fields that have no Megatron-LM flag of the same name."""
REFUSED_FIELDS: dict[str, str] = {
    name.replace("_", "-"): row["why"] for row in _TABLES["refused_fields"] for name in row["names"].split()
}
"""Flag -> why it is not supported, and what to do."""
TRAINER_FIELDS: list[str] = _TABLES["groups"]["trainer"].split()
"""Fields that hold functions, dtypes and similar objects: the trainer sets them, and they have no flags."""
COMPARED_SHAPE_KEYS: dict[str, list[str]] = _TABLES["shape"]
"""Megatron's name -> the names in config.json."""

_FIELD_OF_NO = {
    "no-rope-fusion": "apply_rope_fusion",
    "no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "no-masked-softmax-fusion": "masked_softmax_fusion",
    "no-bias-gelu-fusion": "bias_activation_fusion",
    "no-bias-swiglu-fusion": "bias_activation_fusion",
    "no-bias-dropout-fusion": "bias_dropout_fusion",
    "no-persist-layer-norm": "persist_layer_norm",
}
"""Flag of Megatron-LM -> the field of another name that it turns off."""


def unused_fields(*, transformer_engine: bool, on_gpu: bool) -> set[str]:
    """Return the fields without effect if layers are not Transformer Engine's, or if there is no GPU."""
    groups = [group for group, used in (("transformer_engine", transformer_engine), ("gpu", on_gpu)) if not used]
    return {name for group in groups for name in _TABLES["groups"][group].split()}


def given_settings(carried: JsonMapping) -> JsonObject:
    """Return the fields of Megatron's config classes that carried flags set, with their values."""
    found: JsonObject = {}
    for name, value in carried.items():
        flag = name.replace("_", "-")
        if flag in _FIELD_OF_NO:
            if value:
                found[_FIELD_OF_NO[flag]] = False
        elif flag in FIELD_FLAGS or MEGATRON_CLASSES.get(flag) == SPEED:
            found[name] = value
    kinds = found.get("cp_comm_type")
    if isinstance(kinds, list) and len(kinds) == 1:
        found["cp_comm_type"] = kinds[0]
    return found
