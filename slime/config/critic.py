"""The critic's flags: the run's, with what was given for the critic alone.

What is more specific wins: a `--critic-*` flag, then `--critic-config`, then the role file, then the run's own flag.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime.config.config import FLAG_SPECS, Config, read_config_file
from slime.config.fields import coerce, did_you_mean, flag_name, plain_value
from slime.config.megatron_flags import FIELD_FLAGS, MEGATRON_FLAGS
from slime.config.model_folder import read_latest
from slime.errors import UserError

_OWN = {
    "critic_hf_checkpoint": "hf_checkpoint",
    "critic_lr": "lr",
    "critic_lr_warmup_iters": "lr_warmup_iters",
}
_NOT_FOR_A_CRITIC = {
    "use_kl_loss": False,
    "kl_coef": 0.0,
    "use_opd": False,
    "start_rollout_id": None,
    "lora_load": None,
}


_SHARED = (
    "train_backend", "actor_num_nodes", "actor_num_gpus_per_node", "fsdp_shard_size", "context_parallel_size",
    "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
)  # fmt: skip
"""Flags that are about the processes, not about one model."""


def critic_flags(config: Config) -> Config:
    """The config that the critic is made with."""
    changes: dict[str, Any] = {**role_overrides(config, "critic"), **_file_overrides(config)}
    for name in _SHARED:
        if name in changes and changes[name] != getattr(config, name):
            raise UserError(
                f"{flag_name(name)} {changes[name]} for the critic, but {getattr(config, name)} for the policy: one "
                "set of processes trains both, cut the same way, so give it for both or for none"
            )
    for name, own in _OWN.items():
        value = getattr(config, name)
        if value is not None:
            changes[own] = value
    if "hf_checkpoint" in changes:
        changes.setdefault("ref_load", None)  # a model of its own, which it starts from
    if config.critic_lr_warmup_iters is not None:
        changes |= {"lr_warmup_fraction": None, "lr_warmup_samples": 0}
    load = config.critic_load
    if load is not None and not Path(load).is_dir():
        load = None  # the first start of a run that will resume from there
    if load is not None and read_latest(Path(load)) is None:
        changes.setdefault("ckpt_step", None)  # `--ckpt-step` is about `--load`: here there is nothing to pick from
    return config.replace(**{**changes, **_NOT_FOR_A_CRITIC, "save": config.critic_save, "load": load})


def role_overrides(config: Config, role: str) -> dict[str, Any]:
    """What `--megatron-config-path` says about a role: `megatron: [{role: critic, overrides: {...}}]`."""
    path = config.megatron_config_path
    if path is None:
        return {}
    entries = read_config_file(path, what="--megatron-config-path").get("megatron")
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "role" in e for e in entries):
        raise UserError(f"--megatron-config-path {path} must hold a list `megatron` of entries with a `role`")
    overrides: dict[str, Any] = {}
    for entry in entries:
        if entry["role"] not in ("actor", "critic"):
            raise UserError(f"--megatron-config-path {path}: role {entry['role']!r} is neither actor nor critic")
        if entry["role"] == role:
            overrides |= entry.get("overrides") or {}
    return _coerced(overrides, config, path, "--megatron-config-path")


def _file_overrides(config: Config) -> dict[str, Any]:
    if config.critic_config is None:
        return {}
    values = read_config_file(config.critic_config, what="--critic-config")
    return _coerced(values, config, config.critic_config, "--critic-config")


def _coerced(values: dict[str, Any], config: Config, path: str, flag: str) -> dict[str, Any]:
    """The values as fields of a config; those of Megatron that are carried are put beside the run's."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        written = name.replace("_", "-")
        if written in MEGATRON_FLAGS or written in FIELD_FLAGS:
            result["carried"] = {**config.carried, **result.get("carried", {}), name: plain_value(value, str(key))}
            continue
        if name not in FLAG_SPECS:
            raise UserError(f"{flag} {path}: there is no flag {key}{did_you_mean(name, FLAG_SPECS)}")
        spec = FLAG_SPECS[name]
        result[name] = None if value is None else coerce(spec, value, f"{path}: {key}")
        complaint = spec.info.check(result[name]) if spec.info.check and result[name] is not None else None
        if complaint:
            raise UserError(f"{flag} {path}: {key} {complaint}, not {value}")
    return result
