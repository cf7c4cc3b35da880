"""Checks of files, the model's shape and trackers, and the flags of a live service.

Each failure is one sentence with the remedy.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from slime.algorithms.estimators import NONZERO_STD_FILTER
from slime.config.algorithm import estimator_of
from slime.config.config import Config
from slime.config.datasets import eval_datasets, reads_prompts, train_datasets
from slime.config.fields import flag_name
from slime.config.flags.rollout import DEFAULT_ROLLOUT_FUNCTION, FULL
from slime.config.initial_weights import check_weight_sources, find_initial_weights
from slime.config.lora import check_adapter
from slime.config.megatron_flags import CHOICES, COMPARED_SHAPE_KEYS, NEUTRAL, REFUSED_BY_MEGATRON, given_settings
from slime.config.model_folder import dataset_hint, read_model_config, read_shape
from slime.config.parallelism import uses_megatron
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

_SLICE = re.compile(r"(?P<path>.*)@\[-?\d*:-?\d*\]")


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
