"""Flags that are given but have no effect in this run, with the reasons.

Invariant: a flag that is named here cannot change the result. A flag that can is used or refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime.config.config import FLAG_SPECS, Config, given_flags
from slime.config.fields import flag_name, specs_of_group
from slime.config.flags.megatron import HOOKS, MegatronFlags
from slime.config.flags.rollout import DEFAULT_ROLLOUT_FUNCTION
from slime.config.flags.upstream import BUFFER_FLAGS
from slime.config.megatron_flags import (
    FIELD_FLAGS,
    IMPLIED_FLAGS,
    MEGATRON_CLASSES,
    OTHERS,
    SHAPE,
    SPEED,
    given_settings,
    unused_fields,
)
from slime.config.parallelism import uses_megatron, uses_transformer_engine

_ALSO_OF_FSDP = ("recompute_granularity", "use_distributed_optimizer", *HOOKS)
"""Megatron's flags that FSDP uses, implies or refuses."""


def flags_without_effect(config: Config) -> list[str]:
    """Return one sentence for each reason why given flags have no effect."""
    reasons: dict[str, list[str]] = {}
    own_function = config.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION
    no_effect = {name: spec.info.no_effect for name, spec in FLAG_SPECS.items() if spec.info.no_effect is not None}
    for name, shown in given_flags(config, no_effect).items():
        if not (own_function and name in BUFFER_FLAGS):
            reasons.setdefault(no_effect[name], []).append(shown)
    sentences = [f"{', '.join(flags)} has no effect: {why}" for why, flags in reasons.items()]
    given = {name: MEGATRON_CLASSES.get(name.replace("_", "-")) for name in config.carried}
    if uses_megatron(config):
        others = [
            name for name, role in given.items() if role == OTHERS and name.replace("_", "-") not in IMPLIED_FLAGS
        ]
        if others:
            sentences.append(
                "slime handles files, logs, initial weights and log-probs itself, so these flags have no effect: "
                + flag_list(others)
            )
    else:
        layout = [
            spec.name
            for spec in specs_of_group(MegatronFlags)
            if getattr(config, spec.name) != spec.default and spec.name not in _ALSO_OF_FSDP
        ]
        speed = [name for name, role in given.items() if role in (SPEED, OTHERS) and name != "bf16"]
        speed += [name for name in config.carried if name.replace("_", "-") in FIELD_FLAGS]
        if layout or speed:
            sentences.append(
                f"Megatron flags without effect on the FSDP trainer: {flag_list([*layout, *speed])}"
                " (--train-backend megatron uses them; fsdp is the default here)"
            )
    shape = [name for name, role in given.items() if role == SHAPE]
    if shape:
        sentences.append(
            f"the model is built from its config.json, with which these flags are only compared: {flag_list(shape)}"
        )
    return sentences


def flags_unused_by_layers(config: Config, device: str) -> list[str]:
    """Return a sentence about kernel flags that the layers of this run do not use."""
    if not uses_megatron(config):
        return []
    has_engine, on_gpu = uses_transformer_engine(config, device), device == "cuda"
    unused = unused_fields(transformer_engine=has_engine, on_gpu=on_gpu)
    given = [name for name in config.carried if unused & given_settings({name: config.carried[name]}).keys()]
    given += ["attention_backend"] if not has_engine and config.attention_backend != "auto" else []
    if not given:
        return []
    where = "on a GPU without Transformer Engine" if on_gpu else "on a CPU"
    return [f"layers are plain torch {where}, so these flags have no effect: {flag_list(given)}"]


def flag_list(names: Sequence[str]) -> str:
    """Return field names as a list of flags for a sentence."""
    return ", ".join(flag_name(name) for name in names)
