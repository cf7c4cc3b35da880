"""Checks across flags, on files and on plugin functions: each failure is one sentence with the remedy.

They run on a config whose values are derived and in range; the order is cheapest first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from slime.config.algorithm import algorithm_contradictions
from slime.config.config import Config
from slime.config.groups.data import DEFAULT_DATA_SOURCE
from slime.config.groups.rollout import DEFAULT_ROLLOUT_FUNCTION, SFT_ROLLOUT_FUNCTION
from slime.config.shape_flags import read_model_config
from slime.errors import UserError
from slime.plugins import load_function

_SLICE = re.compile(r"(?P<path>.*)@\[-?\d*:-?\d*\]")
_BUILT_IN = (DEFAULT_DATA_SOURCE, DEFAULT_ROLLOUT_FUNCTION, SFT_ROLLOUT_FUNCTION)


def check_flags_fit(config: Config) -> None:
    """The flags make sense together."""
    for sentence in _contradictions(config):
        raise UserError(sentence)
    _check_patterns("--freeze-params-name-list", config.freeze_params_name_list)
    _check_patterns("--only-train-params-name-list", config.only_train_params_name_list)


def _contradictions(config: Config) -> Iterator[str]:
    yield from _length_and_data(config)
    yield from _placement(config)
    yield from _algorithm(config)
    yield from _evaluation(config)
    yield from _saving(config)


def _length_and_data(config: Config) -> Iterator[str]:
    sft = config.loss_type == "sft_loss"
    if config.num_rollout is None and config.num_epoch is None:
        yield "the length of the run is missing: give --num-rollout (steps) or --num-epoch (passes over the prompts)"
    own_source = config.disable_rollout_global_dataset or config.data_source_path != DEFAULT_DATA_SOURCE
    if config.prompt_data is None and not own_source:
        yield "--prompt-data is missing: name a .jsonl or .parquet file of prompts"
    if config.num_rollout is None and config.disable_rollout_global_dataset:
        yield "--num-epoch needs prompt data, but --disable-rollout-global-dataset turns it off: give --num-rollout"
    if config.over_sampling_batch_size < config.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {config.over_sampling_batch_size} is less than --rollout-batch-size "
            f"{config.rollout_batch_size}"
        )
    if config.mask_offpolicy_in_partial_rollout and not config.partial_rollout:
        yield "--mask-offpolicy-in-partial-rollout is about continued responses: add --partial-rollout"
    if config.debug_rollout_only and config.debug_train_only:
        yield "--debug-rollout-only and --debug-train-only leave nothing to run: keep one"
    if config.balance_by_flops and not config.use_dynamic_batch_size:
        yield "--balance-by-flops shapes dynamic micro-batches: add --use-dynamic-batch-size --max-tokens-per-gpu"
    if config.rollout_max_response_len is None and not sft:
        yield "--rollout-max-response-len is missing: it bounds the tokens of one response"
    if config.use_dynamic_batch_size and config.max_tokens_per_gpu is None:
        yield "--use-dynamic-batch-size needs --max-tokens-per-gpu, the tokens of one forward pass"
    context, prompt = config.rollout_max_context_len, config.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt >= context:
        yield f"--rollout-max-prompt-len {prompt} leaves no room for a response in --rollout-max-context-len {context}"


def _placement(config: Config) -> Iterator[str]:
    gpus, per_engine = config.rollout_num_gpus, config.rollout_num_gpus_per_engine
    if gpus % per_engine:
        yield f"--rollout-num-gpus {gpus} is not a multiple of --rollout-num-gpus-per-engine {per_engine}"
    if gpus == 0 and config.loss_type != "sft_loss":
        yield "--rollout-num-gpus 0 leaves nobody to generate responses: give at least one"


def _algorithm(config: Config) -> Iterator[str]:
    yield from algorithm_contradictions(config)
    if config.rm_type is not None and config.rm_type.removeprefix("boxed_") == "remote_rm" and config.rm_url is None:
        yield "--rm-type remote_rm needs --rm-url, the address of the reward service"
    if config.freeze_params_name_list and config.only_train_params_name_list:
        yield "--freeze-params-name-list and --only-train-params-name-list exclude each other: keep one"
    if config.lr_decay_style != "constant" and config.min_lr > config.lr:
        yield f"--min-lr {config.min_lr} is larger than --lr {config.lr}: a decay goes down"
    if config.lr_decay_iters is not None and config.lr_warmup_iters >= config.lr_decay_iters:
        yield f"--lr-warmup-iters {config.lr_warmup_iters} must be less than --lr-decay-iters {config.lr_decay_iters}"


def _evaluation(config: Config) -> Iterator[str]:
    if config.eval_interval is not None and not config.eval_prompt_data:
        yield f"--eval-interval {config.eval_interval} has nothing to evaluate: give --eval-prompt-data NAME PATH"
    names = [name for name, _ in config.eval_prompt_data]
    for name in names:
        if names.count(name) > 1:
            yield f"--eval-prompt-data has two datasets named {name}: give each its own name"
    if config.eval_prompt_data and config.eval_max_response_len is None:
        yield "--eval-max-response-len is missing: it bounds the tokens of one evaluation response"


def _saving(config: Config) -> Iterator[str]:
    if config.save_interval is not None and config.save is None and config.save_hf is None:
        yield f"--save-interval {config.save_interval} has nowhere to save: give --save DIR"
    if config.ckpt_keep is not None and config.save is None:
        yield f"--ckpt-keep {config.ckpt_keep} has no effect without --save DIR"
    if config.save_hf is not None:
        try:
            config.save_hf.format(rollout_id=0)
        except (KeyError, IndexError, ValueError):
            yield f"--save-hf {config.save_hf} may hold only the placeholder {{rollout_id}}"


def _check_patterns(flag: str, patterns: Sequence[str] | None) -> None:
    for pattern in patterns or ():
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"{flag} {pattern!r} is not a regular expression: {error}") from error


def check_files(config: Config) -> None:
    """What the run reads exists and can be read; what it writes can be written."""
    check_model_folder(config.hf_checkpoint, "--hf-checkpoint")
    if config.prompt_data is not None and not config.disable_rollout_global_dataset:
        _check_data_file(config.prompt_data, "--prompt-data")
    for name, path in config.eval_prompt_data:
        _check_data_file(path, f"--eval-prompt-data {name}")
    _check_checkpoint_folders(config)
    for flag, folder in (
        ("--save", config.save),
        ("--save-hf", config.save_hf),
        ("--output-dir", config.output_dir),
        ("--update-weight-disk-dir", config.update_weight_disk_dir),
    ):
        if folder is not None:
            _check_writable(folder.partition("{")[0] or ".", flag)


def check_model_folder(folder: str, flag: str) -> None:
    """`folder` is a Hugging Face model folder: it exists and has a config.json that names a model type."""
    path = Path(folder)
    if not path.exists():
        raise UserError(f"there is no model folder {folder}: {flag} takes the path of a downloaded Hugging Face model")
    if not path.is_dir():
        raise UserError(f"{flag} {folder} is a file: it takes a model folder")
    if not (path / "config.json").exists():
        raise UserError(f"model folder {folder} has no config.json: {flag} takes a Hugging Face model folder")
    if "model_type" not in read_model_config(path / "config.json"):
        raise UserError(f"{path / 'config.json'} has no model_type: it does not describe a Hugging Face model")


def _check_data_file(data: str, flag: str) -> None:
    match = _SLICE.fullmatch(data)
    path = Path(match["path"] if match else data)
    if not path.exists():
        raise UserError(f"{flag}: there is no file {path}")
    if path.is_dir():
        raise UserError(f"{flag}: {path} is a folder, but a .jsonl or .parquet file is needed")
    if not os.access(path, os.R_OK):
        raise UserError(f"{flag}: no permission to read {path}")


def _check_checkpoint_folders(config: Config) -> None:
    for flag, folder in (("--load", config.load), ("--ref-load", config.ref_load)):
        if folder is None or Path(folder).is_dir():
            continue
        if flag == "--load" and config.save is not None and Path(folder).absolute() == Path(config.save).absolute():
            continue  # the first start of a run that resumes from its own checkpoints
        raise UserError(f"{flag}: there is no folder {folder}")


def _check_writable(folder: str, flag: str) -> None:
    path = Path(folder).absolute()
    if path.exists() and not path.is_dir():
        raise UserError(f"{flag} {folder} is a file, but a folder is needed")
    while not path.exists():
        path = path.parent
    if not path.is_dir():
        raise UserError(f"{flag} {folder} cannot be made: {path} is a file")
    if not os.access(path, os.W_OK):
        raise UserError(f"{flag} {folder} cannot be written: no permission for {path}")


def check_plugins(config: Config) -> None:
    """Every function the user named imports and takes the arguments it will get."""
    rollout_params = ("args", "rollout_id", "data_source")
    named: list[tuple[str, str | None, tuple[str, ...]]] = [
        ("--rollout-function-path", config.rollout_function_path, rollout_params),
        ("--eval-function-path", config.eval_function_path, rollout_params),
        (
            "--custom-generate-function-path",
            config.custom_generate_function_path,
            ("args", "sample", "sampling_params"),
        ),
        ("--custom-rm-path", config.custom_rm_path, ("args", "samples" if config.group_rm else "sample")),
        ("--data-source-path", config.data_source_path, ("args",)),
        ("--buffer-filter-path", config.buffer_filter_path, ("args", "rollout_id", "buffer", "num_samples")),
        ("--rollout-sample-filter-path", config.rollout_sample_filter_path, ("args", "groups")),
        ("--custom-reward-post-process-path", config.custom_reward_post_process_path, ("args", "samples")),
    ]
    named += [("--rollout-sample-hook-path", path, ("args", "sample")) for path in config.rollout_sample_hook_path]
    for flag, path, params in named:
        if path is not None and path not in _BUILT_IN:
            load_function(path, what=flag, params=params)
