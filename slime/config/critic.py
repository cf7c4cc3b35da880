"""The critic's config: the run's flags with the overrides for the critic.

Precedence, highest first: a `--critic-*` flag, `--critic-config`, the role file, the run's own flag.
"""

from __future__ import annotations

from pathlib import Path

from slime.config.config import FLAG_SPECS, Config, coerce, plain_value, read_config_file
from slime.config.fields import did_you_mean, flag_name
from slime.config.megatron_flags import FIELD_FLAGS, MEGATRON_FLAGS
from slime.config.model_folder import read_latest
from slime.errors import UserError
from slime.storage.json_types import JsonObject

_CRITIC_FLAG_TARGETS = {
    "critic_hf_checkpoint": "hf_checkpoint",
    "critic_lr": "lr",
    "critic_lr_warmup_iters": "lr_warmup_iters",
}
_CRITIC_DEFAULTS = {
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
"""Flags of the training processes, which policy and critic share."""


def critic_flags(config: Config) -> Config:
    """Return the config that builds the critic."""
    changes = role_overrides(config, "critic")
    if config.critic_config is not None:
        values = read_config_file(config.critic_config, what="--critic-config")
        changes |= _coerce_overrides(values, config, config.critic_config, "--critic-config")
    for name in _SHARED:
        if name in changes and changes[name] != getattr(config, name):
            raise UserError(
                f"{flag_name(name)} {changes[name]} for the critic, but {getattr(config, name)} for the policy: one "
                "set of processes trains both, so give the same value for both"
            )
    for name, own in _CRITIC_FLAG_TARGETS.items():
        value = getattr(config, name)
        if value is not None:
            changes[own] = value
    if "hf_checkpoint" in changes:
        changes.setdefault("ref_load", None)  # the critic starts from its own model
    if config.critic_lr_warmup_iters is not None:
        changes |= {"lr_warmup_fraction": None, "lr_warmup_samples": 0}
    load = config.critic_load
    if load is not None and not Path(load).is_dir():
        load = None  # the first start of a run that later resumes from there
    if load is not None and read_latest(Path(load)) is None:
        changes.setdefault("ckpt_step", None)  # `--ckpt-step` applies to `--load`; this folder has no checkpoints
    return config.replace(**{**changes, **_CRITIC_DEFAULTS, "save": config.critic_save, "load": load})


def role_overrides(config: Config, role: str) -> JsonObject:
    """Return the overrides for a role in `--megatron-config-path`: `megatron: [{role: critic, overrides: {...}}]`."""
    path = config.megatron_config_path
    if path is None:
        return {}
    entries = read_config_file(path, what="--megatron-config-path").get("megatron")
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "role" in e for e in entries):
        raise UserError(f"--megatron-config-path {path} must hold a list `megatron` of entries with a `role`")
    overrides: JsonObject = {}
    for entry in entries:
        if entry["role"] not in ("actor", "critic"):
            raise UserError(f"--megatron-config-path {path}: role {entry['role']!r} is neither actor nor critic")
        if entry["role"] == role:
            overrides |= entry.get("overrides") or {}
    return _coerce_overrides(overrides, config, path, "--megatron-config-path")


def _coerce_overrides(values: JsonObject, config: Config, path: str, flag: str) -> JsonObject:
    """Convert the values to the types of their config fields; Megatron's flags are added to the run's carried ones."""
    result: JsonObject = {}
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
