"""Derivation of missing values and the complete check of a config.

Invariant: `resolve` is idempotent, and a config that it returns has no None in a field whose annotation excludes None.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from slime.config.algorithm import derive_algorithm, has_critic
from slime.config.async_mode import derive_async, is_async
from slime.config.batch import derive_batch_sizes, num_trainers
from slime.config.checks import (
    check_contradictions,
    check_files,
    check_megatron_flags,
    check_shape_flags,
    check_trackers,
    derive_live,
    lacks_prompts,
)
from slime.config.config import FLAG_SPECS, Config
from slime.config.critic import critic_flags, role_overrides
from slime.config.datasets import evaluates
from slime.config.fields import check_range, coerce
from slime.config.flags.data import DEFAULT_DATA_SOURCE
from slime.config.flags.rollout import DEFAULT_ROLLOUT_FUNCTION, SFT_ROLLOUT_FUNCTION
from slime.config.initial_weights import split_load_iteration
from slime.config.lora import apply_adapter_config, derive_lora
from slime.config.parallelism import uses_megatron
from slime.config.plugins.view import check_plugins, with_own_overlay
from slime.errors import UserError
from slime.storage.json_types import JsonObject

_log = logging.getLogger(__name__)

INDEXER_PATTERN = r"\.indexer\."
"""Pattern in the parameter names of the indexers of sparse attention."""


def resolve(config: Config) -> Config:
    """Return the config that a run uses; raise a `UserError` if the flags are wrong or contradict each other."""
    required = [spec for spec in FLAG_SPECS.values() if spec.info.required]
    missing = [f"{spec.flag} {spec.metavar}" for spec in required if getattr(config, spec.name) is None]
    if lacks_prompts(config):
        missing.append("--prompt-data PATH")
    if len(missing) > 1:
        raise UserError(f"{', '.join(missing[:-1])} and {missing[-1]} are missing: give all of them")
    values: JsonObject = {}
    for spec in FLAG_SPECS.values():  # also of configs made in Python
        value = getattr(config, spec.name)
        if value is not None:
            values[spec.name] = coerce(spec, value, spec.flag)
            check_range(spec, values[spec.name], spec.flag)
        elif spec.info.required:
            raise UserError(f"{spec.flag} is missing: give it the {spec.info.help}")
        elif spec.default is not None:
            raise UserError(f"{spec.flag} must have a value")
    config = with_own_overlay(config.replace(**values))
    if config.megatron_config_path is not None:
        config = config.replace(**role_overrides(config, "actor"))
    config = derive(apply_adapter_config(split_load_iteration(config)))
    check_contradictions(config)
    check_trackers(config)
    check_files(config)
    if has_critic(config):
        critic_flags(config)
    check_shape_flags(config)
    check_megatron_flags(config)
    check_plugins(config)
    config.overlay.resolved = config
    return config


def resolve_for_run(config: Config) -> Config:
    """Return the config for one run: `config` itself if `resolve` made it and no run has used it, else resolved now.

    Invariant: of two runs with one config the second checks again what the first has written.
    """
    if config.overlay.resolved is not config:
        config = resolve(config)
    config.overlay.resolved = None
    return config


def derive(config: Config) -> Config:
    """Fill in derived values; outside the config, only the presence of a GPU is looked up."""
    for step in (
        _derive_modes,
        _derive_evaluation_alone,
        derive_async,
        derive_algorithm,
        derive_lora,
        derive_live,
        _derive_placement,
        derive_batch_sizes,
        _derive_functions_and_eval,
        _derive_other_flags,
    ):
        config = step(config)
    return config


def _derive_modes(config: Config) -> Config:
    changes: JsonObject = {}
    run_dir = config.output_dir or config.save or str(Path("outputs") / time.strftime("%Y%m%d-%H%M%S"))
    changes["output_dir"] = run_dir
    if config.save_interval is not None and config.save is None and config.save_hf is None:
        changes["save"] = run_dir
    if config.load_debug_rollout_data is not None:
        changes["debug_train_only"] = True
    if config.dump_details is not None:
        folder = Path(config.dump_details)
        changes["save_debug_rollout_data"] = config.save_debug_rollout_data or str(
            folder / "rollout_{rollout_id}.jsonl"
        )
        changes["save_debug_train_data"] = config.save_debug_train_data or str(folder / "train_{rollout_id}.jsonl")
    return config.replace(**changes)


def _derive_evaluation_alone(config: Config) -> Config:
    """Drop prompts for a run without steps, and trainers if the engines can read the same weights themselves."""
    if config.num_rollout != 0:
        return config
    changes: JsonObject = {}
    if config.prompt_data is None and config.prompt_config is None and config.data_source_path == DEFAULT_DATA_SOURCE:
        changes["disable_rollout_global_dataset"] = True
    made_by_a_trainer = config.load or config.ref_load or config.lora_load or config.check_weight_update_equal
    if evaluates(config) and not made_by_a_trainer and not config.debug_train_only and config.async_mode is None:
        changes["debug_rollout_only"] = True
    return config.replace(**changes)


def _derive_placement(config: Config) -> Config:
    colocate, rollout_gpus = config.colocate, config.rollout_num_gpus
    if rollout_gpus is None and is_async(config) and not colocate:
        rollout_gpus = config.rollout_num_gpus_per_engine
    if rollout_gpus is None:
        colocate, rollout_gpus = True, num_trainers(config)
    return config.replace(colocate=colocate, rollout_num_gpus=rollout_gpus)


def _derive_functions_and_eval(config: Config) -> Config:
    if config.loss_type == "sft_loss" and config.rollout_function_path == DEFAULT_ROLLOUT_FUNCTION:
        config = config.replace(rollout_function_path=SFT_ROLLOUT_FUNCTION)
    changes: JsonObject = {}
    if config.rollout_max_prompt_len is None and config.rollout_max_context_len is not None:
        changes["rollout_max_prompt_len"] = config.rollout_max_context_len - 1
    if config.eval_max_prompt_len is None and config.eval_max_context_len is not None:
        changes["eval_max_prompt_len"] = config.eval_max_context_len - 1
    if config.eval_function_path is None and config.rollout_function_path == SFT_ROLLOUT_FUNCTION:
        changes["eval_function_path"] = DEFAULT_ROLLOUT_FUNCTION
    config = config.replace(**changes)
    followed = {spec.name: spec.info.follows for spec in FLAG_SPECS.values() if spec.info.follows is not None}
    missing = {name: flag for name, flag in followed.items() if getattr(config, name) is None}
    return config.replace(**{name: getattr(config, flag[2:].replace("-", "_")) for name, flag in missing.items()})


def _derive_other_flags(config: Config) -> Config:
    changes: JsonObject = {}
    if config.fleet_address is not None:
        changes["use_fault_tolerance"] = True
    if config.offload:
        changes |= {"offload_rollout": True, "offload_train": True}
    if config.freeze_indexer and INDEXER_PATTERN not in (config.freeze_params_name_list or ()):
        changes["freeze_params_name_list"] = [*(config.freeze_params_name_list or ()), INDEXER_PATTERN]
    if config.carried.get("bf16") and config.dtype == "auto":
        changes["dtype"] = "bfloat16"
    if config.recompute_granularity is not None:
        changes["recompute_activations"] = True  # Megatron's flag for the same
    elif config.recompute_activations and uses_megatron(config):
        changes |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if config.moe_token_dispatcher_type == "allgather":
        changes["moe_token_dispatcher_type"] = "alltoall"  # as in upstream slime
    return config.replace(**changes)
