"""Derivation of missing values and the complete check of a config; each failure is one sentence with the remedy.

Checks run on a config whose values are derived and in range, the cheapest checks first.

Invariant: `resolve` is idempotent, and a config that it returns has no None in a field whose annotation excludes None.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path

from slime.config.algorithm import algorithm_contradictions, biased_sampling_flags, derive_algorithm, has_critic
from slime.config.async_mode import async_contradictions, derive_async, is_async
from slime.config.batch import derive_batch_sizes, num_trainers
from slime.config.checks import (
    check_files,
    check_megatron_flags,
    check_shape_flags,
    check_trackers,
    derive_live,
    live_contradictions,
)
from slime.config.config import FLAG_SPECS, Config, check_range, coerce, given_flags
from slime.config.critic import critic_flags, role_overrides
from slime.config.datasets import evaluates, mixture_contradictions
from slime.config.fields import flag_name
from slime.config.flags.data import DEFAULT_DATA_SOURCE
from slime.config.flags.rollout import DEFAULT_ROLLOUT_FUNCTION, SFT_ROLLOUT_FUNCTION
from slime.config.initial_weights import split_load_iteration
from slime.config.lora import apply_adapter_config, derive_lora, lora_contradictions
from slime.config.parallelism import layout_contradictions, sharing_contradictions, uses_megatron
from slime.config.plugins.view import check_plugins, with_own_overlay
from slime.errors import UserError
from slime.storage.json_types import JsonObject

_log = logging.getLogger(__name__)

INDEXER_PATTERN = r"\.indexer\."
"""Pattern in the parameter names of the indexers of sparse attention."""

_ADDRESS = re.compile(r"(?:[^\s:]+:|\[[0-9a-fA-F:.]+\]:|:)?[0-9]{1,5}")


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


def lacks_prompts(config: Config) -> bool:
    """Return whether the run needs a prompt file and none is given."""
    own_source = config.disable_rollout_global_dataset or config.data_source_path != DEFAULT_DATA_SOURCE
    elsewhere = own_source or config.plan_cluster is not None or config.num_rollout == 0
    given = config.prompt_data is not None or config.prompt_config is not None
    return not given and not elsewhere and config.load_debug_rollout_data is None


def check_contradictions(config: Config) -> None:
    """Raise a `UserError` for the first contradiction between flags."""
    for sentence in _contradictions(config):
        raise UserError(sentence)


def _contradictions(config: Config) -> Iterator[str]:
    if config.plan_cluster is not None and not config.dry_run:
        yield f"--plan-cluster {config.plan_cluster} is for a plan: slime plan, or slime train --dry-run"
    yield from _length_and_data(config)
    yield from mixture_contradictions(config)
    yield from _placement(config)
    yield from async_contradictions(config)
    yield from live_contradictions(config)
    yield from _algorithm(config)
    yield from lora_contradictions(config)
    if config.fp8:
        if config.device == "cpu":
            yield "--fp8 needs an NVIDIA GPU with units for 8-bit floats, but --device cpu is given: drop one"
        if config.dtype == "float32":
            yield "--fp8 needs --dtype bfloat16, but --dtype float32 is given: drop one"
        if config.lora_rank > 0:
            yield f"--fp8 is for training all weights, but --lora-rank {config.lora_rank} trains an adapter: drop one"
    if config.ckpt_keep is not None and config.save is None:
        yield f"--ckpt-keep {config.ckpt_keep} has no effect without --save DIR"
    if config.save_hf is not None:
        try:
            config.save_hf.format(rollout_id=0)
        except (KeyError, IndexError, ValueError):
            yield f"--save-hf {config.save_hf} may hold only the placeholder {{rollout_id}}"
    for name, value in config.train_env_vars.items():
        if not name or "=" in name or "\0" in name or not isinstance(value, str | int | float):
            yield f"--train-env-vars: {name!r} with the value {value!r} is not an environment variable: name and text"
    for flag, patterns in (
        ("--freeze-params-name-list", config.freeze_params_name_list),
        ("--only-train-params-name-list", config.only_train_params_name_list),
    ):
        for pattern in patterns or ():
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"{flag} {pattern!r} is not a regular expression: {error}"


def _length_and_data(config: Config) -> Iterator[str]:
    replays = config.load_debug_rollout_data is not None
    if lacks_prompts(config):
        yield "--prompt-data is missing: name a .jsonl or .parquet file of prompts"
    if config.num_rollout is None and config.disable_rollout_global_dataset and not replays:
        yield "--disable-rollout-global-dataset leaves no prompts to count epochs: set the run's length, --num-rollout"
    if config.over_sampling_batch_size < config.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {config.over_sampling_batch_size} is less than --rollout-batch-size "
            f"{config.rollout_batch_size}"
        )
    if config.mask_offpolicy_in_partial_rollout and not config.partial_rollout:
        yield "--mask-offpolicy-in-partial-rollout applies to continued responses: add --partial-rollout"
    if config.debug_rollout_only and config.debug_train_only:
        yield "--debug-rollout-only and --debug-train-only leave nothing to run: keep one"
    generates = config.rollout_function_path == DEFAULT_ROLLOUT_FUNCTION and not config.custom_generate_function_path
    if config.debug_train_only and generates and not replays:
        yield "--debug-train-only starts no engine to generate with: add --load-debug-rollout-data FILE"
    if config.balance_by_flops and not config.use_dynamic_batch_size:
        yield "--balance-by-flops shapes dynamic micro-batches: add --use-dynamic-batch-size --max-tokens-per-gpu"
    if config.use_dynamic_batch_size and config.max_tokens_per_gpu is None:
        yield "--use-dynamic-batch-size needs --max-tokens-per-gpu, the tokens of one forward pass"
    context, prompt = config.rollout_max_context_len, config.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt >= context:
        yield f"--rollout-max-prompt-len {prompt} leaves no room for a response in --rollout-max-context-len {context}"


def _placement(config: Config) -> Iterator[str]:
    yield from layout_contradictions(config)
    gpus, per_engine = config.rollout_num_gpus, config.rollout_num_gpus_per_engine
    if gpus % per_engine:
        yield f"--rollout-num-gpus {gpus} is not a multiple of --rollout-num-gpus-per-engine {per_engine}"
    has_engines = gpus > 0 or config.rollout_external_engine_addrs is not None
    asks_engines = config.rollout_function_path == DEFAULT_ROLLOUT_FUNCTION and not config.debug_train_only
    if asks_engines and not has_engines:
        yield (
            "--rollout-num-gpus 0 leaves no rollout engines: set at least 1, or name running engines with "
            "--rollout-external-engine-addrs"
        )
    address = config.fleet_address
    if address is None:
        return
    if not _ADDRESS.fullmatch(address):
        yield f"--fleet-address {address} is not an address: give HOST:PORT, or PORT to listen on loopback"
    if not has_engines or config.debug_train_only:
        yield f"--fleet-address {address} accepts engines, but this run generates nothing: drop it"
    if config.offload_rollout:
        yield (
            "--fleet-address cannot be combined with --offload-rollout: engines on other machines have no reason to "
            "free their memory; drop one"
        )


def _algorithm(config: Config) -> Iterator[str]:
    yield from algorithm_contradictions(config)
    cut = biased_sampling_flags(config)
    if cut is not None and not config.allow_biased_sampling:
        yield (
            f"{cut}: tokens are sampled from a part of the vocabulary, but training takes their log-probs over all of "
            "it, which biases the gradient: drop that, or accept the bias with --allow-biased-sampling"
        )
    if config.rm_type is not None and config.rm_type.removeprefix("boxed_") == "remote_rm" and config.rm_url is None:
        yield "--rm-type remote_rm needs --rm-url, the address of the reward service"
    if config.freeze_params_name_list and config.only_train_params_name_list:
        yield "--freeze-params-name-list and --only-train-params-name-list exclude each other: keep one"
    moment_flags = given_flags(config, ("exp_avg_dtype", "exp_avg_sq_dtype", "optimizer_cpu_offload"))
    if config.use_stateless_adam and moment_flags:
        flag = flag_name(next(iter(moment_flags)))
        yield f"{flag} applies to Adam's moments, and --use-stateless-adam keeps none: drop one"
    yield from sharing_contradictions(config)
    yield from _schedule(config)


def _schedule(config: Config) -> Iterator[str]:
    if config.lr_decay_style != "constant" and config.min_lr > config.lr:
        yield f"--min-lr {config.min_lr} is larger than --lr {config.lr}, where the decay starts: lower it"
    if config.lr_decay_iters is not None and config.lr_warmup_iters >= config.lr_decay_iters:
        yield f"--lr-warmup-iters {config.lr_warmup_iters} must be less than --lr-decay-iters {config.lr_decay_iters}"
    if config.lr_decay_iters is not None and config.lr_decay_samples is not None:
        yield "--lr-decay-iters and --lr-decay-samples both set the length of the decay: keep one"
    warmups = (config.lr_warmup_iters, config.lr_warmup_samples, config.lr_warmup_fraction)
    if sum(map(bool, warmups)) > 1:
        yield "--lr-warmup-iters, --lr-warmup-samples and --lr-warmup-fraction all set the warm-up's length: keep one"
    if config.lr_warmup_init > config.lr:
        yield f"--lr-warmup-init {config.lr_warmup_init} is larger than --lr {config.lr}, where warm-up ends: lower it"
    if config.lr_decay_style == "WSD" and config.lr_wsd_decay_iters is None:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-iters, the steps of the decay at its end"
    if config.lr_decay_style != "WSD" and config.lr_wsd_decay_iters is not None:
        yield f"--lr-wsd-decay-iters is part of --lr-decay-style WSD, not of {config.lr_decay_style}: keep one"
    first, last = config.start_weight_decay, config.end_weight_decay
    if config.weight_decay_incr_style == "constant" and (first, last) != (None, None):
        yield (
            "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine: with "
            "constant give --weight-decay alone"
        )
    if config.weight_decay_incr_style != "constant" and None in (first, last):
        style = config.weight_decay_incr_style
        yield f"--weight-decay-incr-style {style} needs both --start-weight-decay and --end-weight-decay"
