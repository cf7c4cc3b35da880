"""Dataset files of `--eval-config` and `--prompt-config`, and the datasets that flags and files define.

Invariant: each dataset read from a file has a name, a path and only known keys, each of the right type and in range;
anything else is a `UserError` that names the place. A file is YAML, TOML or JSON with a section `eval`, a section
`train`, or both; `datasets` is a list, or a mapping from names to datasets. Weights are relative shares of the prompts:

    eval:
      defaults: {n_samples_per_eval_prompt: 4, temperature: 0.6}
      datasets:
        - {name: aime, path: aime.jsonl, rm_type: math, max_response_len: 4096}
    train:
      defaults: {label_key: answer}
      datasets:
        - {name: math, path: math.jsonl, weight: 2, rm_type: math}
        - {name: chat, path: chat.jsonl, custom_rm_path: judge.py:score, max_response_len: 512}

Precedence for each value of a dataset: its own entry, the file's `defaults`, the `--eval-*` flag (evaluation only), the
rollout's flag. Datasets of `--eval-prompt-data` are configured by flags only.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, TypeVar

from slime.config.config import Config, read_config_file
from slime.config.fields import Check, above, at_least, between, did_you_mean, minus_one_or_at_least
from slime.config.flags.data import OUR_DATA_SOURCES
from slime.config.flags.rollout import DEFAULT_RESPONSE_LEN, known_rm_type
from slime.errors import UserError
from slime.storage.json_types import JsonMapping, JsonObject

_SECTIONS = ("eval", "train")
_KINDS: dict[object, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    JsonObject: "a mapping",
    list[str]: "a list of texts",
    list[int]: "a list of integers",
}


def _checked(default: object, check: Check) -> Any:
    """Declare a setting whose value in a file is in a range."""
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True)
class DatasetSettings:
    """Settings of a dataset for reading, sampling and scoring; each field after `origin` is a key of its file.

    Sampling parameters that are None are those of the rollout.
    """

    name: str
    path: str
    _: KW_ONLY
    origin: str = "a plugin"
    """The flag or file that names it, for error messages."""
    input_key: str | None = None
    """None: `input`, else the only usual column name that the file has."""
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str = "tools"
    prompt_suffix: str | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: JsonObject = field(default_factory=dict)
    max_prompt_len: int | None = _checked(None, at_least(1))
    max_response_len: int | None = _checked(None, at_least(1))
    min_new_tokens: int | None = _checked(None, at_least(0))
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    rm_type: str | None = _checked(None, known_rm_type)
    custom_rm_path: str | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: JsonObject = field(default_factory=dict)

    refused_keys: ClassVar[JsonMapping] = {}
    """Keys of other datasets, with what to use instead."""

    def _given_limits(self) -> JsonObject:
        """Return the limits of a response that replace those of the rollout."""
        own = {
            "max_new_tokens": self.max_response_len,
            "min_new_tokens": self.min_new_tokens,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
        }
        return {name: value for name, value in own.items() if value is not None}


@dataclass(frozen=True)
class EvalDataset(DatasetSettings):
    """One evaluation dataset with all its settings; plugins may build one and omit any setting."""

    _: KW_ONLY
    n_samples_per_eval_prompt: int = _checked(1, at_least(1))
    temperature: float | None = _checked(None, at_least(0))
    top_p: float | None = _checked(None, between(0, 1, low_open=True))
    top_k: int | None = _checked(None, minus_one_or_at_least(1))
    skip_special_tokens: bool = False
    repetition_penalty: float | None = _checked(None, above(0))
    no_stop_trim: bool = True

    @property
    def cache_key(self) -> tuple[object, ...]:
        """The settings that determine the prompts."""
        template = (self.prompt_suffix, self.apply_chat_template, repr(self.apply_chat_template_kwargs))
        return (self.name, self.path, self.input_key, self.label_key, self.tool_key, self.metadata_key, *template)

    def inject_metadata(self, sample_metadata: JsonObject | None) -> JsonObject:
        """Return a prompt's metadata, overridden by this dataset's entries."""
        own = {} if self.rm_type is None else {"rm_type": self.rm_type}
        return {**(sample_metadata or {}), **own, **self.metadata_overrides}

    def sampling_params(self, base: JsonObject) -> JsonObject:
        """Return the rollout's sampling parameters, overridden by this dataset's values."""
        own = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
        return {
            "stop": None,
            "stop_token_ids": None,
            **base,
            "skip_special_tokens": self.skip_special_tokens,
            "no_stop_trim": self.no_stop_trim,
            **{name: value for name, value in own.items() if value is not None},
            **self._given_limits(),
        }


_SAME_FOR_ALL = "is one value for all of training, because the trainer computes with it: give {flag} instead"


@dataclass(frozen=True)
class TrainDataset(DatasetSettings):
    """One training dataset with its settings."""

    _: KW_ONLY
    weight: float = _checked(
        1.0, lambda value: None if math.isfinite(value) and value > 0 else "must be a number greater than 0"
    )

    refused_keys: ClassVar[JsonMapping] = {
        "temperature": _SAME_FOR_ALL.format(flag="--rollout-temperature"),
        "top_p": _SAME_FOR_ALL.format(flag="--rollout-top-p"),
        "top_k": _SAME_FOR_ALL.format(flag="--rollout-top-k"),
        "n_samples_per_prompt": "is one value for all datasets: give --n-samples-per-prompt instead",
        "n_samples_per_eval_prompt": "is for evaluations: give --n-samples-per-prompt instead",
    }

    @property
    def sampling_params(self) -> JsonObject:
        """The overrides of the rollout's sampling parameters."""
        return self._given_limits()


AnyDataset = TypeVar("AnyDataset", bound=DatasetSettings)


def read_datasets(path: str, kind: type[AnyDataset], flags: JsonObject, *, flag: str, section: str) -> list[AnyDataset]:
    """Read the datasets of a section of a file; values that it does not give are those of `flags`."""
    where = f"{flag} {path}"
    content = read_config_file(path, what=flag)
    content = _mapping(content.get(section, content), f"{where}: {section}")
    if other := next((name for name in _SECTIONS if name != section and name in content), None):
        raise UserError(f"{where} has no section {section}, only {other}: list its datasets under {section}: datasets")
    _refuse_unknown(content, ("defaults", "datasets"), where)
    shown = f"{where}: defaults"
    defaults = _checked_values(kind, _mapping(content.get("defaults") or {}, shown), shown)
    datasets = list(_iterate_named_datasets(content.get("datasets"), where))
    if not datasets:
        raise UserError(f"{where} has no datasets: list them under {section}: datasets, each with a name and a path")
    found = []
    for name, entries in datasets:
        origin = f"{where}, dataset {name}"
        own = _checked_values(kind, {key: value for key, value in entries.items() if key != "path"}, origin)
        file = entries.get("path")
        if not isinstance(file, str):
            raise UserError(f"{origin}: path is missing: name a .jsonl or .parquet file")
        shared = {key: value for key, value in defaults.items() if key != "custom_rm_path" or "rm_type" not in own}
        found.append(kind(name, file, origin=origin, **{**flags, **shared, **own}))
    return found


def _refuse_equal_names(datasets: Sequence[DatasetSettings], where: str) -> None:
    names = [dataset.name for dataset in datasets]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{where} has two datasets named {name}: give each its own name")


def _iterate_named_datasets(datasets: object, where: str) -> Iterator[tuple[str, JsonObject]]:
    """Yield name and entries of each dataset, from a list or a mapping."""
    if isinstance(datasets, dict):
        for name, entries in datasets.items():
            yield str(name), {"path": entries} if isinstance(entries, str) else _mapping(entries, f"{where}: {name}")
        return
    if not isinstance(datasets, list | None):
        raise UserError(f"{where}: datasets must be a list or a mapping, not {datasets!r:.80}")
    for place, one in enumerate(datasets or [], start=1):
        entries = _mapping(one, f"{where}: dataset {place}")
        name = entries.get("name")
        if not isinstance(name, str) or not name:
            raise UserError(f"{where}: dataset {place} has no name")
        yield name, {key: value for key, value in entries.items() if key != "name"}


def _checked_values(kind: type[DatasetSettings], entries: JsonObject, where: str) -> JsonObject:
    """Return the entries that are not null; refuse unknown keys, and values of another type or out of range."""
    known = {one.name: one for one in dataclasses.fields(kind) if one.name not in ("name", "path", "origin")}
    for key in entries:
        if key in kind.refused_keys:
            raise UserError(f"{where}: {key} {kind.refused_keys[key]}")
    _refuse_unknown(entries, (*known, "path", "name"), where)
    given = {key: value for key, value in entries.items() if value is not None}
    annotations = typing.get_type_hints(kind)
    for key, value in given.items():
        if key not in known:
            raise UserError(f"{where}: {key} belongs in the entry of a single dataset")
        wanted = annotations[key]
        if isinstance(wanted, types.UnionType):
            wanted = next(member for member in typing.get_args(wanted) if member is not types.NoneType)
        if not _is_of_type(value, wanted):
            raise UserError(f"{where}: {key} must be {_KINDS[wanted]}, not {value!r:.80}")
        check = known[key].metadata.get("check")
        complaint = check(value) if check else None
        if complaint:
            raise UserError(f"{where}: {key} {complaint}, not {value}")
    return given


def _is_of_type(value: object, wanted: Any) -> bool:
    if typing.get_origin(wanted) is list:
        return isinstance(value, list) and all(_is_of_type(item, typing.get_args(wanted)[0]) for item in value)
    if isinstance(value, bool):
        return wanted is bool
    return isinstance(value, int | float if wanted is float else typing.get_origin(wanted) or wanted)


def _refuse_unknown(entries: JsonObject, known: tuple[str, ...], where: str) -> None:
    for key in entries:
        if key not in known:
            raise UserError(f"{where}: unknown key {key}{did_you_mean(str(key), known)}")


def _mapping(value: object, where: str) -> JsonObject:
    if not isinstance(value, dict):
        raise UserError(f"{where} must be a mapping, not {value!r:.80}")
    return value


def evaluates(config: Config) -> bool:
    """Return whether the run has evaluation datasets."""
    return bool(config.eval_prompt_data) or config.eval_config is not None


def eval_datasets(config: Config) -> list[EvalDataset]:
    """Return all evaluation datasets of a config with derived values; raise a `UserError` for a wrong file."""
    flags: JsonObject = {
        **prompt_reading_values(config),
        "input_key": config.eval_input_key or config.input_key,
        "label_key": config.eval_label_key or config.label_key,
        "tool_key": config.eval_tool_key or config.tool_key,
        "max_prompt_len": config.eval_max_prompt_len,
        "n_samples_per_eval_prompt": config.n_samples_per_eval_prompt,
        "temperature": config.eval_temperature,
        "top_p": config.eval_top_p,
        "top_k": config.eval_top_k,
        "max_response_len": config.eval_max_response_len,
        "min_new_tokens": config.eval_min_new_tokens,
        "stop": config.rollout_stop,
        "stop_token_ids": config.rollout_stop_token_ids,
        "skip_special_tokens": bool(config.rollout_skip_special_tokens),
    }
    datasets = [
        EvalDataset(name=name, path=path, origin=f"--eval-prompt-data {name}", **flags)
        for name, path in config.eval_prompt_data
    ]
    where = "--eval-prompt-data"
    if config.eval_config is not None:
        where = f"--eval-config {config.eval_config}"
        datasets += read_datasets(config.eval_config, EvalDataset, flags, flag="--eval-config", section="eval")
    _refuse_equal_names(datasets, where)
    return datasets


PROMPT_CONFIG_FLAG = "--prompt-config"


def train_datasets(config: Config) -> list[TrainDataset]:
    """Return the datasets of `--prompt-config`, none without it; raise a `UserError` for a wrong file."""
    if config.prompt_config is None:
        return []
    flags = prompt_reading_values(config)
    found = read_datasets(config.prompt_config, TrainDataset, flags, flag=PROMPT_CONFIG_FLAG, section="train")
    _refuse_equal_names(found, f"{PROMPT_CONFIG_FLAG} {config.prompt_config}")
    return found


def all_datasets(config: Config) -> list[TrainDataset | EvalDataset]:
    """Return the training and evaluation datasets that files and flags list."""
    return [*train_datasets(config), *eval_datasets(config)]


def prompt_files(config: Config) -> list[str]:
    """Return all files with training prompts."""
    if config.prompt_config is not None:
        return [dataset.path for dataset in train_datasets(config)]
    return [] if config.prompt_data is None else [config.prompt_data]


def reads_prompts(config: Config) -> bool:
    """Return whether one of slime's data sources reads the training prompts."""
    own_source = config.disable_rollout_global_dataset or config.data_source_path not in OUR_DATA_SOURCES
    return not own_source and config.load_debug_rollout_data is None


def mixture_contradictions(config: Config) -> Iterator[str]:
    """Yield one sentence for each flag that contradicts `--prompt-config`."""
    if config.prompt_config is None:
        return
    if config.prompt_data is not None:
        yield (
            f"--prompt-data and {PROMPT_CONFIG_FLAG} both name prompts: list the prompt file in "
            f"{PROMPT_CONFIG_FLAG}, and drop --prompt-data"
        )
    if config.disable_rollout_global_dataset:
        yield (
            f"--disable-rollout-global-dataset reads no prompts, but {PROMPT_CONFIG_FLAG} names some: drop one of them"
        )
    if config.live_judge_path is not None:
        yield f"{PROMPT_CONFIG_FLAG} is not read by a live service, whose prompts come from clients: drop it"
    most = config.rollout_max_response_len or DEFAULT_RESPONSE_LEN
    for dataset in train_datasets(config):
        limit = dataset.max_response_len
        if limit is not None and limit > most:
            yield (
                f"{dataset.origin}: max_response_len {limit} is more than --rollout-max-response-len {most}, the "
                "limit of all datasets: raise that limit"
            )
        if limit is not None and config.overlong_buffer_len:
            yield (
                f"{dataset.origin}: max_response_len cannot be used with --overlong-buffer-len, whose penalty begins "
                "at one length for all datasets: drop one of them"
            )


def prompt_reading_values(config: Config) -> JsonObject:
    """Return the flags' values for reading prompts, which datasets override."""
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
