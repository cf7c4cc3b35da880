"""Checks across flags and on files, including those of a live service; each failure is one sentence with the remedy.

They run on a config whose values are derived and in range, the cheapest checks first.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from slime.algorithms.estimators import NONZERO_STD_FILTER
from slime.config.algorithm import algorithm_contradictions, biased_sampling_flags, estimator_of
from slime.config.async_mode import async_contradictions
from slime.config.config import Config, given_flags
from slime.config.datasets import eval_datasets, mixture_contradictions, reads_prompts, train_datasets
from slime.config.fields import flag_name
from slime.config.flags.data import DEFAULT_DATA_SOURCE
from slime.config.flags.rollout import DEFAULT_ROLLOUT_FUNCTION, FULL
from slime.config.initial_weights import check_weight_sources, find_initial_weights
from slime.config.lora import check_adapter, lora_contradictions
from slime.config.megatron_flags import CHOICES, COMPARED_SHAPE_KEYS, NEUTRAL, REFUSED_BY_MEGATRON, given_settings
from slime.config.model_folder import dataset_hint, read_model_config, read_shape
from slime.config.parallelism import layout_contradictions, sharing_contradictions, uses_megatron
from slime.config.paths import check_folders
from slime.errors import UserError
from slime.storage.json_types import JsonObject

LIVE_GENERATE = "slime.agent.online.generate"
TRAFFIC_BASELINE = "slime.agent.online.traffic_baseline"


def derive_live(config: Config) -> Config:
    """Set the flags of a live service: no prompt file, exchanges of clients as samples, the traffic as baseline."""
    if config.live_judge_path is None:
        return config
    changes: JsonObject = {"disable_rollout_global_dataset": True}
    if config.custom_generate_function_path is None:
        changes["custom_generate_function_path"] = LIVE_GENERATE
    if config.custom_reward_post_process_path is None and estimator_of(config).group_relative:
        changes["custom_reward_post_process_path"] = TRAFFIC_BASELINE
    return config.replace(**changes)


def live_contradictions(config: Config) -> Iterator[str]:
    """Yield one sentence for each flag that contradicts a live service."""
    if config.live_judge_path is None:
        if config.live_filter_path is not None:
            yield "--live-filter-path needs a live service: name the function that judges with --live-judge-path"
        return
    if config.async_mode != FULL or config.max_weight_staleness == 0:
        yield "--live-judge-path serves clients while it trains: use slime train-async --async-mode full"
    if config.n_samples_per_prompt != 1:
        yield (
            f"--n-samples-per-prompt {config.n_samples_per_prompt} does not fit a live service, which gives a client "
            "one answer per request: use groups of 1"
        )
    if config.dynamic_sampling_filter_path == NONZERO_STD_FILTER:
        yield (
            f"--dynamic-sampling-filter-path {NONZERO_STD_FILTER} drops every group of a live service, whose groups "
            "have one sample: drop the flag"
        )
    if config.prompt_data is not None:
        yield "--prompt-data is not read by a live service, whose prompts come from clients: drop it"


DATA_SUFFIXES = (".jsonl", ".parquet")
"""Suffixes of prompt files."""

DUMP_SUFFIXES = (".jsonl", ".pt")
"""Suffixes of files with the samples of a rollout."""

_ADDRESS = re.compile(r"(?:[^\s:]+:|\[[0-9a-fA-F:.]+\]:|:)?[0-9]{1,5}")
_SLICE = re.compile(r"(?P<path>.*)@\[-?\d*:-?\d*\]")


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


def check_files(config: Config) -> None:
    """Raise a `UserError` for the first file or folder that the run could not read or write."""
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
    check_folders(config)


def check_trackers(config: Config) -> None:
    """Raise a `UserError` if the package of a requested tracker is not installed."""
    if config.use_wandb and importlib.util.find_spec("wandb") is None:
        raise UserError("--use-wandb needs the package wandb, which is not installed: pip install wandb, or drop it")
    if config.use_tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "--use-tensorboard needs the package tensorboard, which is not installed: pip install tensorboard, or turn "
            "it off with --no-use-tensorboard"
        )


def _check_data_file(data: str, flag: str, *, is_ours: bool) -> None:
    """Raise a `UserError` unless the file can be read; `is_ours`: its format must be one of `DATA_SUFFIXES`."""
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


def check_shape_flags(config: Config) -> None:
    """Raise a `UserError` if routing replay is on and the model has no routers, or a shape flag contradicts the model.

    A flag whose number differs from config.json is refused with both numbers; values that config.json does not have
    are not compared.
    """
    compared = (*COMPARED_SHAPE_KEYS, "untie_embeddings_and_output_weights")
    given = {name: config.carried[name] for name in compared if name in config.carried}
    if not given and not config.use_routing_replay:
        return
    file = Path(config.hf_checkpoint) / "config.json"
    model, shape = read_model_config(file), read_shape(file)
    of_latent_attention = ("kv_channels", "num_query_groups") if "kv_lora_rank" in model else ()
    for name, value in given.items():
        hf_name, number = shape.get(name, ("", None))
        if number is not None and name not in of_latent_attention and not math.isclose(number, value, rel_tol=1e-6):
            raise UserError(
                f"{flag_name(name)} {value} contradicts {hf_name} {number} in {file}: "
                "drop the flag or name the right model folder"
            )
    if given.get("untie_embeddings_and_output_weights") and model.get("tie_word_embeddings") is True:
        raise UserError(
            f"--untie-embeddings-and-output-weights contradicts tie_word_embeddings true in {file}: drop the flag or "
            "name the right model folder"
        )
    if config.use_routing_replay and "num_experts" not in shape:
        flag = "--use-rollout-routing-replay" if config.use_rollout_routing_replay else "--use-routing-replay"
        raise UserError(f"{flag} repeats the choices of routers, but the model of {file} has none: drop the flag")


def check_megatron_flags(config: Config) -> None:
    """Refuse Megatron's flags that would change the computation, and settings that Megatron's trainer does not have."""
    if uses_megatron(config):
        for flag, why in REFUSED_BY_MEGATRON.items():
            if config.carried.get(flag.replace("-", "_")):
                raise UserError(f"--{flag} is not supported: {why}")
        spec = config.carried.get("spec")
        if spec and not str(spec[0]).startswith(("slime_plugins.", "megatron.")):  # upstream's layers exist here
            raise UserError(
                f"--spec {' '.join(spec)} is not supported: slime has the layers of every family; build a stage of "
                "your own with --custom-model-provider-path"
            )
        for name, value in given_settings(config.carried).items():
            known, words = CHOICES.get(name), value if isinstance(value, list) else [value]
            wrong = [word for word in words if known is not None and word not in known]
            if known and wrong:
                raise UserError(f"--{name.replace('_', '-')} {wrong[0]} is none of {', '.join(known)}")
    for flag, (neutral, why) in NEUTRAL.items():
        value = config.carried.get(flag.replace("-", "_"))
        if value is None or value is False or value in neutral:
            continue
        if flag == "finetune" and not find_initial_weights(config).resumes:
            continue
        raise UserError(f"--{flag}{'' if value is True else f' {value}'} is not supported: {why}")
