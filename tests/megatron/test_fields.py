"""Every field of Megatron's config classes is set by a flag, or its flag is rejected with a reason."""

from __future__ import annotations

import dataclasses

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from slime.config.config import FLAG_SPECS
from slime.config.megatron_flags import (
    CHOICES,
    FIELD_FLAGS,
    MEGATRON_CLASSES,
    MEGATRON_FLAGS,
    REFUSED_FIELDS,
    SPEED,
    SWITCH,
    TRAINER_FIELDS,
    given_settings,
    unused_fields,
)

FIELDS = {
    field.name: field
    for settings in (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    for field in dataclasses.fields(settings)
}


def test_every_field_is_in_exactly_one_table() -> None:
    for name in FIELDS:
        flag = name.replace("_", "-")
        found = [
            where
            for where, known in (
                ("config", name in FLAG_SPECS),
                ("Megatron-LM", flag in MEGATRON_FLAGS),
                ("field", flag in FIELD_FLAGS),
                ("refused", flag in REFUSED_FIELDS),
                ("made", name in TRAINER_FIELDS),
            )
            if known
        ]
        assert len(found) == 1, (name, found)


def test_tables_contain_only_megatron_fields() -> None:
    for flag in (*FIELD_FLAGS, *REFUSED_FIELDS, *TRAINER_FIELDS, *CHOICES):
        assert flag.replace("-", "_") in FIELDS, flag


def test_fields_unused_without_kernels_are_megatron_fields() -> None:
    assert unused_fields(transformer_engine=False, on_gpu=False) <= FIELDS.keys()
    assert unused_fields(transformer_engine=True, on_gpu=True) == set()


def test_flags_set_existing_fields_and_switches_are_boolean() -> None:
    flags = [*FIELD_FLAGS, *(flag for flag, role in MEGATRON_CLASSES.items() if role == SPEED)]
    for flag in flags:
        ((name, value),) = given_settings({flag.replace("-", "_"): True}).items()
        assert name in FIELDS, flag
        if {**MEGATRON_FLAGS, **FIELD_FLAGS}[flag] == SWITCH:
            assert isinstance(value, bool)
            assert FIELDS[name].type is bool, flag
