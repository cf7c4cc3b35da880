"""Checks across flags and on files: each failure is one sentence with the remedy.

They run on a config whose values are derived and in range; the order is cheapest first.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.algorithms.estimators import NONZERO_STD_FILTER
from slime.config.algorithm import algorithm_contradictions, cut_sampling, estimator_of
from slime.config.async_mode import async_contradictions
from slime.config.config import FLAG_SPECS, Config
from slime.config.datasets import eval_datasets, mixture_contradictions, reads_prompts, train_datasets
from slime.config.fields import FlagSpec
from slime.config.flags.data import DEFAULT_DATA_SOURCE
from slime.config.flags.rollout import DEFAULT_ROLLOUT_FUNCTION, FULL
from slime.config.initial_weights import check_weight_sources, find_start
from slime.config.lora import check_adapter, lora_contradictions
from slime.config.megatron_flags import CHOICES, NEUTRAL, REFUSED_BY_MEGATRON, given_settings
from slime.config.model_folder import dataset_hint
from slime.config.parallelism import layout_contradictions, sharing_contradictions, uses_megatron
from slime.config.paths import check_folders
from slime.errors import UserError

# What a live service implies, and what does not go together with it.

LIVE_GENERATE = "slime.agent.online.service.generate"
TRAFFIC_BASELINE = "slime.agent.online.service.traffic_baseline"


def derive_live(config: Config) -> Config:
    """Samples are exchanges of clients: no prompt file, one answer a prompt, and the traffic for a baseline."""
    if config.live_judge_path is None:
        return config
    changes: dict[str, Any] = {"disable_rollout_global_dataset": True}
    if config.custom_generate_function_path is None:
        changes["custom_generate_function_path"] = LIVE_GENERATE
    if config.custom_reward_post_process_path is None and estimator_of(config).group_relative:
        changes["custom_reward_post_process_path"] = TRAFFIC_BASELINE
    return config.replace(**changes)


def live_contradictions(config: Config) -> Iterator[str]:
    """Sentences about flags that exclude each other."""
    if config.live_judge_path is None:
        if config.live_filter_path is not None:
            yield "--live-filter-path is for a live service: name what judges its answers with --live-judge-path"
        return
    if config.async_mode != FULL or config.max_weight_staleness == 0:
        yield "--live-judge-path serves clients while it trains: use slime train-async --async-mode full"
    if config.n_samples_per_prompt != 1:
        yield (
            f"--n-samples-per-prompt {config.n_samples_per_prompt}: a client gets one answer to what it asks, so a "
            "live service has groups of 1"
        )
    if config.dynamic_sampling_filter_path == NONZERO_STD_FILTER:
        yield (
            f"--dynamic-sampling-filter-path {NONZERO_STD_FILTER} drops every group of a live service, whose groups "
            "have one sample: drop the flag"
        )
    if config.prompt_data is not None:
        yield "--prompt-data is not read by a live service, whose prompts are what clients ask: drop it"


DATA_SUFFIXES = (".jsonl", ".parquet")
"""Kinds of files that hold prompts."""

DUMP_SUFFIXES = (".jsonl", ".pt")
"""Kinds of files that hold the samples of a rollout."""

_ADDRESS = re.compile(r"(?:[^\s:]+:|\[[0-9a-fA-F:.]+\]:|:)?[0-9]{1,5}")
_SLICE = re.compile(r"(?P<path>.*)@\[-?\d*:-?\d*\]")


def check_all_there(config: Config) -> None:
    """What no run can do without is there, or all that is missing is named at once."""
    missing = [f"{spec.flag} {spec.metavar}" for spec in FLAG_SPECS.values() if _is_missing(config, spec)]
    if _lacks_prompts(config):
        missing.append("--prompt-data PATH")
    if len(missing) > 1:
        raise UserError(f"{', '.join(missing[:-1])} and {missing[-1]} are missing: give all of them")


def _is_missing(config: Config, spec: FlagSpec) -> bool:
    return spec.info.required and getattr(config, spec.name) is None


def _lacks_prompts(config: Config) -> bool:
    own_source = config.disable_rollout_global_dataset or config.data_source_path != DEFAULT_DATA_SOURCE
    elsewhere = own_source or config.plan_cluster is not None or config.num_rollout == 0
    given = config.prompt_data is not None or config.prompt_config is not None
    return not given and not elsewhere and config.load_debug_rollout_data is None


def check_flags_fit(config: Config) -> None:
    """The flags make sense together."""
    for sentence in _contradictions(config):
        raise UserError(sentence)
    _check_patterns("--freeze-params-name-list", config.freeze_params_name_list)
    _check_patterns("--only-train-params-name-list", config.only_train_params_name_list)


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
    yield from _float8(config)
    yield from _saving(config)
    yield from _environment(config)


def _length_and_data(config: Config) -> Iterator[str]:
    replays = config.load_debug_rollout_data is not None
    if _lacks_prompts(config):
        yield "--prompt-data is missing: name a .jsonl or .parquet file of prompts"
    if config.num_rollout is None and config.disable_rollout_global_dataset and not replays:
        yield "--disable-rollout-global-dataset leaves no prompts to pass over: give the run's length, --num-rollout"
    if config.over_sampling_batch_size < config.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {config.over_sampling_batch_size} is less than --rollout-batch-size "
            f"{config.rollout_batch_size}"
        )
    if config.mask_offpolicy_in_partial_rollout and not config.partial_rollout:
        yield "--mask-offpolicy-in-partial-rollout is about continued responses: add --partial-rollout"
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
            "--rollout-num-gpus 0 leaves nobody to generate responses: give at least one, or name engines that run "
            "already with --rollout-external-engine-addrs"
        )
    yield from _door(config, has_engines)


def _door(config: Config, has_engines: bool) -> Iterator[str]:
    address = config.fleet_address
    if address is None:
        return
    if not _ADDRESS.fullmatch(address):
        yield f"--fleet-address {address}: give HOST:PORT, or PORT for loopback alone"
    if not has_engines or config.debug_train_only:
        yield f"--fleet-address {address}: nothing is generated in this run, so that no engine can help it"
    if config.offload_rollout:
        yield (
            "--fleet-address does not go with --offload-rollout: engines of other machines have no reason to give "
            "their memory back; drop one of them"
        )


def _algorithm(config: Config) -> Iterator[str]:
    yield from algorithm_contradictions(config)
    cut = cut_sampling(config)
    if cut is not None and not config.allow_biased_sampling:
        yield (
            f"{cut}: tokens are sampled from a part of the vocabulary, but training takes their log-probs over all of "
            "it, which biases the gradient: leave it out, or accept that with --allow-biased-sampling"
        )
    if config.rm_type is not None and config.rm_type.removeprefix("boxed_") == "remote_rm" and config.rm_url is None:
        yield "--rm-type remote_rm needs --rm-url, the address of the reward service"
    if config.freeze_params_name_list and config.only_train_params_name_list:
        yield "--freeze-params-name-list and --only-train-params-name-list exclude each other: keep one"
    yield from _moments(config)
    yield from sharing_contradictions(config)
    yield from _schedule(config)


def _moments(config: Config) -> Iterator[str]:
    asked = [
        flag
        for flag, given in (
            ("--exp-avg-dtype", config.exp_avg_dtype != "fp32"),
            ("--exp-avg-sq-dtype", config.exp_avg_sq_dtype != "fp32"),
            ("--optimizer-cpu-offload", config.optimizer_cpu_offload),
        )
        if given
    ]
    if config.use_stateless_adam and asked:
        yield f"{asked[0]} is about moments, and --use-stateless-adam keeps none: leave out one of the two"


def _float8(config: Config) -> Iterator[str]:
    if not config.fp8:
        return
    if config.device == "cpu":
        yield "--fp8 needs an NVIDIA GPU with units for 8-bit floats, and --device cpu trains on none: drop one"
    if config.dtype == "float32":
        yield "--fp8 goes with --dtype bfloat16, and --dtype float32 was given: drop one"
    if config.lora_rank > 0:
        yield f"--fp8 is for training all weights, and --lora-rank {config.lora_rank} trains an adapter: drop one"


def _schedule(config: Config) -> Iterator[str]:
    if config.lr_decay_style != "constant" and config.min_lr > config.lr:
        yield f"--min-lr {config.min_lr} is larger than --lr {config.lr}: a decay goes down"
    if config.lr_decay_iters is not None and config.lr_warmup_iters >= config.lr_decay_iters:
        yield f"--lr-warmup-iters {config.lr_warmup_iters} must be less than --lr-decay-iters {config.lr_decay_iters}"
    if config.lr_decay_iters is not None and config.lr_decay_samples is not None:
        yield "--lr-decay-iters and --lr-decay-samples are two lengths of one decay: keep one"
    warmups = (config.lr_warmup_iters, config.lr_warmup_samples, config.lr_warmup_fraction)
    if sum(map(bool, warmups)) > 1:
        yield "--lr-warmup-iters, --lr-warmup-samples and --lr-warmup-fraction are lengths of one warm-up: keep one"
    if config.lr_warmup_init > config.lr:
        yield f"--lr-warmup-init {config.lr_warmup_init} is larger than --lr {config.lr}: a warm-up goes up"
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


def _saving(config: Config) -> Iterator[str]:
    if config.ckpt_keep is not None and config.save is None:
        yield f"--ckpt-keep {config.ckpt_keep} has no effect without --save DIR"
    if config.save_hf is not None:
        try:
            config.save_hf.format(rollout_id=0)
        except (KeyError, IndexError, ValueError):
            yield f"--save-hf {config.save_hf} may hold only the placeholder {{rollout_id}}"


def _environment(config: Config) -> Iterator[str]:
    for name, value in config.train_env_vars.items():
        if not name or "=" in name or "\0" in name or not isinstance(value, str | int | float):
            yield f"--train-env-vars: {name!r} with the value {value!r} is no environment variable: a name and a text"


def _check_patterns(flag: str, patterns: Sequence[str] | None) -> None:
    for pattern in patterns or ():
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"{flag} {pattern!r} is not a regular expression: {error}") from error


def check_files(config: Config) -> None:
    """What the run reads exists and can be read; what it writes can be written."""
    check_weight_sources(config)
    check_adapter(config)
    replays = config.load_debug_rollout_data is not None
    if config.prompt_data is not None and not config.disable_rollout_global_dataset and not replays:
        _check_data_file(config.prompt_data, "--prompt-data", is_ours=reads_prompts(config))
    if not replays:
        for listed in train_datasets(config):
            _check_data_file(listed.path, listed.origin, is_ours=reads_prompts(config))
    if not config.debug_train_only:
        for dataset in eval_datasets(config):
            is_ours = config.eval_function_path == DEFAULT_ROLLOUT_FUNCTION
            _check_data_file(dataset.path, dataset.origin, is_ours=is_ours)
    _check_dump_files(config)
    check_folders(config)


def check_trackers(config: Config) -> None:
    """The packages that metrics are to be shown with are installed."""
    if config.use_wandb and importlib.util.find_spec("wandb") is None:
        raise UserError("--use-wandb needs the package wandb, which is not installed: pip install wandb, or drop it")
    if config.use_tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "--use-tensorboard needs the package tensorboard, which is not installed: pip install tensorboard, or turn "
            "it off with --no-use-tensorboard"
        )


def _check_dump_files(config: Config) -> None:
    for flag, template in (
        ("--save-debug-rollout-data", config.save_debug_rollout_data),
        ("--load-debug-rollout-data", config.load_debug_rollout_data),
    ):
        if template is None:
            continue
        if Path(template).suffix not in DUMP_SUFFIXES:
            raise UserError(f"{flag} {template}: a dump is a file that ends in {' or '.join(DUMP_SUFFIXES)}")
        try:
            first = Path(template.format(rollout_id=config.start_rollout_id or 0))
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(f"{flag} {template} may hold only the placeholder {{rollout_id}}") from error
        if flag == "--save-debug-rollout-data" and str(first) == str(Path(template)):
            raise UserError(f"{flag} {template} has no {{rollout_id}}: every rollout would overwrite the one before")
        if flag == "--load-debug-rollout-data" and config.load is None and not first.is_file():
            raise UserError(f"{flag}: there is no dump {first}")


def _check_data_file(data: str, flag: str, *, is_ours: bool) -> None:
    """The file exists, and has a format that we read where no function of the user reads it."""
    match = _SLICE.fullmatch(data)
    path = Path(match["path"] if match else data)
    if not path.exists():
        hint = dataset_hint(str(path), flag)
        raise UserError(f"{flag}: there is no file {path}{hint}")
    if is_ours and path.is_dir():
        raise UserError(f"{flag}: {path} is a folder, but a .jsonl or .parquet file is needed")
    if is_ours and path.suffix not in DATA_SUFFIXES:
        raise UserError(f"{flag}: {path} ends in {path.suffix or 'nothing'!r}: convert it to .jsonl or .parquet")
    if not os.access(path, os.R_OK):
        raise UserError(f"{flag}: no permission to read {path}")


def check_numbers_stay(config: Config) -> None:
    """Megatron's flags that change what is computed have values with which they do not, or are refused."""
    if uses_megatron(config):
        _check_settings(config)
    for flag, (neutral, why) in NEUTRAL.items():
        value = config.carried.get(flag.replace("-", "_"))
        if value is None or value is False or value in neutral:
            continue
        if flag == "finetune" and not find_start(config).resumes:
            continue
        raise UserError(f"--{flag}{'' if value is True else f' {value}'} is not taken: {why}")


def _check_settings(config: Config) -> None:
    for flag, why in REFUSED_BY_MEGATRON.items():
        if config.carried.get(flag.replace("-", "_")):
            raise UserError(f"--{flag} is not taken: {why}")
    spec = config.carried.get("spec")
    if spec and not str(spec[0]).startswith(("slime_plugins.", "megatron.")):  # upstream's own, whose layers are here
        raise UserError(
            f"--spec {' '.join(spec)} is not taken: slime has the layers of every family; make a stage of your own "
            "with --custom-model-provider-path"
        )
    for name, value in given_settings(config.carried).items():
        known, words = CHOICES.get(name), value if isinstance(value, list) else [value]
        wrong = [word for word in words if known is not None and word not in known]
        if known and wrong:
            raise UserError(f"--{name.replace('_', '-')} {wrong[0]} is none of {', '.join(known)}")
