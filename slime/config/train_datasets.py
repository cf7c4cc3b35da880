"""The datasets that training draws its prompts from: the file of `--prompt-config` as a list.

Precedence for each value of a dataset: its own entry, the file's `defaults`, the rollout's flag. The file looks like
this (other forms: `slime.config.dataset_file`); weights are shares of the prompts, in relation to one another:

    train:
      defaults: {label_key: answer}
      datasets:
        - {name: math, path: math.jsonl, weight: 2, rm_type: math}
        - {name: chat, path: chat.jsonl, custom_rm_path: judge.py:score, max_response_len: 512}
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from slime.config.config import Config
from slime.config.dataset_file import READING, Entry, number, read_datasets, refuse_twins
from slime.config.eval_datasets import EvalDataset, eval_datasets
from slime.config.groups.data import OUR_DATA_SOURCES
from slime.config.groups.rollout import DEFAULT_RESPONSE_LEN

FLAG = "--prompt-config"


@dataclass(frozen=True)
class TrainDataset:
    """One dataset with all that its prompts are read, sampled and judged with; None is what the flags say."""

    name: str
    path: str
    _: KW_ONLY
    origin: str = "a plugin"
    """Where it was named, for error messages."""
    weight: float = 1.0
    input_key: str | None = None
    """None: `input`, else the only usual one that the file has."""
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str = "tools"
    prompt_suffix: str | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_prompt_len: int | None = None
    max_response_len: int | None = None
    min_new_tokens: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    rm_type: str | None = None
    custom_rm_path: str | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def sampling_params(self) -> dict[str, Any]:
        """What goes over the rollout's sampling parameters."""
        own = {
            "max_new_tokens": self.max_response_len,
            "min_new_tokens": self.min_new_tokens,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
        }
        return {name: value for name, value in own.items() if value is not None}


def _share(value: float) -> str | None:
    return None if math.isfinite(value) and value > 0 else "must be a number greater than 0"


_ENTRIES: dict[str, Entry] = {**READING, "weight": number(_share)}
_SAME_FOR_ALL = "is one value for all of training, because the trainer computes with it: give {flag} instead"
_ELSEWHERE = {
    "temperature": _SAME_FOR_ALL.format(flag="--rollout-temperature"),
    "top_p": _SAME_FOR_ALL.format(flag="--rollout-top-p"),
    "top_k": _SAME_FOR_ALL.format(flag="--rollout-top-k"),
    "n_samples_per_prompt": "is one value for all datasets: give --n-samples-per-prompt instead",
    "n_samples_per_eval_prompt": "is for evaluations: give --n-samples-per-prompt instead",
}


def train_datasets(config: Config) -> list[TrainDataset]:
    """The datasets of `--prompt-config`, none without it; a `UserError` for what is wrong with the file."""
    if config.prompt_config is None:
        return []
    found = read_datasets(config.prompt_config, flag=FLAG, section="train", known=_ENTRIES, elsewhere=_ELSEWHERE)
    refuse_twins([one.name for one in found], f"{FLAG} {config.prompt_config}")
    flags = reading_flags(config)
    return [TrainDataset(one.name, one.path, origin=one.origin, **{**flags, **one.values}) for one in found]


def all_datasets(config: Config) -> list[TrainDataset | EvalDataset]:
    """What is trained on and what is evaluated on, of files and flags that list datasets."""
    return [*train_datasets(config), *eval_datasets(config)]


def prompt_files(config: Config) -> list[str]:
    """All files that prompts to train on come from."""
    if config.prompt_config is not None:
        return [dataset.path for dataset in train_datasets(config)]
    return [] if config.prompt_data is None else [config.prompt_data]


def reads_prompts(config: Config) -> bool:
    """Whether a data source of ours reads the files of prompts to train on."""
    own_source = config.disable_rollout_global_dataset or config.data_source_path not in OUR_DATA_SOURCES
    return not own_source and config.load_debug_rollout_data is None


def mixture_contradictions(config: Config) -> Iterator[str]:
    """Sentences about flags that do not go together with `--prompt-config`."""
    if config.prompt_config is None:
        return
    if config.prompt_data is not None:
        yield f"--prompt-data and {FLAG} both name prompts: make the former a dataset of the latter's file, and drop it"
    if config.disable_rollout_global_dataset:
        yield f"--disable-rollout-global-dataset reads no prompts, {FLAG} names some: drop one of them"
    if config.live_judge_path is not None:
        yield f"{FLAG} is not read by a live service, whose prompts are what clients ask: drop it"
    most = config.rollout_max_response_len or DEFAULT_RESPONSE_LEN
    for dataset in train_datasets(config):
        limit = dataset.max_response_len
        if limit is not None and limit > most:
            yield (
                f"{dataset.origin}: max_response_len {limit} is more than --rollout-max-response-len {most}, which is "
                "the most for all datasets: raise that"
            )
        if limit is not None and config.overlong_buffer_len:
            yield (
                f"{dataset.origin}: max_response_len cannot be used with --overlong-buffer-len, whose penalty begins "
                "at a length that is the same for all: drop one of them"
            )


def reading_flags(config: Config) -> dict[str, Any]:
    """How the flags have prompts read, where a dataset says nothing else."""
    return {
        "input_key": config.input_key,
        "label_key": config.label_key,
        "metadata_key": config.metadata_key,
        "tool_key": config.tool_key,
        "prompt_suffix": config.prompt_suffix,
        "apply_chat_template": config.apply_chat_template,
        "apply_chat_template_kwargs": config.apply_chat_template_kwargs,
        "max_prompt_len": config.rollout_max_prompt_len,
    }
