"""LoRA flags: derived values, contradictions, and the adapter folder of `--lora-load`.

Invariant: after `apply_adapter_config` and `derive_lora`, a run with `--lora-rank` above 0 has alpha and targets, which
are those of `--lora-load` if that is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from slime.config.config import Config
from slime.config.initial_weights import (
    adapter_base_path,
    adapter_base_weights,
    find_initial_weights,
    find_reference_weights,
)
from slime.config.model_folder import read_header
from slime.errors import UserError
from slime.storage.json_types import JsonObject

ALL_LINEAR = "all-linear"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_PLAIN_LORA_VALUES: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "use_qalora": (None, False),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "layers_to_transform": (None, []),
    "exclude_modules": (None, []),
}
"""PEFT's options beyond two matrices per target, with the values that turn them off."""


def uses_lora(config: Config) -> bool:
    """Return whether adapters are trained instead of all weights."""
    return config.lora_rank > 0


def reference_is_base(config: Config) -> bool:
    """Return whether the reference is the base model of the adapter, so that it needs no model of its own."""
    if not uses_lora(config):
        return False
    return adapter_base_path(config, find_reference_weights(config)) == adapter_base_path(
        config, adapter_base_weights(config, find_initial_weights(config))
    )


def apply_adapter_config(config: Config) -> Config:
    """Fill in rank, alpha and targets from `--lora-load`; flags that contradict it are refused."""
    folder = config.lora_load
    if folder is None:
        return config
    facts = read_adapter_config(Path(folder), "--lora-load")
    targets = facts["target_modules"]
    found = {
        "lora_rank": facts["r"],
        "lora_alpha": float(facts["lora_alpha"]),
        "lora_target_modules": [targets] if isinstance(targets, str) else sorted(targets),
    }
    for name, value in found.items():
        given = getattr(config, name)
        if given and (sorted(given) if isinstance(given, list) else given) != value:
            shown = " ".join(given) if isinstance(given, list) else f"{given:g}"
            flag, theirs = f"--{name.replace('_', '-')}", " ".join(value) if isinstance(value, list) else f"{value:g}"
            raise UserError(f"{flag} {shown} contradicts --lora-load {folder}, which has {theirs}: drop {flag}")
    return config.replace(**found)


def read_adapter_config(folder: Path, flag: str) -> JsonObject:
    """Read the adapter_config.json of a folder with plain LoRA matrices; PEFT's other options are refused."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{flag} {folder} has no {CONFIG_FILE}: give an adapter folder as PEFT saves it")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise UserError(f"{path} cannot be read as JSON ({cause}): save the adapter again") from cause
    if not isinstance(facts, dict):
        raise UserError(f"{path} does not hold a JSON object: save the adapter again")
    for name, plain in _PLAIN_LORA_VALUES.items():
        if facts.get(name) not in plain:
            raise UserError(f"{path} has {name} {facts.get(name)!r}: only plain LoRA matrices can be trained further")
    rank, alpha, targets = facts.get("r"), facts.get("lora_alpha"), facts.get("target_modules")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise UserError(f"{path} has r {rank!r} and lora_alpha {alpha!r}: both must be numbers above 0")
    named = isinstance(targets, list) and targets and all(isinstance(name, str) for name in targets)
    if not named and targets != ALL_LINEAR:
        raise UserError(f"{path} has target_modules {targets!r}: a list of names, or {ALL_LINEAR}, is needed")
    return facts


def derive_lora(config: Config) -> Config:
    """Fill in alpha and targets where they are not given."""
    if not uses_lora(config):
        return config
    alpha = 2.0 * config.lora_rank if config.lora_alpha is None else config.lora_alpha
    return config.replace(lora_alpha=alpha, lora_target_modules=config.lora_target_modules or [ALL_LINEAR])


def lora_contradictions(config: Config) -> Iterator[str]:
    """Yield one sentence for each contradiction between LoRA flags."""
    if uses_lora(config):
        if config.ref_update_decay:
            yield (
                "--ref-update-decay averages whole weights, but with LoRA the reference is an adapter, whose averages "
                "do not have its rank: drop it"
            )
        return
    for flag, given in (
        ("--lora-alpha", config.lora_alpha is not None),
        ("--lora-target-modules", config.lora_target_modules is not None),
        ("--lora-sync adapter", config.lora_sync == "adapter"),
    ):
        if given:
            yield f"{flag} needs LoRA: add --lora-rank, or drop it"


def check_adapter(config: Config) -> None:
    """Check that the adapter of `--lora-load` is complete, and that engines have the base weights of adapters."""
    if config.lora_load is not None:
        weights = Path(config.lora_load) / WEIGHTS_FILE
        if not weights.is_file():
            raise UserError(f"--lora-load {config.lora_load} has no {WEIGHTS_FILE}: save the adapter again")
        read_header(weights, "--lora-load")
    if uses_lora(config) and config.lora_sync == "adapter" and not config.debug_rollout_only:
        base = adapter_base_weights(config, find_initial_weights(config))
        folder = base.folder
        if folder is not None and Path(folder).resolve() != Path(config.hf_checkpoint).resolve():
            raise UserError(
                f"--lora-sync adapter: the engines have the weights of --hf-checkpoint {config.hf_checkpoint}, but the "
                f"adapter is trained on those of {base.flag} {folder}: use --lora-sync merged, or one folder"
            )
